"""Sections on reward functions."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, model_validator

from rloo_pipeline.config.section import JSON, Section


class Reward(Section):
    """One reward function."""

    function: str
    """`module:function` or `file.py:function`, called as TRL calls it."""
    name: str | None = None
    """Column and metric name; the function's own name where not given."""
    weight: float = 1.0
    """Weight in the sum; 0 makes it a monitor that teaches nothing."""
    options: JSON = {}
    """Further keyword arguments of the function."""
    batch: Literal["rows", "group", "all"] = "rows"
    """What a call is made of: rows that are scored each by itself (a call has the K completions of a prompt; where it
    fails or takes too long, its rows are tried one by one), a group whose completions are compared with each other and
    always stay together, or all rows of the table at once.
    """
    timeout: float = Field(60.0, gt=0, allow_inf_nan=False)
    """Seconds that a row may take; with `batch: group` or `all` a call may take so many for each of its rows. Then its
    process is killed. A call of `batch: rows` has this time as a whole before its rows are tried one by one.
    """
    on_timeout: Literal["none", "value", "fail"] = "none"
    """What a row gets that takes longer: no score, timeout_value, or the stage fails."""
    timeout_value: float | None = Field(None, allow_inf_nan=False)
    """Score of a row that took too long, where on_timeout is value."""
    on_error: Literal["fail", "none"] = "fail"
    """What an exception, or the end of the process, comes to: the stage fails and names the row, or the row has no
    score and the table says why. Wrong output (a wrong length, NaN) always fails.
    """
    gpus: int = Field(0, ge=0)
    """GPUs that the function needs. With 1 or more it is scored in a job of its own (rule `score_alone`) that asks for
    them, in one process; in checks and evaluations it has those of the job, after the sampler has left them.
    """
    threads: int = Field(1, ge=1)
    """Threads of OpenMP and the like that each of its processes may use; at most `scoring.workers` / `threads` of them
    then compute at a time.
    """
    concurrency: int = Field(32, ge=1)
    """Rows that an async function may have under way at once, in calls of a group each; at least one call."""

    @model_validator(mode="after")
    def _late_value(self) -> Self:
        if (self.on_timeout == "value") != (self.timeout_value is not None):
            raise ValueError("on_timeout: value and timeout_value go together; give both or neither")
        return self

    @model_validator(mode="after")
    def _named_like_a_folder(self) -> Self:
        if self.gpus and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", self.column):
            raise ValueError(
                f"'{self.column}' will be a folder, since gpus is given; give it a `name` of plain letters"
            )
        return self

    @property
    def column(self) -> str:
        """The name under which scores are stored."""
        return self.name or self.function.rpartition(":")[2]

    def decides(self) -> JSON:
        """The keys that a score depends on once there is one: a stage that would have failed has made none."""
        left_out = {"on_error", "threads", "concurrency"} | ({"timeout"} if self.on_timeout == "fail" else set())
        return self.model_dump(mode="json", exclude=left_out)


class Scoring(Section):
    """Where reward functions run; changes no score."""

    workers: int = Field(1, ge=1)
    """Processes that call reward functions at a time, of the job that scores: one a core. Async functions have a
    further one each.
    """
