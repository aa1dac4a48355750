"""select: the evaluations of runs on `dataset.dev` → selection.json: the best round of each run, and the best arm."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.judging.run_files import read_config, read_evaluation
from rloo_pipeline.runtime.progress import say

DIGITS = 12
"""Digits that two values must share to count as equal: sums in a different order can differ in the last digit."""


class Best(NamedTuple):
    """The best policy of a run."""

    run: str
    """The run's folder, relative to the experiment's; `.` for a single run."""
    seed: int
    round: int
    value: float
    policy: str
    """Digest of the policy."""


def select(output: Path, runs: Sequence[str]) -> None:
    """Chooses the best round of each run, and the best arm, as configured in `Select`.

    Args:
        output: selection.json, in the folder of the experiment or of the single run.
        runs: folders of the runs below that one, <arm>/<seed> in the order of the arms; `.` for a single run.

    Raises:
        UserError: an evaluation is missing or damaged, or evaluations have different numbers of prompts.
    """
    arms: dict[str, list[Best]] = {}
    prompts: dict[int, str] = {}
    for name in runs:
        run = output.parent / name
        config = read_config(run)
        best, count = best_of(config, run, name)
        prompts.setdefault(count, name)
        arms.setdefault(name.partition("/")[0], []).append(best)
    if len(prompts) > 1:
        (few, run_of_few), (many, run_of_many), *_ = sorted(prompts.items())
        raise UserError(
            f"{output.parent}: {run_of_few} was evaluated on {few} prompts of dataset.dev and {run_of_many} on "
            f"{many}; give all arms the same rows"
        )
    means = {arm: round(sum(best.value for best in bests) / len(bests), DIGITS) for arm, bests in arms.items()}
    chosen = max(means, key=means.__getitem__)  # the first if several are equal
    facts: dict[str, Any] = {
        "by": config.select.by if config.select else None,
        "prompts": next(iter(prompts)),
        "arm": chosen if chosen != "." else None,
        "value": means[chosen],
        "arms": means if chosen != "." else {},
        "tied": [arm for arm, mean in means.items() if mean == means[chosen] and arm != chosen],
        "best": {arm: [best._asdict() for best in bests] for arm, bests in arms.items()},
        "chosen": [best._asdict() for best in arms[chosen]],
    }
    write_json(output, facts)
    arm_label = f"{chosen}, " if facts["arm"] else ""
    rounds = ", ".join(str(best.round) for best in arms[chosen])
    say(f"chosen by {facts['by']}: {arm_label}round {rounds}; {means[chosen]:.1%} on {facts['prompts']} prompts of dev")


def best_of(config: Config, run: Path, name: str) -> tuple[Best, int]:
    """The best round of a run (the earliest of equal ones), and the number of prompts that it was evaluated on."""
    evaluations = {number: read_evaluation(run, of_round) for of_round, number in config.candidates.items()}
    if config.select is None:
        raise UserError(f"{run / 'config.yaml'}: select: not set, so no policy can be chosen; set it")
    values = {number: round(config.select.value(evaluation), DIGITS) for number, evaluation in evaluations.items()}
    first = max(sorted(values), key=values.__getitem__)
    best = Best(name, config.seed, first, values[first], evaluations[first]["policy"])
    return best, evaluations[first]["prompts"]
