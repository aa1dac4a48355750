"""Measures the engine time that the longest completions of a round cost, with and without `rollout.token_budget`.

A simulation without a model: lengths are log-normal (median 64, σ = 1, at most 1,024: a heavy tail, in units of tokens
that do not matter), and the scheduling is that of the stage (`rollout/partial.py`). The engine runs 256 completions at
once, starts the next one when one ends, and takes the same time for a step whatever the number that runs, as decoding
that reads all weights in each step does. `python tools/bench/tail.py` prints the table, which is in
docs/generated/experiments.md.
"""

from __future__ import annotations

import heapq
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rloo_pipeline.artifacts import tables
from rloo_pipeline.config import Config
from rloo_pipeline.rollout import partial
from rloo_pipeline.rollout.requests import Completion, Request
from rloo_pipeline.seeds import derive
from rloo_pipeline.training.metrics import staleness

MINI = Path(__file__).parents[2] / ".test/config/config.yaml"
LONGEST, MEDIAN, SIGMA, AT_ONCE, ROUNDS = 1024, 64, 1.0, 256, 24
BUDGETS = (None, 512, 256, 128)


class Figures(NamedTuple):
    """Measured over the rounds after the first eight, in which the budgets fill up."""

    lost: float
    """Share of engine time after 95% of a round's requests have ended."""
    speed: float
    """Tokens per step."""
    completions: float
    """Completions that a round trains on, on average."""
    age: float
    """Rounds by which a token is older than the policy, on average."""


class Prompts:
    """As many prompts as anyone asks for."""

    def rows(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The rows of these indices."""
        return [{"prompt_id": str(index), "prompt_ids": [1]} for index in indices]


def length_of(row: dict[str, Any]) -> int:
    """Length of a completion, drawn by its prompt and sample."""
    drawn = random.Random(derive(0, row["prompt_id"], row["sample"])).lognormvariate(0.0, SIGMA)
    return min(LONGEST, max(1, round(MEDIAN * drawn)))


def sampled(request: Request, length: int) -> dict[str, Any]:
    """The columns of a completion that ends at `length`, as far as the request goes."""
    begun = len(request.begun.ids) if request.begun else 0
    end = min(length, begun + request.sampling.max_completion_length)
    return Completion([0] * end, "", [0.0] * end, "stop" if end == length < LONGEST else "length").columns()


def ends(tokens: Sequence[int]) -> list[int]:
    """The step at which each request ends."""
    running: list[int] = []
    times = []
    for count in tokens:
        begins = heapq.heappop(running) if len(running) == AT_ONCE else 0
        times.append(begins + count)
        heapq.heappush(running, begins + count)
    return sorted(times)


def simulate(budget: int | None) -> Figures:
    """Plays the rounds of a run."""
    values = yaml.safe_load(MINI.read_text())
    values["rollout"] = {"num_generations": 8, "generation_batch_size": 512, "max_completion_length": LONGEST}
    config = Config.model_validate(values)
    config = config.override({"rollout.token_budget": budget or LONGEST})  # that one cuts nothing
    lost = steps = tokens = completions = 0
    ages = []
    with tempfile.TemporaryDirectory() as folder:
        before: list[Path] = []
        for round_ in range(1, ROUNDS + 1):
            begins = range((round_ - 1) * config.rollout.num_prompts, round_ * config.rollout.num_prompts)
            groups = partial.groups_of_shard(config, Prompts(), begins, round_, 0, before)  # type: ignore[arg-type]
            pairs = zip(groups.requests(), groups.prompts_of_requests(), strict=True)
            columns = [sampled(request, length_of(row)) for request, row in pairs]
            old = [len(row["completion_ids"]) for row in groups.prompts_of_requests()]
            times = ends([len(one["completion_ids"]) - begun for one, begun in zip(columns, old, strict=True)])
            file = Path(folder) / f"{round_}.parquet"
            about = {"round": round_, "shard": 0, "seed": config.seed, "policy_round": round_ - 1}
            tables.write(file, groups.table(columns, tables.IN_SEGMENTS), tables.IN_SEGMENTS, "rollouts", **about)
            before = [file]
            if round_ > 8:
                whole = tables.read(file, "rollouts")
                lost += times[-1] - times[len(times) * 95 // 100 - 1]
                steps, completions = steps + times[-1], completions + len(whole)
                tokens += sum(len(one["completion_ids"]) for one in columns) - sum(old)
                ages.append(staleness(whole, round_))
    return Figures(
        lost / steps, tokens / steps, completions / (ROUNDS - 8), sum(age or 0.0 for age in ages) / len(ages)
    )


def main() -> None:
    """Prints the table."""
    print("| `token_budget` | engine time after 95% have ended | tokens per step | completions of a round | age |")
    print("|---|---:|---:|---:|---:|")
    for budget in BUDGETS:
        found = simulate(budget)
        name = "none" if budget is None else f"1/{LONGEST // budget} of the longest"
        print(f"| {name} | {found.lost:.0%} | {found.speed:.0f} | {found.completions:.0f} | {found.age:.2f} |")


if __name__ == "__main__":
    main()
