"""The top level of a run's configuration: its sections and the keys beside them."""

import re
import unicodedata
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from rloo_pipeline.config import lag
from rloo_pipeline.config.algorithm import Algorithm
from rloo_pipeline.config.check_limits import Checks
from rloo_pipeline.config.data import Dataset, Model, Warmstart
from rloo_pipeline.config.evaluation import Correct, Evaluation, Select
from rloo_pipeline.config.gates import Gates
from rloo_pipeline.config.rewards import Judge, Reward, RewardModel, Scoring
from rloo_pipeline.config.sampling import Rollout, Vllm
from rloo_pipeline.config.section import OR_ONE, Section
from rloo_pipeline.config.training import Deepspeed, Update

Tracker = Literal["tensorboard", "wandb", "mlflow"]
TENSORBOARD: Tracker = "tensorboard"
"""Each update writes its files, so it has no module in trackers/."""
RUN_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,244}$")
EXCHANGE = re.compile(r"^(shared|node|[/$].+)$")
_SPELLED_OUT = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "Ä": "Ae", "Ö": "Oe", "Ü": "Ue", "ß": "ss", "ø": "o"})


def valid_run_name(name: str) -> str:
    """Turns `name` into a valid name for a run, with few changes; `my-run` if none of it can be kept."""
    letters = unicodedata.normalize("NFKD", name.translate(_SPELLED_OUT)).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", letters)[:245].strip("-._") or "my-run"


def check_run_name(name: str) -> str:
    """Returns the name if it can be that of a run; otherwise raises ValueError."""
    if not RUN_NAME.fullmatch(name):
        raise ValueError(
            f"'{name}' cannot be the name of a run, since it names a folder and jobs: use at most 245 letters "
            f"without accents, digits, '.', '_' and '-', such as '{valid_run_name(name)}'"
        )
    return name


def check_exchange(place: str) -> str:
    """Returns the place if policies can be kept there; otherwise raises ValueError."""
    if not EXCHANGE.fullmatch(place):
        raise ValueError(
            f"'{place}' is not a place for policies; write shared, node, or a path that begins with / or $"
        )
    return place


class Report(Section):
    """The page report.html of a run, written during the run and at its end."""

    title: str | None = None
    """Heading of the page. Default: the name of the run."""
    every: int | None = Field(None, ge=0)
    """Also write the page after the first and every n-th round, with the results so far; no round waits for it.
    Default: a twentieth of `rounds`, so that a run has at most 21 such pages. 0: only at the end.
    """


class Container(Section):
    """Container image of the stages, used with `snakemake --sdm apptainer`. Otherwise stages run in the local
    environment.
    """

    image: str | None = None
    """Path or URI of an image. Default: the image that `rloo images` builds in images/."""
    binds: list[str] = []
    """Additional folders to mount. The working folder, the caches, TMPDIR and the paths in this configuration, except
    those in `options` and `build_options`, are always mounted.
    """


class RunKeys(Section):
    """The keys of `Config`."""

    run: Annotated[str, AfterValidator(check_run_name)] = Field(json_schema_extra={"pattern": RUN_NAME.pattern})
    """Name of the run. Its files are in `results/<run>/`."""
    rounds: int = Field(ge=1, le=99_999)
    """Number of rounds; a round is rollout, score, reference and update. Raise it to continue a finished run."""
    seed: int = Field(0, ge=0)
    """Random seed of the run: model building, prompt order, sampling, training."""
    reproducible: bool = False
    """On GPUs, give the same bytes after a kill and for any shards and batches, as CPUs always do: vLLM samples with
    batch-invariant kernels, and torch trains with deterministic ones. Both are slower. The run records its GPU models
    and refuses to continue on others.
    """
    keep_every: int = Field(1, ge=1)
    """Keep the policy of every n-th round, and the last one. Others are deleted once no job needs them."""
    exchange: Annotated[str, AfterValidator(check_exchange)] = Field(
        "shared", json_schema_extra={"pattern": EXCHANGE.pattern}
    )
    """Storage for policies that are not kept (`keep_every`), on their way from the trainer to the samplers. `shared`:
    the run's folder. `node`: the nodes' memory (/dev/shm). A path: that folder, on a disk of each node. Kept policies
    always go into the run's folder. Policies that are lost in a kill are trained again from the tables of their rounds.
    """
    workers: Literal["auto", "always", "never"] = "auto"
    """Keep engines loaded between rounds if Snakemake and its jobs run on one machine. On GPUs, the engines take turns
    and wait in host memory; with `auto`, those that do not fit there start in each round. Workers do not change
    results, but they need memory for sampler, reference, trainer and reward model at the same time.
    """
    report_to: Annotated[list[Tracker], OR_ONE] = [TENSORBOARD]
    """Trackers that get the metrics of each round, besides metrics.json. TensorBoard files are always written. `wandb`
    writes an offline folder `results/<run>/wandb/` for `wandb sync`. `mlflow` writes to MLFLOW_TRACKING_URI if that is
    set, otherwise to `results/<run>/mlflow/`.
    """
    functions: Literal["ask", "keep", "take"] = "ask"
    """How to treat your functions (rewards, environments, tools, generators, estimators) that were edited after the run
    began. A run copies their files into `results/<run>/functions/`, and its jobs use the copies. `ask`: stop with an
    error that lists what would run again. `keep`: continue with the copies. `take`: copy the files again and rerun what
    depends on them.
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
    reward_model: RewardModel | None = None
    """Reward model to train from preferences before the rounds. Off by default."""
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
    judge: Judge | None = None
    """Judge that compares the final policy's completions with the warm start's. Off by default."""
    select: Select | None = None
    """Selection of a policy. Default: the last one, evaluated on `dataset.eval`."""
    gates: Gates = Gates()
    """Symptoms to look for after each round."""
    report: Report = Report()
    """Report page."""
    container: Container = Container()
    """Container image."""

    @model_validator(mode="before")
    @classmethod
    def _fill_by_lag(cls, values: Any) -> Any:
        return lag.fill(values) if isinstance(values, dict) else values
