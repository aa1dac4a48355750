"""Rows about kinds of models: two rounds of one, with sequences longer than its windows."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from rows import Figures, RowError

MEAN = 2e-3
"""Mean difference of log-probs in float32, nats, as in tests/stages/test_model_kinds.py on a GPU."""


def kind(folder: Path, kind: str) -> Figures:
    """Rollout, update, rollout, and the same with an adapter; see tests/stages/two_rounds.py.

    Raises:
        RowError: sampler and trainer differ, an update changed nothing, or an engine took or refused a swap.
    """
    forks: Any = import_module("forks")
    two_rounds: Any = import_module("two_rounds")
    forks.use_forks = False
    outcome, facts = two_rounds.run(kind, folder), two_rounds.of(kind)
    means = [distance.mean for distance in outcome.distances]
    if min(outcome.gains) <= 1:
        raise RowError(f"an update made its completions likelier by only {min(outcome.gains):.2g} nats")
    bound = MEAN if facts.dtype == "float32" else 2 * outcome.rounding
    if not max(means) < bound:
        raise RowError(
            f"sampler and trainer differ by {max(means):.2g} nats a token on average; at most {bound:.2g} expected"
        )
    if outcome.warm is not facts.warm:
        raise RowError(f"another policy in a running engine: {outcome.refusal or 'taken, and it was to be refused'}")
    return {
        "sampler and trainer, nats a token": f"{max(means):.2g}",
        "same tokens by a new engine": str(outcome.same),
        "greedy tokens that plain transformers take": round(outcome.greedy, 3),
    }
