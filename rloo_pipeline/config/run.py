"""A whole run: all sections, what they must agree on, and `STAGES`: which of them each stage gets.

A stage is given its sections alone (`Config.only`), and Snakemake runs it again when one that decides its result
changes, so the two can never disagree.
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
"""Names that the tables use themselves."""


class Report(Section):
    """The page at the end."""

    title: str | None = None
    """Heading of report.html; the run's name where not given."""
    note: str | None = None
    """A paragraph under the heading."""
    task_column: str | None = None
    """Column of the held-out rows that names a row's task: the page then gives each reward function task by task."""


class Container(Section):
    """The image that stages run in with `snakemake --sdm apptainer`; without that they run in the local environment."""

    image: str | None = None
    """Path or address of an image; where not given, the one that `make images` builds into images/."""
    binds: list[str] = []
    """Folders that stages see in it besides the working folder, the caches, TMPDIR, and what this configuration
    names.
    """


class Config(Section):
    """One run."""

    run: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run: its files lie in results/<run>/."""
    rounds: int = Field(ge=1)
    """Rounds of rollout, score, reference and update. A larger number goes on where a finished run ended."""
    seed: int = Field(0, ge=0)
    """Seed of everything that is drawn."""
    keep_every: int = Field(1, ge=1)
    """Policies kept for good: every n-th, and the last."""
    workers: Literal["auto", "always", "never"] = "auto"
    """Whether engines stay alive between rounds where Snakemake and its jobs are on one machine. They change no result
    and hold memory: sampler, reference and trainer at once. `auto`: where there is no GPU; `always`: there too, where
    they take turns.
    """
    report_to: list[Literal["tensorboard", "wandb", "mlflow"]] = ["tensorboard"]
    """Where the metrics of the rounds go besides metrics.json. TensorBoard's files are always written; `wandb` is a
    folder for `wandb sync` in results/<run>/wandb/, `mlflow` a store in results/<run>/mlflow/ or where
    MLFLOW_TRACKING_URI says.
    """
    data_dir: str | None = None
    """Folder that relative dataset paths are looked up in."""
    model: Model
    """The model to train."""
    dataset: Dataset
    """The prompts."""
    warmstart: Warmstart = Warmstart()
    """Policy 0."""
    checks: Checks = Checks()
    """Trial of policy 0."""
    rollout: Rollout = Rollout()
    """Sampling."""
    vllm: Vllm = Vllm()
    """Sampling engine."""
    rewards: list[Reward] = Field(min_length=1)
    """Reward functions."""
    scoring: Scoring = Scoring()
    """Processes for the reward functions."""
    algorithm: Algorithm = Algorithm()
    """RLOO."""
    update: Update = Update()
    """Optimization."""
    deepspeed: Deepspeed = Deepspeed()
    """Training engine."""
    correct: Correct = Correct()
    """Right answers."""
    evaluation: Evaluation = Evaluation()
    """Held-out evaluation."""
    gates: Gates = Gates()
    """Symptoms that a run is watched for."""
    report: Report = Report()
    """Report."""
    container: Container = Container()
    """Image."""

    @field_validator("report_to", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        """As in transformers, where `report_to: wandb` does as well."""
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _agree(self) -> Self:
        columns = [reward.column for reward in self.rewards]
        if taken := sorted(set(columns) & set(TABLE_COLUMNS)):
            raise ValueError(f"rewards: '{taken[0]}' is a column of the tables; give that function another `name`")
        if len(set(columns)) < len(columns):
            raise ValueError(
                f"rewards: two functions share a name ({', '.join(columns)}); give one a `name` of its own"
            )
        for key, name in [
            ("correct.reward", self.correct.reward),
            ("checks.format_reward", self.checks.format_reward),
            *(("evaluation.breakdown", b) for b in self.evaluation.breakdown),
            *(("gates.reward_hacking.monitors", name) for name in self.gates.reward_hacking.monitors or ()),
        ]:
            if name is not None and name not in columns:
                raise ValueError(f"{key}: no reward is named '{name}' (there are {', '.join(columns)})")
        if self.rollout.num_prompts % self.algorithm.steps_per_generation:
            raise ValueError(
                f"algorithm.steps_per_generation ({self.algorithm.steps_per_generation}) does not divide the "
                f"{self.rollout.num_prompts} prompts of a round"
            )
        if self.evaluation.every is not None and self.evaluation.every % self.keep_every:
            raise ValueError(
                f"evaluation.every ({self.evaluation.every}) is no multiple of keep_every ({self.keep_every}): the "
                "policies between are not kept"
            )
        cut, algorithm = self.rollout.cut_by, self.algorithm
        other = next((reward for reward in self.rewards if reward.weight not in (0, 1)), None)
        if algorithm.advantage in estimators("of_success") and other is not None:
            raise ValueError(
                f"algorithm.advantage: {algorithm.advantage} is of scores 0 and 1, and the reward {other.column} has "
                f"weight {other.weight:g}; give weight 1 to what decides, which must be 0 or 1, and 0 to the others"
            )
        compared = {
            "old_logps: sampler": algorithm.old_logps == "sampler",
            f"mismatch.correction: {algorithm.mismatch.correction}": algorithm.mismatch.correction != "none",
        }
        for key in (key for key, on in compared.items() if cut and on):
            raise ValueError(
                f"algorithm.{key} cannot be used with rollout.{cut}, since the sampler's log-probs are then of the cut "
                "distribution and the trainer's are not; leave one of the two out"
            )
        cache = algorithm.response_length.overlong_cache
        if cache is not None and cache > self.rollout.max_completion_length:
            raise ValueError(
                f"algorithm.response_length.overlong_cache ({cache}) exceeds rollout.max_completion_length "
                f"({self.rollout.max_completion_length})"
            )
        return self

    @property
    def trackers(self) -> list[str]:
        """What `report_to` names besides TensorBoard, each once."""
        return [name for name in dict.fromkeys(self.report_to) if name != "tensorboard"]

    @property
    def tries_model(self) -> bool:
        """Whether the model as it is is tried first, to see whether it needs SFT."""
        return self.warmstart.sft is not None and self.warmstart.train == "auto"

    @property
    def evaluated(self) -> dict[str, int]:
        """The evaluations of the run and the round of the policy that each is of, in order."""
        every = self.evaluation.every
        between = [] if every is None else range(every, self.rounds, every)
        return {"warmstart": 0, **{f"{number:05d}": number for number in between}, "final": self.rounds}

    @property
    def uses_reference(self) -> bool:
        """Whether any update needs log-probs of the reference policy."""
        return self.algorithm.beta != 0

    def only(self, stage: str) -> Self:
        """The part of the configuration that `stage` may read; touching any other section is an AttributeError."""
        part = self.model_copy()
        for section in type(self).model_fields.keys() - {*STAGES[stage].decides, *STAGES[stage].reads}:
            del part.__dict__[section]
        return part

    def params(self, stage: str) -> JSON:
        """What decides the result of `stage`, as plain JSON: when it changes, Snakemake runs the stage again."""
        made: JSON = self.model_dump(mode="json", include=set(STAGES[stage].decides), exclude=dict(STAGES[stage].but))
        if "rewards" in made:
            made["rewards"] = [reward.decides() for reward in self.rewards]
        return made


class Sections(NamedTuple):
    """The sections of the configuration that a stage gets."""

    decides: tuple[str, ...]
    """Those that its result depends on."""
    reads: tuple[str, ...] = ()
    """Those that say where and how it runs only, or what it tells people beside its result."""
    but: Mapping[str, set[str]] = {}
    """Keys of the first ones that do not."""


_LENGTHS = ("rollout", "evaluation")
"""Of these the lengths of completions are held against the model's context."""
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
