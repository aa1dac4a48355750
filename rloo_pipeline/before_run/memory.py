"""Estimates the peak memory of a stage, as a sum of named terms in bytes.

If training or sampling changes, only the constants below need to be refitted. The CPU constants were fitted to the peak
memory of `rloo update` and `rloo rollout` without pages of files, which Linux drops when it needs memory (measured by
tests/stages/test_plan_memory.py). The GPU constants follow DeepSpeed's and vLLM's documentation (measured by the row
`memory` of `make gpu`).
"""

from typing import NamedTuple, Self

from rloo_pipeline.artifacts.model_dims import BYTES, ModelDims
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.reward_models import folders_of
from rloo_pipeline.config import Config, Update
from rloo_pipeline.rollout.engine_arguments import EngineSettings, VisibleGpu, cache_bytes, gpu_budget
from rloo_pipeline.runtime import devices
from rloo_pipeline.training.deepspeed_internals import nvme
from rloo_pipeline.training.deepspeed_internals.deepspeed_config import effective_zero_stage

Terms = dict[str, float]
MB, GB = 1e6, 1e9
ROOM = 0.95
"""Usable share of the memory; the rest is lost to fragmentation."""

PROCESS = {"cpu": 300 * MB, "cuda": devices.IDLE["trainer"]}
"""Bytes of an update before it loads a model: interpreter and libraries; on GPUs, CUDA context and NCCL buffers."""
OF_REWARD_MODEL = {"cpu": 300 * MB, "cuda": 4 * GB}
"""Bytes of host memory of a process that a warm worker keeps, besides its model. On GPUs not measured."""
SAMPLER = 600 * MB
"""Bytes of vLLM on CPUs before it loads a model."""
KEPT = {"hidden": 6.0, "heads": 10.0, "key_value": 7.0, "intermediate": 4.5}
"""Number of values per token that a layer keeps for the backward pass, as multiples of its widths."""
KEPT_IN_FLOAT32 = {"hidden": 2.0}
"""The part of these that stays in float32 in a 16-bit model: that of the norms."""
SCORES = 8.0
"""Bytes that a layer keeps for each attention weight, if training holds them."""
LIVE = 1e9
"""Maximum number of offloaded weights that DeepSpeed holds on a GPU (its `stage3_max_live_parameters`)."""
OPTIMIZER_STATE = {"adamw": 8.0, "adamw_8bit": 2.0 + 2 * 4 / 256, "adafactor": 0.0, "muon": 4.0}
"""Bytes of optimizer state per trained parameter. An 8-bit state has a float32 scale per 256 numbers, Adafactor's rows
and columns are negligible, and Muon keeps AdamW's two moments for parameters outside the layers' matrices.
"""
STEP_SCRATCH = {
    "adamw": {"cpu": 0.0, "cuda": 0.0},
    "adamw_8bit": {"cpu": 24.0, "cuda": 0.0},
    "adafactor": {"cpu": 12.0, "cuda": 12.0},
    "muon": {"cpu": 16.0, "cuda": 16.0},
}
"""Temporary bytes of an optimizer step, per element of the largest parameter; taken from the libraries' code, not
fitted.
"""
LOGITS = 2.0
"""Number of float32 copies of the logits that exist at once."""
LIKELIEST = {"ids": 16.0, "divergence": 100.0, "tables": 8.0, "tensors": 19.0}
"""Bytes for each of a teacher's likeliest tokens (`algorithm.teacher.top_k`): its id in a micro-batch, the float64
divergence with its gradient, and on the host, the round's tables and the tensors made from them.
"""
LOGITS_AT_ONCE = {"cpu": 2**25, "cuda": 2**28}
"""Number of logits held at once, by kind of device (`training/kernels/lm_head.py`)."""


def reward_models(config: Config, own: ModelDims, device: str) -> Terms:
    """The processes of reward models on a kind of device, which a warm worker keeps, and their weights.

    Args:
        config: the run's configuration.
        own: dimensions of the model that the run trains; also taken for a model that is not on this machine yet.
        device: `cpu` or `cuda`.
    """
    terms: Terms = {"processes": 0.0}
    for reward in config.rewards:
        if reward.is_model and (reward.gpus > 0) == (device == "cuda"):
            options, processes = reward.options, reward.most_processes(config.scoring.workers)
            folder = folders_of([reward]).get(reward.column)
            dims = (folder and Policy(folder).dimensions) or own
            dtype = options.get("dtype") or {"cpu": "float32", "cuda": "bfloat16"}[device]
            terms["processes"] += processes * OF_REWARD_MODEL[device]
            terms[f"weights of {reward.column}"] = processes * float(dims.parameters * BYTES.get(dtype, 4))
    return terms if len(terms) > 1 else {}


