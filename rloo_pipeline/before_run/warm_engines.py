"""Chooses which warm engines take turns on the GPUs. While one runs, the others wait in host memory."""

from pathlib import Path

from rloo_pipeline.artifacts.model_dims import BYTES, ModelDims
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.before_run import model_inputs
from rloo_pipeline.before_run.memory import RunMemory
from rloo_pipeline.config import Config, Model
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import devices
from rloo_pipeline.training.deepspeed_internals.deepspeed_config import effective_zero_stage
from rloo_pipeline.workers import gpu_shares

PROCESS = 4e9
"""Bytes of host memory that a CUDA worker takes in addition to its engine. Not measured."""
SHARE = 0.8
"""Share of host memory that waiting engines may use; reward functions and the page cache need the rest."""


def left_out(config: Config) -> frozenset[str]:
    """Roles that get no warm worker because host memory cannot hold all engines; their stages start their own engines.
    Empty without a GPU, and with `workers: always`.
    """
    if config.workers != "auto" or not devices.has_gpu():
        return frozenset()
    try:
        built = Path("results") / config.run / "assets" / "model"
        folder = model_inputs.model_folder(config.model) or (built if config.model.build else _fetched(config.model))
    except (UserError, OSError, ValueError):  # neither here nor on the Hub
        return frozenset()
    dims = Policy(folder).dimensions
    return frozenset() if dims is None else _too_many(config, dims, devices.machine_bytes())


def _fetched(model: Model) -> Path:
    """Fetches the config.json of a Hub model, which the first stage will download in full, and returns its folder."""
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(str(model.name_or_path), "config.json", revision=model.revision)).parent


def _too_many(config: Config, dims: ModelDims, machine: float) -> frozenset[str]:
    """The roles to leave out, largest first, so that the rest fit into `machine` bytes."""
    waiting = waiting_bytes(config, dims)
    left: set[str] = set()
    for role in sorted(waiting, key=lambda role: -waiting[role]):
        if sum(size for other, size in waiting.items() if other not in left) <= SHARE * machine:
            break
        left.add(role)
    return frozenset(left)


def waiting_bytes(config: Config, dims: ModelDims) -> dict[str, float]:
    """Bytes of a node's host memory that each engine takes while it is off its GPU."""
    weights = dims.parameters * float(BYTES[config.model.dtype])
    nodes = config.deepspeed.nodes
    ranks = config.deepspeed.processes // nodes
    copies = 1 / nodes if effective_zero_stage(config.model.dtype, config.deepspeed.zero_stage) else ranks
    of_run = RunMemory(config, dims)
    of_trainer = ranks * (PROCESS + of_run.weights) + copies * of_run.state
    models = [reward.options.get("model") for reward in config.rewards if reward.is_model and reward.gpus]
    of_scorer = sum(PROCESS + (_size(Path(str(model))) if model else weights) for model in models)
    waiting = {"trainer": of_trainer, "logprobs": PROCESS + weights, "scorer": of_scorer, "sampler": PROCESS + weights}
    return {role: size for role, size in waiting.items() if size and gpu_shares.can_keep(role, config, on_gpus=True)}


def _size(folder: Path) -> float:
    """Bytes of the weights in a folder; 0 for a model on the Hub, whose size is unknown."""
    return float(sum(file.stat().st_size for file in folder.glob("*.safetensors")))
