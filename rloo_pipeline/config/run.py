"""The configuration of a whole run, and the checks across its sections.

A stage gets only its own sections (`Config.only`), and Snakemake reruns it when one that decides its result changes
(`Config.params`). Both come from `STAGES`, so a stage cannot read a key without being rerun for it.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rloo_pipeline.config import image_checks, lag
from rloo_pipeline.config.algorithm import Algorithm, estimators
from rloo_pipeline.config.data import Checks, Dataset, Model, Warmstart
from rloo_pipeline.config.gates import Gates
from rloo_pipeline.config.rewards import Reward, Scoring
from rloo_pipeline.config.sampling import Correct, Evaluation, Rollout, Select, Vllm
from rloo_pipeline.config.section import JSON, Section
from rloo_pipeline.config.stages import STAGES
from rloo_pipeline.config.training import Deepspeed, Offload, Update

TABLE_COLUMNS = (
    *("prompt_id", "prompt", "prompt_ids", "sample", "completion", "completion_ids", "prompts", "completions"),
    *("sampling_logps", "finish_reason", "seed", "reward", "seconds", "error"),
    *("environment_reward", "environment_state", "environment_observation", "environments"),
    *("image_ids", "placeholder_ids"),
)
"""Columns of the tables of a run, and their names in reward functions; a dataset has no such column."""

ENVIRONMENT_REWARD = "rloo_pipeline.rewards.from_environment:environment_reward"
"""The reward function that gives what the environment of an episode did."""
RUN_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
_SPELLED_OUT = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "Ä": "Ae", "Ö": "Oe", "Ü": "Ue", "ß": "ss", "ø": "o"})


def valid_run_name(name: str) -> str:
    """The valid name of a run that is most like `name`; `my-run` if nothing of it can be kept."""
    letters = unicodedata.normalize("NFKD", name.translate(_SPELLED_OUT)).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", letters).strip("-._") or "my-run"


class Report(Section):
    """The page report.html about a run, during it and at its end."""

    title: str | None = None
    """Heading of the page. Default: the name of the run."""
    note: str | None = None
    """Paragraph under the heading."""
    task_column: str | None = None
    """Column of the held-out rows with the name of each row's task. The page then shows every reward per task."""
    every: int | None = Field(None, ge=0)
    """Write the page after the first and every n-th round too, with what is there so far; no round waits for it.
    Default: a twentieth of `rounds`, so that a run has at most 21 such pages. 0: only at the end.
    """


class Container(Section):
    """Container image of the stages, used with `snakemake --sdm apptainer`. Otherwise stages run in the local
    environment.
    """

    image: str | None = None
    """Path or URI of an image. Default: the image that `rloo images` builds in images/."""
    binds: list[str] = []
    """Additional folders to mount. The working folder, the caches, TMPDIR and the paths in this configuration are
    always mounted.
    """


