"""Section `checks`: the checks of policy 0. Each check has its limits in its decorator, in rloo_pipeline/checks/."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

# isort: off
# in the order of checks.json
from rloo_pipeline.checks import special_tokens, engines, pair_checks, probe_samples, group_stats  # noqa: F401

# isort: on
from rloo_pipeline.checks.registry import CHECKS, Check, Limit, summary
from rloo_pipeline.config.section import Section, with_fields


def _key(check: Check) -> tuple[Any, Any]:
    """Type and default of a check's limits, for pydantic."""
    description = f"{summary(check.measure)} Bad {check.bad} the limits."
    if not isinstance(check.warn, Mapping):
        return Limit, Field((check.warn, check.fail), description=description)
    defaults = ", ".join(f"{json.dumps(check.limit(dtype))} in {dtype}" for dtype in check.warn)
    return Limit | None, Field(None, description=f"{description} Default: {defaults}.")


@with_fields({name: _key(check) for name, check in CHECKS.items()})
class CheckLimits(Section):
    """Limits of the checks of policy 0, as `[warn, fail]`. `null` turns that limit off."""

    def by_name(self, dtype: str) -> dict[str, Limit]:
        """`(warn, fail)` of every check. A limit that is not set is the check's default for `dtype`."""
        limits = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: CHECKS[name].limit(dtype) if limit is None else limit for name, limit in limits.items()}


class Checks(Section):
    """Checks of policy 0 before the first round: of its samples and scores on probe prompts, of tokens, of
    log-probs.
    """

    probe_prompts: int = Field(64, ge=1)
    """Number of training prompts that policy 0 answers for the checks, each `rollout.num_generations` times."""
    demonstrations: int = Field(64, ge=1)
    """Number of demonstrations on which perplexity is measured: this many from the training set, and as many held-out
    ones.
    """
    format_reward: str | None = None
    """Name of a reward (0 or 1) for the format of a completion. Default: the reward named `format`, if there is one."""
    limits: CheckLimits = CheckLimits()
    """Limits at which each check warns and fails."""
    accept: list[str] = []
    """Names of checks whose failure does not stop the run. checks.json and the report still show it."""

    def _problems(self) -> Iterator[str]:
        for name in self.accept:
            if name not in CHECKS:
                yield f"accept: no check is named '{name}' (there are {', '.join(CHECKS)})"
