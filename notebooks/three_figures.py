"""From a run to three figures: curves, the length of completions, and how rewards moved.

Run it as a program, or cell by cell. `rloo_pipeline.run("my-run.yaml", cores=4)` starts a run, and returns it.
"""

# %% a run, finished or in flight
import os

import pandas as pd
import plotly.express as px

import rloo_pipeline

run = rloo_pipeline.open_run(os.environ.get("RLOO_RUN", "results/demo"))

# %% 1: reward, held-out accuracy and KL by round
curves = run.plot()

# %% 2: lengths, and the share that was cut off
lengths = run.plot("completions/mean_length", "completions/clipped_ratio")

# %% 3: rewards of all completions, in the first round and in the last
ends = {number: run.rollouts(number).select_columns("reward").to_pandas() for number in (run.rounds[0], run.rounds[-1])}
parts = [rows.assign(round=str(number)) for number, rows in ends.items()]
rewards = px.histogram(pd.concat(parts), x="reward", color="round", barmode="group")

# %%
for name, figure in {"curves": curves, "lengths": lengths, "rewards": rewards}.items():
    figure.write_html(f"{name}.html")
