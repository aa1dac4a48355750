"""The names under which trackers get metrics: those of TRL's trainers, so that curves of both can be overlaid.

transformers writes `train/reward` and `eval/reward` to TensorBoard and W&B, and `reward` and `eval_reward` to MLflow.
"""

from collections.abc import Mapping

from rloo_pipeline.config import JSON

STEP = "train/global_step"
"""Name of the optimizer steps so far, the x-axis of TRL's curves."""


def named(metrics: Mapping[str, float | int | None], part: str) -> dict[str, float]:
    """Metrics that are not null, named as in TensorBoard and W&B.

    Args:
        metrics: metrics by their names in metrics.json, where optimizer steps are `step`.
        part: `train` or `eval`.
    """
    present = {name: value for name, value in sorted(metrics.items()) if value is not None}
    return {STEP if name == "step" else f"{part}/{name}": value for name, value in present.items()}


def in_mlflow(name: str) -> str:
    """Converts a name from `named` to the one that transformers uses in MLflow."""
    part, _, rest = name.partition("/")
    return rest if part == "train" else f"{part}_{rest}"


def eval_metrics(summary: JSON) -> dict[str, float | int | None]:
    """An evaluation's summary as metrics, under the names of TRL's training metrics, and `accuracy`."""
    rewards = {name: None if estimate is None else estimate["value"] for name, estimate in summary["rewards"].items()}
    metrics: dict[str, float | int | None] = {f"rewards/{name}/mean": rewards[name] for name in rewards}
    metrics["reward"] = metrics.pop("rewards/reward/mean")
    lengths = {name: value for name, value in summary.items() if name.startswith("completions/")}
    return {"accuracy": summary["accuracy"], **metrics, **lengths}
