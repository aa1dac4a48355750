"""Access to a run from Python: configuration, metrics, completions and policies, read from its folder on demand.

    run = rloo_pipeline.open_run("results/demo")
    run.metrics()["reward"]
    run.rollouts(10).filter(lambda row: row["advantage"] > 0)

Works for finished runs and for runs in progress. It writes nothing and loads no model.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rloo_pipeline.artifacts.files import read_artifact
from rloo_pipeline.artifacts.lineage import round_folder
from rloo_pipeline.config import JSON, Config
from rloo_pipeline.errors import UserError, did_you_mean
from rloo_pipeline.judging import run_files

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from datasets import Dataset
    from plotly.graph_objects import Figure

    from rloo_pipeline.judging.diagnosis import Symptom

REWARD, ACCURACY = "reward", "eval/accuracy"
"""Default metrics to plot, under the trackers' names."""


def open_run(folder: str | Path) -> Run:
    """Opens the run in a folder such as results/demo.

    Raises:
        UserError: the folder has no run.
    """
    return Run(Path(folder))


class Run:
    """A run, finished or in progress."""

    def __init__(self, folder: Path) -> None:
        """Reads the configuration and nothing else.

        Raises:
            UserError: the folder has no run.
        """
        self.folder = folder
        self.config: Config = run_files.read_config(folder)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, rounds done: {len(self.rounds)} of {self.config.rounds})"

    @property
    def rounds(self) -> list[int]:
        """Numbers of the finished rounds, from 1 without gaps."""
        return list(range(1, len(run_files.read(self.folder, self.config).rounds) + 1))

    def metrics(self) -> pd.DataFrame:
        """metrics.json of all finished rounds: one row per round, indexed by its number, with NaN for null. The column
        `eval/accuracy` is the held-out accuracy of the policy that the round made.
        """
        import pandas as pd

        files = run_files.read(self.folder)
        accuracies = files.accuracies()
        rounds = [{**metrics, ACCURACY: accuracies.get(number)} for number, metrics in enumerate(files.rounds, 1)]
        return pd.DataFrame(rounds, index=pd.RangeIndex(1, len(rounds) + 1, name="round"))

    def plot(self, *metrics: str) -> Figure:
        """Plots curves by round in a plotly figure, one below the other.

        Args:
            metrics: columns of `metrics`; by default reward, held-out accuracy and KL.

        Raises:
            UserError: no round has such a metric.
        """
        from plotly.subplots import make_subplots

        frame, accuracies = self.metrics(), run_files.read(self.folder).accuracies()
        names = metrics or [name for name in (REWARD, ACCURACY, "kl") if name in frame]
        for name in names:
            if name not in frame:
                lacks = f"no such metric{did_you_mean(name, frame.columns)}"
                raise UserError(f"{name}: {lacks if len(frame) else run_files.why_no_round(self.folder)}")
        figure = make_subplots(rows=len(names) or 1, shared_xaxes=True, vertical_spacing=0.06)
        for row, name in enumerate(names, 1):
            curve = accuracies if name == ACCURACY else dict(frame[name])  # policy 0 has no row
            figure.add_scatter(
                x=sorted(curve), y=[curve[number] for number in sorted(curve)], name=name, row=row, col=1
            )
            figure.update_yaxes(title_text=name, row=row, col=1)
        figure.update_xaxes(title_text="round", row=len(names) or 1, col=1)
        return figure.update_layout(title=self.config.run, showlegend=False, height=120 + 200 * len(names))

    @property
    def policies(self) -> dict[int, Path]:
        """Folders of the policies that exist, by round; 0 is the warm start."""
        folders = sorted((self.folder / "policies").glob("[0-9]" * 5))
        return {int(folder.name): folder for folder in folders}

    @cached_property
    def summary(self) -> JSON:
        """The content of summary.json.

        Raises:
            UserError: the run is not finished.
        """
        return self._json("summary.json", "the run is not finished")

    @property
    def checks(self) -> JSON:
        """checks.json: the checks of the warm start, even if they failed.

        Raises:
            UserError: the checks have not run.
        """
        failed = "warmstart/checks.failed.json"
        name = failed if (self.folder / failed).exists() else "warmstart/checks.json"
        return self._json(name, "the checks have not run")

    @property
    def symptoms(self) -> list[Symptom]:
        """The symptoms that `rloo diagnose` shows."""
        return run_files.read(self.folder).symptoms()

    def rollouts(self, number: int) -> Dataset:
        """The completions of a round, one per row, with prompts, scores and, once the update is done, the values that
        it used.

        Columns: prompt_id, sample, prompt (its text), completion, scores/<name> of each reward function, reward,
        advantage, kl, …

        Raises:
            UserError: the round has not been sampled or scored, or a table is damaged.
        """
        from rloo_pipeline.artifacts.round_tables import files_of
        from rloo_pipeline.report.run_tables import read_round

        self._files(number, "rollouts")
        folder = round_folder(self.folder, number)
        table = read_round(folder, self.config.rollout)
        for kind in ("reference", "teacher"):
            if files_of(folder, kind, self.config.rollout):
                table = table.append_column(f"{kind}_logps", self._table(number, kind)[f"{kind}_logps"])
        return _dataset(_with_prompts(table, self.folder / "prompts" / "train"))

    def scores(self, number: int) -> Dataset:
        """The scores of a round: scores/<name> of each reward function, reward, …

        Raises:
            UserError: the round has not been scored, or a table is damaged.
        """
        return _dataset(self._table(number, "scores"))

    def evaluation(self, name: str = "final") -> JSON:
        """The summary of an evaluation.

        Args:
            name: `warmstart`, `final`, or a round's number such as `00010`.

        Raises:
            UserError: the evaluation does not exist.
        """
        self._json(f"evaluation/{name}/summary.json", f"evaluations: {', '.join(self.evaluations) or 'none yet'}")
        return run_files.read_evaluation(self.folder, name)

    @property
    def evaluations(self) -> list[str]:
        """Names of the finished evaluations."""
        return sorted(file.parent.name for file in (self.folder / "evaluation").glob("*/summary.json"))

    def completions(self, name: str = "final", greedy: bool = False) -> Dataset:
        """The completions of an evaluation with prompts and scores, in the columns of `rollouts`.

        Raises:
            UserError: the table is missing or damaged.
        """
        from rloo_pipeline.artifacts.prompt_set import held_out_part
        from rloo_pipeline.report.run_tables import read_completions

        table = read_completions(self.folder, name, "greedy" if greedy else "completions")
        return _dataset(_with_prompts(table, held_out_part(self.folder / "prompts")))

    def prompts(self, part: Literal["train", "dev", "eval"] = "train") -> Dataset:
        """The prompts with all columns of the dataset, memory-mapped."""
        import datasets

        if not (folder := self.folder / "prompts" / part).exists():
            raise UserError(f"{folder}: the run has no such prompts, or none yet")
        return datasets.Dataset.load_from_disk(str(folder))

    def _table(self, number: int, kind: str) -> pa.Table:
        from rloo_pipeline.artifacts import tables

        return tables.read_all(self._files(number, kind), kind)

    def _files(self, number: int, kind: str) -> list[Path]:
        """The files of a round's table, if all exist."""
        from rloo_pipeline.artifacts.round_tables import files_of

        settings = self.config.rollout
        folder = round_folder(self.folder, number)
        files, expected = files_of(folder, kind, settings), settings.tables
        if len(files) < expected:
            raise UserError(
                f"{folder / kind}: {len(files)} of {expected} shards exist; the last finished round is "
                f"{len(self.rounds)}"
            )
        return files

    def _json(self, name: str, hint: str) -> JSON:
        file = self.folder / name
        if not file.exists():
            raise UserError(f"{file}: no such file; {hint}")
        return read_artifact(file)


def _with_prompts(table: pa.Table, prompts: Path) -> pa.Table:
    """Adds the text of each row's prompt to a table, after the keys."""
    from rloo_pipeline.artifacts import tables
    from rloo_pipeline.artifacts.prompt_set import PromptSet

    texts = PromptSet(prompts).texts(table["prompt_id"].to_pylist())
    return table.add_column(len(tables.KEYS), "prompt", [texts])


def _dataset(table: pa.Table) -> Dataset:
    """Converts a table to a dataset, without the footer."""
    import datasets

    return datasets.Dataset(table.replace_schema_metadata(None))