class Config(Section):
    """Configuration of one run."""

    run: str = Field(json_schema_extra={"pattern": RUN_NAME.pattern})
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
    select: Select | None = None
    """Choice of a policy. Default: the last one, which `dataset.eval` is evaluated on."""
    gates: Gates = Gates()
    """Symptoms that are looked for after each round."""
    report: Report = Report()
    """Report page."""
    container: Container = Container()
    """Container image."""

    @model_validator(mode="before")
    @classmethod
    def _fill_by_lag(cls, values: Any) -> Any:
        return lag.fill(values) if isinstance(values, dict) else values

    @field_validator("run")
    @classmethod
    def _check_run_name(cls, name: str) -> str:
        if not RUN_NAME.fullmatch(name):
            raise ValueError(
                f"'{name}' cannot be the name of a run, since it names a folder and jobs: use letters without accents, "
                f"digits, '.', '_' and '-', such as '{valid_run_name(name)}'"
            )
        return name

    @field_validator("report_to", mode="before")
    @classmethod
    def _accept_one_name(cls, value: Any) -> Any:
        """`report_to: wandb` works too, as in transformers."""
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_reward_names(self) -> Self:
        columns = [reward.column for reward in self.rewards]
        if "reward" in columns:
            raise ValueError("rewards: 'reward' is the weighted sum; set another `name` for that function")
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
    def _check_select(self) -> Self:
        if self.select is not None and self.dataset.dev is None:
            raise ValueError(f"select: {self.select.by} needs rows to choose by, which none trains on; set dataset.dev")
        if self.select is not None:
            self.select.check(self.evaluation)
        return self

    @model_validator(mode="after")
    def _check_prompt_selection(self) -> Self:
        if self.dataset.select is not None and self.correct.reward is None:
            names = ", ".join(reward.column for reward in self.rewards)
            raise ValueError(
                "dataset.select: a pass rate needs a definition of a right completion; set correct.reward to the "
                f"reward that decides ({names}), and correct.threshold to the value from which on it is right"
            )
        return self

    @model_validator(mode="after")
    def _check_lag(self) -> Self:
        lag.check(self.rollout, self.algorithm)
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        given = next((reward.column for reward in self.rewards if reward.function == ENVIRONMENT_REWARD), None)
        if given is not None and self.rollout.environment is None:
            raise ValueError(f"rewards: {given} is what the environment gives; set rollout.environment")
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
        if self.rollout.refill and not algorithm.filter_zero_variance:
            raise ValueError(
                f"rollout.refill: {self.rollout.refill} replaces the groups that algorithm.filter_zero_variance drops, "
                "which is false; set it to true, or use rollout.oversample"
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

    @model_validator(mode="after")
    def _check_optimizers(self) -> Self:
        zero_stage, processes = self.deepspeed.zero_stage, self.deepspeed.processes
        split = processes > 1 and (zero_stage or self.model.dtype != "float32")
        optimizers = {"update.optimizer": self.update.optimizer}
        if self.warmstart.sft is not None:
            optimizers["warmstart.sft.optimizer"] = self.warmstart.sft.optimizer
        for key, name in optimizers.items():
            if name != "adamw" and zero_stage == 3:
                raise ValueError(f"{key}: {name} cannot be used with deepspeed.zero_stage: 3; set 2 or less, or adamw")
            if name != "adamw" and self.deepspeed.offload.optimizer is not None:
                raise ValueError(f"{key}: {name} cannot be used with deepspeed.offload; leave that out, or set adamw")
            if name in {"adafactor", "muon"} and split:
                raise ValueError(
                    f"{key}: {name} needs whole matrices, and ZeRO, which 16-bit formats always use, splits them over "
                    "processes; set deepspeed.processes: 1, or model.dtype: float32 with deepspeed.zero_stage: 0, or "
                    "use adamw or adamw_8bit"
                )
        return self

    @model_validator(mode="after")
    def _check_images(self) -> Self:
        image_checks.check(self.model_dump())
        return self

    @model_validator(mode="after")
    def _check_quantization(self) -> Self:
        name = self.model.quantization
        if name is not None and self.update.lora is None:
            raise ValueError(f"model.quantization: {name} needs update.lora, as 4-bit weights are not trained; set it")
        if name is not None and self.deepspeed.zero_stage == 3:
            raise ValueError(f"model.quantization: {name} cannot be used with deepspeed.zero_stage: 3; set 2 or less")
        if name is not None and self.warmstart.sft is not None:
            raise ValueError(
                f"model.quantization: {name} cannot be used with warmstart.sft, which trains all weights; do that in "
                "a run without it, and name its policy in model.name_or_path"
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
    def deciding(self) -> JSON:
        """The reward function that decides what is right, with its options, and no weight."""
        columns = {reward.column: reward for reward in self.rewards}
        chosen = columns[self.correct.reward] if self.correct.reward else self.rewards[0]
        return {key: value for key, value in chosen.decides().items() if key != "weight"}

    @property
    def candidates(self) -> dict[str, int]:
        """The evaluations whose policies `select` chooses from, and their rounds."""
        return {name: round_ for name, round_ in self.evaluated.items() if round_ > 0}

    @property
    def held_out_each_round(self) -> int:
        """Number of held-out prompts that the sampler of each round also answers."""
        settings, completions = self.evaluation, self.rollout.sampled_prompts * self.rollout.num_generations
        deciding = next((reward for reward in self.rewards if reward.column == self.correct.reward), self.rewards[0])
        count = min(completions // 20, 200) if settings.each_round is None else settings.each_round
        return 0 if deciding.gpus else min(count, settings.num_prompts or count)

    def page_is_due(self, round_: int) -> bool:
        """Whether the page is written after this round, which is not the last one."""
        every = -(-self.rounds // 20) if self.report.every is None else self.report.every
        return every > 0 and (round_ == 1 or round_ % every == 0)

    @property
    def measures_difficulty(self) -> bool:
        """Whether policy 0 samples all training prompts, for their pass rates."""
        return self.dataset.select is not None and self.dataset.select.samples_policy_0

    @property
    def updates_pass_rates(self) -> bool:
        """Whether the scores of a round change how the prompts of later rounds are drawn."""
        return self.dataset.select is not None and self.dataset.select.weights == "online"

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
        if params.get("dataset") == {"select": None}:  # a run without it stays as it was before there was the key
            del params["dataset"]
        if params.get("deepspeed", {}).get("offload") == Offload().model_dump():
            del params["deepspeed"]["offload"]
        return params