class MicroBatch(NamedTuple):
    """The part of the largest batch that one process feeds through a model at once."""

    tokens: int
    """Number of prompt and completion tokens."""
    completion_tokens: int
    """Number of completion tokens."""
    several: bool
    """True if a step has several micro-batches, so that gradients and activations exist at the same time."""
    copies: float = 1.0
    """Tokens that attention keeps, per token: it has a copy of a shared prompt for each completion."""

    @classmethod
    def largest(cls, config: Config) -> Self:
        """One process's part of the largest micro-batch, with every prompt and completion at its maximum length."""
        completion, per_sequence = config.rollout.max_completion_length, packed_length(config)
        sequences = config.rollout.generation_batch_size / config.algorithm.steps_per_generation
        parts = config.deepspeed.sequence_parallel
        per_group = sequences * parts / config.deepspeed.processes
        size = max(1.0, min(per_group, config.deepspeed.micro_batch_tokens // per_sequence))
        return cls(
            round(size * per_sequence / parts),
            round(size * completion / parts),
            size < per_group,
            copies(config, completion),
        )


class RunMemory(NamedTuple):
    """The memory that the stages of a run take with a model, on CPUs or GPUs."""

    config: Config
    shape: ModelDims
    device: str = "cuda"
    """cpu or cuda."""

    @property
    def trained(self) -> float:
        """Number of trained parameters: all, all except a frozen vision encoder, or those of the adapter."""
        lora, shape = self.config.update.lora, self.shape
        if lora is None:
            return float(shape.parameters - (0 if self.config.model.train_vision else shape.vision))
        hidden, intermediate = shape.hidden, shape.intermediate
        pairs = 2 * (hidden + shape.heads) + 2 * (hidden + shape.key_value) + 3 * (hidden + intermediate)
        return float(shape.layers * lora.r * pairs)

    @property
    def policy(self) -> float:
        """Bytes of the weights that an update writes: all weights, or those of the adapter."""
        weights = self.shape.parameters if self.config.update.lora is None else self.trained
        return weights * self._size

    @property
    def weights(self) -> float:
        """Bytes of all weights as the trainer holds them. NF4 takes 4 bits per weight and a float32 scale per 64
        weights.
        """
        in_4_bits = _weights_in_layers(self.shape) if self.config.model.quantization else 0
        return in_4_bits * (0.5 + 4 / 64) + (self.shape.parameters - in_4_bits) * self._size

    @property
    def state(self) -> float:
        """Bytes of optimizer state and of DeepSpeed's float32 weights, over all processes."""
        return self.moments + self.trained * (4 if self._zero_stage else 0)

    @property
    def moments(self) -> float:
        """Bytes of optimizer state of all trained parameters, without float32 copies of weights."""
        name = self.config.update.optimizer
        is_muon = name == "muon" and self.config.update.lora is None
        apart = self.shape.parameters - _weights_in_layers(self.shape) if is_muon else 0
        return OPTIMIZER_STATE[name] * self.trained + (OPTIMIZER_STATE["adamw"] - OPTIMIZER_STATE["muon"]) * apart

    @property
    def _size(self) -> int:
        return BYTES[self.config.model.dtype]

    @property
    def _share(self) -> float:
        return 1 / self.config.deepspeed.processes

    @property
    def _zero_stage(self) -> int:
        return effective_zero_stage(self.config.model.dtype, self.config.deepspeed.zero_stage)

    @property
    def _process(self) -> float:
        """Bytes of a process that trains or computes log-probs, and on its GPU, of reward models that rest there."""
        models = self.config.reward_models_on_gpus if self.device == "cuda" else 0
        return PROCESS[self.device] + models * devices.IDLE["scorer"]

    def update(self, batch: MicroBatch | None = None, first: bool = False, distills: bool = True) -> Terms:
        """Memory of one update process.

        DeepSpeed keeps weights, gradients and Adam's two moments; for 16-bit models also float32 master weights and
        gradients. ZeRO 1 splits the optimizer state over processes, ZeRO 2 also the gradients, ZeRO 3 also the weights.
        The backward pass frees activations as it makes gradients, so with a single micro-batch per step, gradients
        count only as far as they exceed activations and logits.

        Args:
            batch: the micro-batch; the largest one if None.
            first: True for the first update, which has no optimizer state yet while activations exist.
            distills: False for other kinds of training, which have no teacher.
        """
        config, learned, on_gpu = self.config, self.trained, self.device == "cuda"
        batch, offload = batch or MicroBatch.largest(config), config.deepspeed.offload
        of_state, of_gradients, of_weights = (self._share if self._zero_stage >= least else 1.0 for least in (1, 2, 3))
        gradients = learned * self._size * of_gradients
        sums = learned * (4 if self._size == 2 else 0) * of_gradients
        optimizer = self.state * of_state + sums
        weights = self.weights * of_weights
        if on_gpu and offload.optimizer is not None:
            optimizer = sums if self._zero_stage < 3 else 0.0
        if on_gpu and offload.parameters is not None:
            weights = min(float(self.shape.parameters), LIVE) * self._size
        forward = {"activations": self.activations(batch), "logits": self.logits(batch)}
        if distills := distills and config.algorithm.teacher_top_k > 0:
            forward["teacher's tokens"] = self._likeliest(batch)
        freed = 0.0 if batch.several else total(forward)
        scratch = STEP_SCRATCH[config.update.optimizer][self.device] * _largest_parameter(config.update, self.shape)
        if on_gpu and offload.on_disk:  # DeepSpeed's gradients pass through scratch memory in float32
            scratch += learned * 4 * self._share
        if first:
            optimizer = max(0.0, gradients + optimizer + scratch - freed)
            gradients = scratch = 0.0
        return {
            "process": self._process,
            "weights": weights,
            "optimizer": optimizer,
            **forward,
            "gradients beyond these": max(0.0, gradients - freed, gradients + scratch - total(forward)),
            **(self._teacher_tables() if distills and not on_gpu else {}),
        }

    def offloaded(self) -> Terms:
        """Host memory that one GPU update process takes for offloaded data."""
        terms, shape, learned, share = self._teacher_tables(), self.shape, self.trained, self._share
        offload = self.config.deepspeed.offload
        largest = shape.hidden * max(shape.intermediate, shape.heads, shape.vocabulary) * share
        if offload.optimizer == "nvme":
            terms["buffers"] = nvme.BUFFERS * 4 * min(nvme.SUB_GROUP + largest, learned * share)
            terms["gradients"] = learned * 4 * share
        elif offload.optimizer is not None:
            terms["optimizer"] = self.state * share
            # DeepSpeed's float32 gradients of the step and, under ZeRO 3, their sums
            terms["gradients"] = learned * (8 if self._zero_stage == 3 else 4) * share
        if offload.parameters == "nvme":
            terms["buffers"] += nvme.READ * 2 * (largest + nvme.ALIGNED)
        elif offload.parameters is not None:
            terms["weights"] = self.weights * share
        if self.config.deepspeed.gradient_checkpointing == "offload":
            terms["inputs of layers"] = self._layer_inputs(MicroBatch.largest(self.config))
        return terms

    def on_disk(self) -> Terms:
        """Bytes that one GPU update process keeps on its node's disk."""
        learned = self.trained * self._share
        return {name: nvme.WRITTEN[name] * learned for name, place in self.config.deepspeed.offload if place == "nvme"}

    def reference(self, batch: MicroBatch | None = None) -> Terms:
        """Memory for log-probs without gradients: weights, activations of one layer, logits."""
        batch = batch or MicroBatch.largest(self.config)
        share = self._share if self.config.deepspeed.splits_weights else 1
        return {
            "process": self._process,
            "weights": self.shape.parameters * self._size * share,
            "activations": self._layer(batch),
            "logits": self.logits(batch),
        }

    def activations(self, batch: MicroBatch) -> float:
        """Bytes of activations for the backward pass; with checkpointing, the inputs of all layers and one full
        layer.
        """
        if not self.config.deepspeed.recomputes:
            return self.shape.layers * self._layer(batch)
        offloads = self.device == "cuda" and self.config.deepspeed.gradient_checkpointing == "offload"
        return self._layer(batch) + (0 if offloads else self._layer_inputs(batch))

    def _layer_inputs(self, batch: MicroBatch) -> float:
        """Bytes of the inputs of all layers."""
        return float(batch.tokens * self.shape.layers * self.shape.hidden * self._size)

    def _layer(self, batch: MicroBatch) -> float:
        """Bytes of one layer's activations, including attention weights of whole sequences if it holds them."""
        kept = batch.tokens * self._layer_bytes(batch.copies)
        if not self.shape.holds_scores:
            return kept
        sequences = batch.completion_tokens / self.config.rollout.max_completion_length
        return kept + SCORES * sequences * self.config.longest_sequence**2 * self.shape.query_heads

    def _layer_bytes(self, copies: float) -> float:
        """Bytes per token that a layer keeps, without attention weights. Attention keeps queries, keys, values and
        outputs of `copies` tokens per token.
        """
        widths = self.shape._asdict()
        kept = sum(float(multiple * widths[name]) for name, multiple in KEPT.items())
        kept += (copies - 1) * 2 * (self.shape.heads + self.shape.key_value)
        in_float32 = sum(float(multiple * widths[name]) for name, multiple in KEPT_IN_FLOAT32.items())
        return kept * self._size + in_float32 * (4 - self._size)

    def logits(self, batch: MicroBatch) -> float:
        """Bytes of float32 logits of completion tokens, with their softmax and its gradient. Only float16 holds all at
        once.
        """
        count = batch.completion_tokens * self.shape.vocabulary
        most = LOGITS_AT_ONCE[self.device] / self.config.deepspeed.sequence_parallel
        return LOGITS * 4 * (count if self.config.model.dtype == "float16" else min(count, most))

    def _likeliest(self, batch: MicroBatch) -> float:
        """Bytes of a teacher's likeliest tokens in a micro-batch. The divergence of a group of sequences is computed at
        once, on each rank that shares the micro-batch.
        """
        at_once = tokens = batch.completion_tokens * self.config.deepspeed.sequence_parallel
        if self.config.model.dtype != "float16":
            of_chunk = LOGITS_AT_ONCE[self.device] // self.shape.vocabulary
            at_once = min(tokens, max(of_chunk, self.config.rollout.max_completion_length))
        ids = LIKELIEST["ids"] * batch.completion_tokens
        return self.config.algorithm.teacher_top_k * (ids + LIKELIEST["divergence"] * at_once)

    def _teacher_tables(self) -> Terms:
        """Bytes of a teacher's likeliest tokens of a round, which each update process holds on the host."""
        rollout = self.config.rollout
        if not (values := self.config.algorithm.teacher_top_k * rollout.max_completion_length):
            return Terms()
        sampled = rollout.sampled_prompts * rollout.num_generations
        tensors = LIKELIEST["tensors"] * rollout.generation_batch_size
        return {"teacher's tables": values * (LIKELIEST["tables"] * sampled + tensors)}

    def rollout(self, card: VisibleGpu | None = None) -> Terms:
        """Memory of a rollout: for all engines on CPUs (`card` is None), or for each GPU of a tensor-parallel group."""
        settings = EngineSettings.of(self.config.model, self.config.vllm, self.config.rollout)
        longest = self.config.longest_sequence
        if card is None:
            weights = self.shape.in_sampler(settings.dtype, settings.quantization is not None)
            engine = {
                "process": SAMPLER,
                "weights": weights / settings.tensor_parallel_size,
                "KV cache": float(cache_bytes(self.shape, settings, longest)),
            }
            return {name: size * self.config.vllm.data_parallel_size for name, size in engine.items()}
        budget = gpu_budget(self.shape, settings, card, longest)
        return {
            "process": budget.engine,
            "weights": budget.weights,
            "activations": budget.activations,
            "KV cache": float(max(budget.cache, 0)),
        }

    def concurrent_sequences(self, rollout: Terms) -> float:
        """Number of full-length sequences that fit into the KV cache."""
        of_one = self.shape.cached(self.config.model.dtype) * self.config.longest_sequence
        return rollout["KV cache"] * self.config.vllm.tensor_parallel_size / of_one


def _weights_in_layers(shape: ModelDims) -> int:
    """Number of weights in the matrices of all layers, without those of experts."""
    layer = 2 * shape.hidden * (shape.heads + shape.key_value) + 3 * shape.hidden * shape.intermediate
    return min(shape.parameters, shape.layers * layer)


def _largest_parameter(update: Update, shape: ModelDims) -> float:
    """Number of elements in the largest trained parameter."""
    if update.lora is not None:
        return float(update.lora.r * max(shape.hidden, shape.intermediate))
    apart = 0 if update.optimizer == "muon" else shape.vocabulary
    return float(shape.hidden * max(shape.intermediate, shape.heads, apart))


def packed_length(config: Config) -> float:
    """Number of tokens per completion of maximum length. Samples of a prompt share its tokens, except with images."""
    shared_by = 1 if config.dataset.shows_images else config.rollout.num_generations
    return config.dataset.max_prompt_length / shared_by + config.rollout.max_completion_length


def copies(config: Config, completion: float) -> float:
    """Tokens of whole sequences per packed token, with the longest prompts and completions of this length."""
    longest = config.rollout.max_completion_length
    return (config.longest_sequence - longest + completion) / (packed_length(config) - longest + completion)


def total(terms: Terms) -> float:
    """Sum of the terms."""
    return sum(terms.values())
