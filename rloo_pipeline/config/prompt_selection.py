"""Section `dataset.select`: which training prompts are used, and how often, by how hard they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from rloo_pipeline.config.section import Section


class PromptSelection(Section):
    """Choice of training prompts by pass rate, the share of right completions (`correct`). Held-out prompts stay as
    they are. See docs/difficulty.md.
    """

    pass_rate: tuple[float, float] | None = None
    """Lowest and highest pass rate of policy 0, both included, of the training prompts, such as `[0.1, 0.9]`. Default:
    all prompts.
    """
    num_generations: int = Field(8, ge=2)
    """Completions of policy 0 for each training prompt, from which the stage `difficulty` takes its pass rate. It runs
    for `pass_rate` and for `weights: static`.
    """
    weights: Literal["none", "static", "online"] = "none"
    """`none`: a round takes each prompt once before any is used again. `static`: it draws prompts with weights of p(1 −
    p), where p is the pass rate of policy 0, so prompts that the policy solves about half of the time come most often.
    `online`: the same, where the scores of earlier rounds count too.
    """

    @property
    def samples_policy_0(self) -> bool:
        """True if the pass rates of policy 0 are needed."""
        return self.pass_rate is not None or self.weights == "static"

    def _problems(self) -> Iterator[str]:
        if self.pass_rate is None and self.weights == "none":
            yield "selects nothing; set pass_rate or weights, or leave the section out"
        if self.pass_rate is None:
            return
        low, high = self.pass_rate
        if not 0 <= low <= high <= 1:
            yield f"pass_rate: [{low:g}, {high:g}] is no range of shares; give the lowest and the highest, from 0 to 1"
        if not any(low <= right / self.num_generations <= high for right in range(self.num_generations + 1)):
            yield (
                f"pass_rate: no share of {self.num_generations} completions lies in [{low:g}, {high:g}], so no prompt "
                "would be left; widen the range or raise num_generations"
            )
