"""The section `algorithm.teacher`: on-policy distillation, alone or beside rewards."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from rloo_pipeline.config.data import Model, ModelSource
from rloo_pipeline.config.rewards import Reward
from rloo_pipeline.config.sampling import Rollout


class Teacher(ModelSource):
    """On-policy distillation (Lu et al. 2025; arXiv 2306.13649): the student samples, the stage `teacher` computes a
    larger model's log-probs of the same tokens, and −`weight` times the reverse KL is each token's advantage. The
    advantage of the rewards is added to it; without any, give all rewards weight 0. Needs the student's token ids.
    """

    weight: float = Field(1.0, gt=0)
    """Factor of the reverse KL, in reward per nat."""
    discount: float = Field(0.0, ge=0, le=1)
    """Share of the KL of later tokens in a token's advantage. With 0, the default, each token counts only its own KL;
    with 1, the KL of the rest of the completion.
    """

    def of(self, model: Model) -> Model:
        """The section `model` of a run whose model would be the teacher, in the student's number format."""
        source = self.model_dump(include=set(ModelSource.model_fields))
        return model.model_copy(update={**source, "quantization": None})


def problems(teacher: Teacher | None, rollout: Rollout, rewards: list[Reward], images: bool) -> Iterator[str]:
    """A sentence for each key of other sections that cannot be used with a teacher, or without one."""
    if teacher is None:
        if all(reward.weight == 0 for reward in rewards):
            yield "rewards: all have weight 0, so nothing trains; give one a weight, or set algorithm.teacher"
        return
    if rollout.cut_by:
        yield (
            f"algorithm.teacher compares the student's distribution with the teacher's, and rollout.{rollout.cut_by} "
            "samples from a cut one; leave one of the two out"
        )
    if rollout.oversample > 1:
        yield (
            f"rollout.oversample: {rollout.oversample:g} leaves out groups of equal scores first, but these learn from "
            "algorithm.teacher too; set rollout.oversample: 1"
        )
    if images:
        yield "algorithm.teacher cannot be used with images yet (dataset.image_column); leave one of the two out"
