"""The configuration of a whole run, the checks across its sections, and `STAGES`: the sections of each stage.

A stage gets only its own sections (`Config.only`), and Snakemake reruns it when one that decides its result changes
(`Config.params`). Both come from `STAGES`, so a stage cannot read a key without being rerun for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from rloo_pipeline.config.algorithm import Algorithm, estimators
from rloo_pipeline.config.data import Checks, Dataset, Model, Warmstart
from rloo_pipeline.config.gates import Gates
from rloo_pipeline.config.rewards import Reward, Scoring
from rloo_pipeline.config.sampling import Correct, Evaluation, Rollout, Vllm
from rloo_pipeline.config.section import JSON, Section
from rloo_pipeline.config.training import Deepspeed, Update

TABLE_COLUMNS = (
    *("prompt_id", "prompt", "prompt_ids", "sample", "completion", "completion_ids", "prompts", "completions"),
    *("sampling_logps", "finish_reason", "seed", "reward", "seconds", "error"),
)
"""Columns of the tables of a run; a reward cannot have one of these names."""


class Report(Section):
    """The page report.html at the end of a run."""

    title: str | None = None
    """Heading of the page. Default: the name of the run."""
    note: str | None = None
    """Paragraph under the heading."""
    task_column: str | None = None
    """Column of the held-out rows with the name of each row's task. The page then shows every reward per task."""


class Container(Section):
    """Container image of the stages, used with `snakemake --sdm apptainer`. Otherwise stages run in the local
    environment.
    """

    image: str | None = None
    """Path or URI of an image. Default: the image that `make images` builds in images/."""
    binds: list[str] = []
    """Additional folders to mount. The working folder, the caches, TMPDIR and the paths in this configuration are
    always mounted.
    """


