"""Chooses which warm engines take turns on the GPUs. While one runs, the others wait in host memory."""

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

from rloo_pipeline.artifacts.model_dims import BYTES, ModelDims
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.before_run import memory, model_inputs, speeds
from rloo_pipeline.before_run.memory import RunMemory
from rloo_pipeline.config import Config, Model
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import devices
from rloo_pipeline.training.deepspeed_internals.deepspeed_config import effective_zero_stage
from rloo_pipeline.workers import gpu_shares

PROCESS = memory.OF_REWARD_MODEL["cuda"]
"""Bytes of host memory that a CUDA worker takes in addition to its engine."""
REWARD_MODEL_START = 15.0
"""Seconds in which a reward model starts. Not measured on GPUs."""
SHARE = 0.8
"""Share of host memory that waiting engines may use; reward functions and the page cache need the rest."""


def left_out(config: Config, counts: Mapping[str, int]) -> frozenset[str]:
    """Roles that get no warm worker because host memory cannot hold all engines; their stages start their own engines.
    Empty without a GPU, and with `workers: always`.

    Args:
        config: the run's configuration.
        counts: number of workers per role.
    """
    if config.workers != "auto" or not devices.has_gpu():
        return frozenset()
    has_own_base = config.reward_model is not None and config.reward_model.own_source
    dims = _dimensions(config, "model")
    own = _dimensions(config.of_reward_model, "reward_model") if has_own_base else dims
    return _too_many(config, dims, own or dims, counts, devices.machine_bytes()) if dims else frozenset()


def _dimensions(config: Config, asset: str) -> ModelDims | None:
    """The dimensions of a model; None if the first stage will build it, or it is neither here nor on the Hub."""
    built = Path("results") / config.run / "assets" / asset
    try:
        folder = model_inputs.model_folder(config.model) or (built if config.model.build else _fetched(config.model))
        return Policy(folder).dimensions
    except (UserError, OSError, ValueError):
        return None


def _fetched(model: Model) -> Path:
    """Fetches the config.json of a Hub model, which the first stage will download in full, and returns its folder."""
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(str(model.name_or_path), "config.json", revision=model.revision)).parent


def _too_many(
    config: Config, dims: ModelDims, own: ModelDims, counts: Mapping[str, int], machine: float
) -> frozenset[str]:
    """The roles to leave out, so that the rest fit into `machine` bytes: those whose starts take the least time of a
    round.
    """
    waiting = {role: size * counts.get(role, 0) for role, size in waiting_bytes(config, dims, own).items()}
    in_rounds = config.uses_reference or config.algorithm.teacher is not None
    seconds = {
        "trainer": speeds.STARTS["update"].typical,
        "logprobs": speeds.STARTS["reference"].typical * in_rounds,
        "scorer": REWARD_MODEL_START * config.reward_models_on_gpus,
        "sampler": speeds.STARTS["rollout"].typical,
    }
    choices = (frozenset(left) for count in range(len(waiting) + 1) for left in combinations(waiting, count))
    fitting = (left for left in choices if sum(waiting[role] for role in waiting.keys() - left) <= SHARE * machine)
    return min(fitting, key=lambda left: sum(seconds[role] for role in left))


def waiting_bytes(config: Config, dims: ModelDims, own: ModelDims) -> dict[str, float]:
    """Bytes of a node's host memory that a worker's engine takes while it is off its GPU.

    Args:
        config: the run's configuration.
        dims: dimensions of the run's model.
        own: dimensions of the reward model that the run trains.
    """
    weights = dims.parameters * float(BYTES[config.model.dtype])
    nodes = config.deepspeed.nodes
    ranks = config.deepspeed.processes // nodes
    copies = 1 / nodes if effective_zero_stage(config.model.dtype, config.deepspeed.zero_stage) else ranks
    of_run = RunMemory(config, dims)
    of_trainer = ranks * (PROCESS + of_run.weights) + copies * of_run.state
    of_scorer = memory.total(memory.reward_models(config, own, "cuda"))
    waiting = {"trainer": of_trainer, "logprobs": PROCESS + weights, "scorer": of_scorer, "sampler": PROCESS + weights}
    return {role: size for role, size in waiting.items() if size and gpu_shares.can_keep(role, config, on_gpus=True)}
