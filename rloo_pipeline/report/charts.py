"""The charts of one run's metrics and of several runs' metrics, as charts.toml defines them; figures.py draws them."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rloo_pipeline.config import Config


class Chart(NamedTuple):
    """Curves that share an axis."""

    title: str
    caption: str
    lines: Mapping[str, str]
    """Metric in metrics.json → label. One run's chart has all of them, a chart of several runs only the first."""
    band: tuple[str, str] | None = None
    """Metrics that bound the shaded area: (lower, upper), or (middle, half width) with `spread`."""
    band_of: int = 0
    """Index of the line whose colour the shaded area takes."""
    spread: bool = False
    tickformat: str = ""
    from_zero: bool = True
    """True if the y-axis starts at 0."""
    log: bool = False
    """True if the y-axis is logarithmic. Values of 0 and below are then not drawn."""
    only_changing: bool = False
    """True if the chart is left out when its values never change."""
    height: int = 230
    """Height in pixels, without a legend."""

    @property
    def first_metric(self) -> str:
        """The metric that is drawn for several runs."""
        return next(iter(self.lines))


CHARTS: Mapping[str, Mapping[str, Chart]] = {
    page: {name: Chart(**fields) for name, fields in of_page.items()}
    for page, of_page in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}
"""The charts of charts.toml, by page and name."""


def charts(config: Config) -> list[Chart]:
    """The charts of a run."""
    functions = Chart(
        "Reward functions",
        "Mean of each function; a function of weight 0 is only monitored.",
        {f"rewards/{r.column}/mean": f"{r.column}, weight {r.weight:g}" for r in config.rewards},
    )
    actions = "tokens" if config.algorithm.importance_sampling_level == "token" else "completions"
    effect = "weight was cut" if config.algorithm.clip == "cispo" else "gradient was removed"
    kl = config.algorithm.kl
    in_loss, older = kl.placement == "loss", config.rollout.lag or config.rollout.token_budget
    measured = f"Distance of the {'policy in training' if in_loss else 'sampling policy'} from policy 0"
    if older and kl.estimator == "k1" and (in_loss or config.algorithm.old_logps == "trainer"):
        measured = "KL from policy 0 of the latest policy on samples of older ones, which can be below 0"
    values = {"measured": measured, "estimator": kl.estimator, "actions": actions, "effect": effect}
    reward, *others = (chart._replace(caption=chart.caption.format(**values)) for chart in CHARTS["run"].values())
    return [reward, functions, *others]


def shared_charts(functions: Sequence[str]) -> list[Chart]:
    """The charts of several runs.

    Args:
        functions: names of the reward functions that decide what is right in one of the runs.
    """
    deciding = [
        Chart(
            f"Reward function {name}",
            "Mean over the round’s completions; this function decides what counts as right.",
            {f"rewards/{name}/mean": name},
        )
        for name in functions
    ]
    reward, *others = CHARTS["runs"].values()
    return [reward, *deciding, *others]