class Config(Section):
    """Configuration of one run."""

    run: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run. Its files are in results/<run>/."""
    rounds: int = Field(ge=1, le=99_999)
    """Number of rounds; a round is rollout, score, reference and update. Raise it to continue a finished run."""
    seed: int = Field(0, ge=0)
    """Random seed of the run: model building, prompt order, sampling, training."""
    keep_every: int = Field(1, ge=1)
    """Keep the policy of every n-th round, and the last one. The others are deleted when no job needs them any more."""
    workers: Literal["auto", "always", "never"] = "auto"
    """Whether engines stay loaded between rounds when Snakemake and its jobs run on one machine. `auto`: only on
    machines without a GPU. `always`: also with GPUs, where the engines take turns. Workers change no result and hold
    memory for sampler, reference and trainer at the same time.
    """
    report_to: list[Literal["tensorboard", "wandb", "mlflow"]] = ["tensorboard"]
    """Trackers that get the metrics of each round, besides metrics.json. TensorBoard files are always written. `wandb`
    writes an offline folder results/<run>/wandb/ for `wandb sync`. `mlflow` writes to MLFLOW_TRACKING_URI if that is
    set, otherwise to results/<run>/mlflow/.
    """
    data_dir: str | None = None
    """Folder in which relative dataset paths are looked up. Default: the working folder."""
    model: Model
    """The model to train."""
    dataset: Dataset
    """Training and evaluation prompts."""
    warmstart: Warmstart = Warmstart()
    """Starting policy (policy 0)."""
    checks: Checks = Checks()
    """Checks of policy 0 before the first round."""
    rollout: Rollout = Rollout()
    """Sampling of completions."""
    vllm: Vllm = Vllm()
    """Resources of the sampling engine."""
    rewards: list[Reward] = Field(min_length=1)
    """Reward functions."""
    scoring: Scoring = Scoring()
    """Processes for the reward functions."""
    algorithm: Algorithm = Algorithm()
    """Policy-gradient algorithm."""
    update: Update = Update()
    """Optimizer and learning rate."""
    deepspeed: Deepspeed = Deepspeed()
    """Resources of the training engine."""
    correct: Correct = Correct()
    """Definition of a right completion."""
    evaluation: Evaluation = Evaluation()
    """Held-out evaluation."""
    gates: Gates = Gates()
    """Symptoms that are looked for after each round."""
    report: Report = Report()
    """Report page."""
    container: Container = Container()
    """Container image."""

    @field_validator("report_to", mode="before")
    @classmethod
    def _accept_one_name(cls, value: Any) -> Any:
        """`report_to: wandb` works too, as in transformers."""
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_reward_names(self) -> Self:
        columns = [reward.column for reward in self.rewards]
        if reserved := sorted(set(columns) & set(TABLE_COLUMNS)):
            raise ValueError(
                f"rewards: '{reserved[0]}' is a column of the tables; set another `name` for that function"
            )
        if len(set(columns)) < len(columns):
            raise ValueError(f"rewards: two functions share a name ({', '.join(columns)}); set a `name` for one")
        for key, name in [
            ("correct.reward", self.correct.reward),
            ("checks.format_reward", self.checks.format_reward),
            *(("evaluation.breakdown", name) for name in self.evaluation.breakdown),
            *(("gates.reward_hacking.monitors", name) for name in self.gates.reward_hacking.monitors or ()),
        ]:
            if name is not None and name not in columns:
                raise ValueError(f"{key}: no reward is named '{name}' (there are {', '.join(columns)})")
        return self

    @model_validator(mode="after")
    def _check_counts(self) -> Self:
        steps, every, cache = (
            self.algorithm.steps_per_generation,
            self.evaluation.every,
            self.algorithm.response_length.overlong_cache,
        )
        if self.rollout.num_prompts % steps:
            raise ValueError(
                f"algorithm.steps_per_generation ({steps}) does not divide the {self.rollout.num_prompts} prompts of a "
                "round"
            )
        if every is not None and every % self.keep_every:
            raise ValueError(
                f"evaluation.every ({every}) is not a multiple of keep_every ({self.keep_every}), so some of these "
                "policies are not kept; change one of the two"
            )
        if cache is not None and cache > self.rollout.max_completion_length:
            raise ValueError(
                f"algorithm.response_length.overlong_cache ({cache}) exceeds rollout.max_completion_length "
                f"({self.rollout.max_completion_length})"
            )
        return self

    @model_validator(mode="after")
    def _check_algorithm(self) -> Self:
        cut, algorithm = self.rollout.cut_by, self.algorithm
        weighted = next((reward for reward in self.rewards if reward.weight not in (0, 1)), None)
        if algorithm.advantage in estimators("of_success") and weighted is not None:
            raise ValueError(
                f"algorithm.advantage: {algorithm.advantage} needs scores 0 and 1, and the reward {weighted.column} "
                f"has weight {weighted.weight:g}; set weight 1 for the reward that decides, which must be 0 or 1, and "
                "weight 0 for the others"
            )
        compares_logps = {
            "old_logps: sampler": algorithm.old_logps == "sampler",
            f"mismatch.correction: {algorithm.mismatch.correction}": algorithm.mismatch.correction != "none",
        }
        for key in (key for key, is_set in compares_logps.items() if cut and is_set):
            raise ValueError(
                f"algorithm.{key} cannot be used with rollout.{cut}: the sampler's log-probs are those of the cut "
                "distribution and the trainer's are not; leave one of the two out"
            )
        return self

    @property
    def trackers(self) -> list[str]:
        """Trackers in `report_to` other than TensorBoard, without duplicates."""
        return [name for name in dict.fromkeys(self.report_to) if name != "tensorboard"]

    @property
    def tries_model(self) -> bool:
        """Whether the checks run on the untrained model first, to decide whether it needs SFT."""
        return self.warmstart.sft is not None and self.warmstart.train == "auto"

    @property
    def evaluated(self) -> dict[str, int]:
        """Names of the evaluations, in order, and for each the round whose policy it evaluates."""
        every = self.evaluation.every
        between = [] if every is None else range(every, self.rounds, every)
        return {"warmstart": 0, **{f"{number:05d}": number for number in between}, "final": self.rounds}

    @property
    def uses_reference(self) -> bool:
        """Whether updates need log-probs of the reference policy."""
        return self.algorithm.beta != 0

    def only(self, stage: str) -> Self:
        """A copy with the sections that `stage` may read; access to any other section raises AttributeError."""
        copy = self.model_copy()
        for section in type(self).model_fields.keys() - {*STAGES[stage].decides, *STAGES[stage].reads}:
            del copy.__dict__[section]
        return copy

    def params(self, stage: str) -> JSON:
        """Everything that decides the result of `stage`, as plain JSON. Snakemake reruns the stage when it changes."""
        params: JSON = self.model_dump(mode="json", include=set(STAGES[stage].decides), exclude=dict(STAGES[stage].but))
        if "rewards" in params:
            params["rewards"] = [reward.decides() for reward in self.rewards]
        return params


class Sections(NamedTuple):
    """Sections of the configuration that a stage gets."""

    decides: tuple[str, ...]
    """Sections that its result depends on."""
    reads: tuple[str, ...] = ()
    """Sections that only affect where and how it runs, or what it reports besides its result."""
    but: Mapping[str, set[str]] = {}
    """Keys of `decides` sections that do not affect the result."""


_LENGTHS = ("rollout", "evaluation")
"""Sections whose completion lengths are checked against the context of the model."""
_OTHERS = {"evaluation": {"every", "harness"}}
_JUDGING = set(Checks.model_fields) - {"probe_prompts", "probe_num_generations"}
_MEMORY = set(Deepspeed.model_fields) - {"processes", "zero_stage", "communication_data_type"}
_HARNESS_ALONE = {"evaluation": set(Evaluation.model_fields) - {"harness"}}

STAGES: Mapping[str, Sections] = {
    "stage-assets": Sections(("seed", "data_dir", "model", "dataset", "warmstart"), (*_LENGTHS, "update")),
    "prompts": Sections(("dataset", "model"), _LENGTHS),
    "warmstart": Sections(("seed", "model", "dataset", "warmstart"), (*_LENGTHS, "deepspeed", "update")),
    "probe": Sections(
        ("seed", "model", "rollout", "rewards", "checks"), ("run", "scoring", "vllm"), {"checks": _JUDGING}
    ),
    "checks": Sections(
        ("seed", "model", "dataset", "warmstart", "rollout", "rewards", "checks"), ("correct", "deepspeed")
    ),
    "rollout": Sections(("seed", "model", "rollout"), ("run", "vllm")),
    "score": Sections(("rewards",), ("scoring",)),
    "reference": Sections(("model", "rollout"), ("deepspeed",)),
    "update": Sections(
        ("seed", "model", "rollout", "algorithm", "update", "deepspeed"), ("run",), {"deepspeed": _MEMORY}
    ),
    "evaluate": Sections(
        ("seed", "model", "rollout", "rewards", "correct", "evaluation"), ("run", "scoring", "vllm"), _OTHERS
    ),
    "distance": Sections(("seed", "model", "evaluation"), ("deepspeed",), _OTHERS),
    "stage-harness": Sections(("evaluation",), (), _HARNESS_ALONE),
    "harness": Sections(("seed", "model", "evaluation"), ("vllm",), _HARNESS_ALONE),
    "gate": Sections((), ("rewards", "gates")),
    "report": Sections(("run", "rounds", "seed", "rewards", "evaluation", "correct", "gates", "report")),
}
