"""The section `algorithm.teacher`: on-policy distillation, alone or beside rewards."""

import re
from collections.abc import Iterable, Iterator

from pydantic import Field

from rloo_pipeline.config.data import ModelSource
from rloo_pipeline.errors import UserError

COLUMN = "teacher"
"""Column of the training rows with the name of the teacher for each row, if there are several."""
NAME = re.compile(r"[A-Za-z0-9_-]+")


class Teacher(ModelSource):
    """On-policy distillation (Lu et al. 2025; arXiv 2306.13649): the student samples, the stage `teacher` computes a
    larger model's log-probs of the same tokens, and −`weight` times the reverse KL is each token's advantage. The
    advantage from the rewards is added; to train on the teacher alone, give all rewards weight 0. Needs the student's
    token ids.
    """

    models: dict[str, ModelSource] = {}
    """Several teachers by name, instead of one. The column `teacher` of the training rows names the teacher for
    each row.
    """
    weight: float = Field(1.0, gt=0)
    """Factor of the reverse KL, in reward per nat."""
    discount: float = Field(0.0, ge=0, le=1)
    """Discount factor for the KL of later tokens in a token's advantage. With 0, each token counts only its own KL;
    with 1, that of the whole rest of the completion.
    """
    top_k: int | None = Field(None, ge=1, le=1024)
    """Compare distributions instead of sampled tokens: the teacher's `top_k` likeliest tokens at each position, with
    all others lumped together. `weight` times this divergence is then added to the loss, with its exact gradient, and
    not to the advantage. Writes 8 · `top_k` bytes for each sampled token.
    """
    beta: float = Field(1.0, ge=0, le=1)
    """Divergence of `top_k` (GKD's β, as in TRL): 1 is the reverse KL(student‖teacher), 0 the forward
    KL(teacher‖student), and a value between them the generalized Jensen–Shannon divergence.
    """

    def _problems(self) -> Iterator[str]:
        if not self.models:
            yield from super()._problems()
        elif self.changed(*ModelSource.model_fields):
            yield f"models names the teachers; leave out {', '.join(ModelSource.model_fields)} beside it"
        if self.top_k is not None and self.discount:
            yield "discount counts the KL of later tokens in an advantage, but top_k has none; leave one of the two out"
        if self.top_k is None and self.beta != 1:
            yield f"beta: {self.beta:g} needs the teacher's distribution, and sampled tokens give beta: 1; set top_k"
        for name in self.models:
            if not NAME.fullmatch(name):
                yield f"models: the name '{name}' has characters other than letters, digits, '-' and '_'; change it"

    @property
    def sources(self) -> dict[str, ModelSource]:
        """The teachers by name; a single one has an empty name."""
        return self.models or {"": self}


def asset_of(name: str) -> str:
    """The name of a teacher in assets.json, and of its folder if it is built."""
    return f"teacher-{name}" if name else "teacher"


def key_of(name: str) -> str:
    """The key of a teacher in the configuration."""
    return f"algorithm.teacher.models.{name}" if name else "algorithm.teacher"


def require_vocabulary(top_k: int, vocabulary: int, teacher: str) -> None:
    """Raises UserError if a teacher has fewer tokens than `top_k`."""
    if top_k > vocabulary:
        raise UserError(f"algorithm.teacher.top_k ({top_k}) exceeds the {vocabulary} tokens of {teacher}; lower it")


def require_teachers(teacher: Teacher | None, names: Iterable[object], place: str) -> None:
    """Checks the column `teacher` of rows.

    Args:
        teacher: the section.
        names: the values of the column.
        place: where the rows are, for the message.

    Raises:
        UserError: a value is not the name of a teacher.
    """
    if teacher is None or not teacher.models:
        return
    for name in names:
        if name not in teacher.models:
            raise UserError(
                f"{place}: the column '{COLUMN}' has {name!r:.40}, which is not one of algorithm.teacher.models "
                f"({', '.join(teacher.models)}); correct it, or add that teacher"
            )
