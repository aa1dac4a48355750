"""Sections `rewards`, `judge`, `scoring` and `reward_model`."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rloo_pipeline.config.data import ModelSource, Source
from rloo_pipeline.config.section import JSON, Reference, Section

REWARD_MODEL = "rloo_pipeline.rewards.model:reward_model"
"""The reward function that scores with a reward model."""


class Reward(Section):
    """One reward function. The reward of a completion is the weighted sum over all functions."""

    function: Reference
    """`module:function` or `file.py:function`, called with TRL's arguments for reward functions."""
    name: str | None = None
    """Name of its column `scores/<name>` and of its metrics. Default: the name of the function."""
    weight: float = 1.0
    """Weight in the sum. A function of weight 0 is recorded but has no effect on training (a monitor)."""
    options: JSON = {}
    """Extra keyword arguments for the function."""
    batch: Literal["rows", "group", "all"] = "rows"
    """Completions that one call gets. `rows`: the K completions of a prompt, scored independently; if the call fails or
    times out, they are retried one by one. `group`: the K completions of a prompt, always together, because they are
    compared with each other. `all`: all rows of the table.
    """
    timeout: float = Field(60.0, gt=0)
    """Time limit per row in seconds; at the limit the worker process is killed. With `batch: group` or `all`, a call
    gets this time for each of its rows. With `batch: rows`, a call gets it once for all its rows, and each row that is
    retried alone gets it again.
    """
    on_timeout: Literal["none", "fail"] | Annotated[float, Field(strict=True)] = "none"
    """Outcome for a row that exceeds the time limit. `none`: no score. `fail`: the stage fails. A number: this
    score.
    """
    on_error: Literal["fail", "none"] = "fail"
    """Outcome of an exception or a crash of the worker process. `fail`: the stage fails and names the row. `none`: the
    row gets no score, and the column `error` of the scores says why. Invalid output (wrong length, NaN) always fails.
    """
    gpus: int = Field(0, ge=0)
    """GPUs that the function needs. With 1 or more it runs in a separate job (rule `score_alone`) that requests them,
    in one process. In the checks and evaluations it uses the GPUs of that job, after the sampler has released them.
    """
    threads: int = Field(1, ge=1)
    """Threads (OpenMP and similar) that each worker process may use. At most `scoring.workers` / `threads` processes
    compute at the same time.
    """
    concurrency: int = Field(32, ge=1)
    """Maximum number of rows that an async function processes at the same time, in calls of one group each. At least
    one call is always allowed.
    """

    def _problems(self) -> Iterator[str]:
        if self.gpus and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", self.column):
            characters = "letters, digits, '.', '_' and '-'"
            yield f"'{self.column}' names a folder, since gpus is set; set a `name` of {characters}"

    @property
    def column(self) -> str:
        """Name of the reward in tables and metrics."""
        return self.name or self.function.rpartition(":")[2]

    def most_processes(self, limit: int) -> int:
        """Maximum number of processes that may compute at the same time within `limit` threads. A model on a GPU is
        loaded once.
        """
        return 1 if self.batch == "all" or self.gpus else max(1, limit // self.threads)

    @property
    def is_model(self) -> bool:
        """True if it scores with a reward model. Its calls leave nothing in their process but the model."""
        return self.function == REWARD_MODEL

    @property
    def uses_own_model(self) -> bool:
        """True if it scores with the reward model that the run makes."""
        return self.is_model and "model" not in self.options

    def decides(self) -> JSON:
        """The keys that scores depend on, without those that only decide whether the stage fails."""
        no_effect = {"on_error", "threads", "concurrency"} | ({"timeout"} if self.on_timeout == "fail" else set())
        return self.model_dump(mode="json", exclude=no_effect)


class Judge(Reward):
    """A function that compares the final policy's held-out completions with those of the warm start, called as reward
    functions are. It also gets `other_completions` to compare with, and returns a number from 0 (worse) to 1 (better)
    for each, or None. Every pair is judged in both orders; `summary.json` has the win rate. See docs/evaluation.md.
    """

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from self.unused(("weight",), "on a judge; set weights of rewards")
        if self.gpus:
            yield "gpus: a judge runs without GPUs; let it ask a service"
        if isinstance(self.on_timeout, float) and not 0 <= self.on_timeout <= 1:
            yield f"on_timeout: {self.on_timeout:g} is not a verdict; give one from 0 (worse) to 1 (better)"
        if self.is_model:
            yield "function: a reward model compares no completions; make it a reward: summary.json has its win rate"


class Scoring(Section):
    """Worker processes of the reward functions. Does not change scores."""

    workers: int = Field(1, ge=1)
    """Number of processes in a scoring job that call reward functions, one per CPU core. Each async function has one
    process more.
    """

    @property
    def memory_mb(self) -> int:
        """Memory that a scoring job requests on its first attempt."""
        return 3000 + 1000 * self.workers


class RewardModel(ModelSource):
    """Reward model (sequence classification, one output) that the run trains from preferences with the Bradley–Terry
    loss before its rounds. The reward `rloo_pipeline.rewards.model:reward_model` scores with it if its option `model`
    is not set. Without `name_or_path` and `build`, training starts from the model of the run.
    """

    train: Source
    """Preferences in TRL's format: columns `chosen` and `rejected`, with the prompt in both or in a column `prompt`, as
    text or messages; and optionally `margin`, by which the reward of `chosen` should be higher.
    """
    eval: Source | None = None
    """Held-out preferences for the checks. Default: those of a tenth of the prompts in `train`, drawn with the seed."""
    num_train_epochs: int = Field(1, ge=1)
    """Passes over the preferences."""
    batch_size: int = Field(32, ge=1)
    """Pairs per optimizer step."""
    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate, which decays linearly to 0."""
    warmup_steps: int = Field(0, ge=0)
    """As `update.warmup_steps`. It must be less than the number of steps."""
    max_length: int = Field(1024, ge=1)
    """Maximum length of a conversation in tokens. Pairs with a longer one are dropped, as in TRL; the log says how
    many.
    """
    center_rewards_coefficient: float = Field(0.0, ge=0)
    """Weight of (r_chosen + r_rejected)² in the loss, which keeps rewards near 0 (arXiv 2312.09244)."""

    def _problems(self) -> Iterator[str]:
        if self.name_or_path is not None and self.build is not None:
            yield "give at most one of name_or_path and build"

    @property
    def own_source(self) -> bool:
        """True if training starts from a different model than the run's."""
        return self.name_or_path is not None or self.build is not None


def problems(section: RewardModel | None, rewards: list[Reward]) -> Iterator[str]:
    """A sentence for each key of other sections that conflicts with the section, or needs it."""
    users = [reward for reward in rewards if reward.uses_own_model]
    if section is None:
        if users:
            yield (
                f"rewards: {users[0].column} names no model; set its option model to a folder, or train one from "
                "preferences (reward_model)"
            )
        return
    if not users:
        yield (
            "reward_model: no reward uses it; add the reward rloo_pipeline.rewards.model:reward_model without the "
            "option model, or leave the section out"
        )
    for reward in users:
        for option in {"chat_template_kwargs", "output", "revision"} & reward.options.keys():
            yield f"rewards: {reward.column}: reward_model is trained without {option}; leave the option out"
