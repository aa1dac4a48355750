"""Everything that replaces parts of vLLM, or reaches into the weights and caches of its engine.

vLLM computes the rank of each sampled token within the vocabulary, which nothing here reads, and compiles that code
with PyTorch: 3 s at each engine start, and a C++ compiler on every node. `import_vllm` replaces the ranks with zeros.

Some of vLLM's modules import torchvision, for one function on sizes (Qwen-VL) or for the name of a class (Gemma 3). If
it is missing, `register` imports them with empty modules in its place. CPU kernels that are wrong or missing are
replaced by `rotate_heads`, `leave_experts_to_cpus` and `attend_within_images`.

vLLM's reload leaves copies of some weights stale; `reload_weights` renews them. For adapters, vLLM finds layers by the
last part of their names, fuses some (`q_proj`, `k_proj` and `v_proj` into `qkv_proj`), and silently drops modules that
none of its layers takes. So we compare the modules after the adapter is loaded. On CPUs, vLLM answers a request without
an adapter from the adapter that the engine holds, if the adapter is on the LM head or another request of the batch uses
it. So such an engine gets no requests without it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from rloo_pipeline.artifacts.model_files import module_counts
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.errors import IncompatibleEngine, UserError, one_line
from rloo_pipeline.runtime import devices, guard
from rloo_pipeline.runtime.import_shims import hidden_packages
from rloo_pipeline.runtime.progress import announcing, say
from rloo_pipeline.transformers_internals import optional_parts, tokenizer_file

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

SWITCH = "VLLM_ENABLE_V1_MULTIPROCESSING"
"""Variable that is 1 if vLLM's engine has a process of its own."""
IMAGE_MODULES = {
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Gemma3ForConditionalGeneration": "gemma3_mm",
}
"""vLLM's modules of image models, by architecture."""
TORCHVISION = [f"torchvision{rest}" for rest in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")]
UNUSED = ("scipy", "opentelemetry")
"""Packages that vLLM imports for sound and for traces, if they are there."""
ADVICE = "leave these modules out of update.lora.target_modules, or train all weights"


def import_vllm() -> ModuleType:
    """Imports vLLM with a sampler that, for an engine in this process, reports 0 as the rank of each token.

    Raises:
        UserError: the installed vLLM is not the version whose internals this package uses.
    """
    guard.require("vllm")
    with announcing("importing vLLM"):
        tokenizer_file.prepare_tokenizers()
        vllm = import_module("vllm")
        with hidden_packages(*UNUSED):
            replace_ranks()
            import_module("vllm.tracing")
        if devices.SLICE in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
            count_slices_as_gpus()
        return vllm


def prepare(policy: Policy) -> None:
    """Makes the replacements that a policy needs, for an engine in this process."""
    on_cpu, shows_images = devices.device_type() == "cpu", policy.image_kind is not None
    if shows_images:
        register(policy.config["architectures"][0])
    if on_cpu:
        rotate_heads()
    if on_cpu and shows_images:
        attend_within_images()
    if on_cpu and policy.is_adapter:
        leave_experts_to_cpus()


def replace_ranks() -> None:
    """Makes vLLM's sampler return zeros [tokens] for the ranks of sampled log-probs [tokens, 1] in those of [tokens,
    vocabulary].
    """
    sampler: Any = import_module("vllm.v1.sample.sampler")
    sampler.batched_count_greater_than = lambda logps, _: logps.new_zeros(logps.shape[0]).long()


def count_slices_as_gpus() -> None:
    """Makes vLLM take a MIG slice for the GPU that it is a part of.

    NVML counts the slices of each GPU, and vLLM takes the number of a slice for that of a GPU, which a job often cannot
    see (vllm#41776). vLLM inspects a model in another process, without this replacement, so here it does in this one.
    """
    platform = type(import_module("vllm.platforms").current_platform)
    of_gpu = platform.device_control_id_to_physical_device_id

    def index(name: str) -> int:
        return devices.gpu_of_slice(name) if name.startswith(devices.SLICE) else int(of_gpu(name))

    platform.device_control_id_to_physical_device_id = staticmethod(index)
    registry: Any = import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda inspect: inspect()


def register(architecture: str) -> None:
    """Registers an architecture of IMAGE_MODULES from this process; vLLM would otherwise import it in another one."""
    if architecture not in IMAGE_MODULES or not optional_parts.lacks_torchvision():
        return
    optional_parts.prepare_processors()
    with _empty_modules():
        module = import_module(f"vllm.model_executor.models.{IMAGE_MODULES[architecture]}")
    registry: Any = import_module("vllm").ModelRegistry
    registry.register_model(architecture, getattr(module, architecture))


@contextmanager
def _empty_modules() -> Iterator[None]:
    """A block in which torchvision's modules can be imported, but are empty."""
    modules = {name: ModuleType(name) for name in TORCHVISION}
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(modules[parent], last, module)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def import_engine() -> None:
    """Imports everything that an engine needs, in advance."""
    import_vllm()
    import_module("vllm.entrypoints.llm")


def rotate_heads() -> None:
    """Makes vLLM on CPUs rotate queries in PyTorch: its kernel is right for queries [tokens, heads · size], but wrong
    for [tokens, heads, size], which latent attention (MLA) has.
    """

    def forward_cpu(kernel: Any, self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        return (self.forward_native if query.dim() > 2 else partial(kernel, self))(positions, query, key)

    _replace(import_module("vllm.model_executor.layers.rotary_embedding.base").RotaryEmbedding, forward_cpu)


def _replace(owner: Any, function: Callable[..., Any]) -> None:
    """Replaces vLLM's function or method of the same name, once in a process; `function` gets it as first argument."""
    original = getattr(owner, function.__name__)
    if original.__module__ != __name__:

        def replacement(*arguments: Any, **named: Any) -> Any:
            return function(original, *arguments, **named)

        setattr(owner, function.__name__, replacement)


def leave_experts_to_cpus() -> None:
    """Makes vLLM choose its CPU kernel for experts under LoRA too, where it would choose Triton's. An adapter must not
    be on the experts themselves.
    """

    def select_unquantized_moe_backend(select: Any, moe_config: Any) -> Any:
        moe_config.is_lora_enabled = False
        return select(moe_config)

    module = import_module("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method")
    _replace(module, select_unquantized_moe_backend)


def attend_within_images() -> None:
    """Makes vLLM on CPUs attend in both directions within an image, for models that do (Gemma 3): its kernel attends
    causally everywhere.

    The kernel can attend in both directions to the end of a sequence. So a prompt is passed as several sequences that
    share a cache: one that ends with each image, and one for each text between images.
    """

    def build(old: Any, self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        return old(self, common_prefix_len, split_at_images(common_attn_metadata), fast_build)

    _replace(import_module("vllm.v1.attention.backends.cpu_attn").CPUAttentionMetadataBuilder, build)


def split_at_images(batch: Any) -> Any:
    """Splits the sequences in vLLM's description of a batch (CommonAttentionMetadata) into parts that attend in one
    way. Returns it unchanged if no new token is in an image.
    """
    import torch

    if not any((batch.mm_req_doc_ranges or {}).values()):
        return batch
    ends, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    parts = [
        (row, *part)
        for row in range(batch.num_reqs)
        for part in _parts(lengths[row] - ends[row + 1] + ends[row], lengths[row], batch.mm_req_doc_ranges.get(row, ()))
    ]
    if all(causal for *_, causal in parts):
        return batch
    rows, starts, stops, causal = (torch.tensor(column, dtype=torch.int32) for column in zip(*parts, strict=True))
    return replace(
        batch,
        num_reqs=len(parts),
        query_start_loc=torch.cat([rows.new_zeros(1), (stops - starts).cumsum(0, dtype=torch.int32)]),
        seq_lens=stops,
        block_table_tensor=batch.block_table_tensor.index_select(0, rows),
        causal=causal,
    )


def _parts(first: int, length: int, images: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, bool]]:
    """Splits the new tokens of a sequence into parts: start, end, and True if the part attends causally.

    Args:
        first: position of the first new token; those before are in the cache.
        length: length of the sequence.
        images: positions of the first and the last token of each image.
    """
    for start, last in sorted(images):
        end = min(last + 1, length)
        if end <= first:
            continue
        if first < start:
            yield first, min(start, length), True
        if start < length:
            yield max(first, start), end, False
        first = max(first, end)
    if first < length:
        yield first, length, True


def request_of(policy: Policy, number: int) -> LoRARequest:
    """A request for a policy's adapter, under an id that the engine has not seen."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"{policy.folder.name}-{number}", number, str(policy.folder))


def load_adapter(llm: LLM, request: LoRARequest) -> None:
    """Loads an adapter into an engine.

    Raises:
        UserError: vLLM refuses the adapter, or does not apply all of its modules.
    """
    guard.require("vllm")
    folder = Path(request.lora_path)
    try:
        llm.llm_engine.add_lora(request)
    except Exception as error:
        raise UserError(f"{folder}: vLLM does not serve this adapter ({one_line(error)}); {ADVICE}") from error
    left = {name for names in llm.apply_model(partial(_not_applied, number=request.lora_int_id)) for name in names}
    if left:
        raise UserError(
            f"{folder}: vLLM has no layers for the adapter's {module_counts(left)}, and would sample from a policy "
            f"without them; {ADVICE}"
        )


def _not_applied(model: Any, number: int) -> list[str]:
    """Names of a loaded adapter's modules that no layer of the engine's model has taken."""
    manager = model.lora_manager
    adapter = manager.get_adapter(number)
    taken = {id(manager._get_lora_layer_weights(adapter, name)) for name in manager.modules}
    return [name for name, weights in adapter.loras.items() if id(weights) not in taken]


def replace_weights(llm: LLM, policy: Policy, lora: LoRARequest | None) -> LoRARequest | None:
    """Loads a policy in place of another one. If `lora` is the other one's adapter, returns the request for the new
    one.

    Raises:
        IncompatibleEngine: see `reload_weights`.
        UserError: see `load_adapter`.
    """
    if lora is None:
        reload_weights(llm, policy.folder)
        return None
    llm.llm_engine.remove_lora(lora.lora_int_id)
    request = request_of(policy, lora.lora_int_id + 1)  # under an id that it knows, vLLM serves the old adapter
    load_adapter(llm, request)
    return request


def reload_weights(llm: LLM, folder: Path) -> None:
    """Loads the full model in `folder` into an engine that holds a different one with the same configuration.

    Raises:
        IncompatibleEngine: vLLM fails, or leaves experts out, as it does for gpt-oss.
    """
    llm.apply_model(_reset_packed_experts)
    try:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        llm.apply_model(_repack_lm_head)
    except Exception as error:  # any exception: a new engine loads the policy differently
        raise _refusal(f"vLLM fails to load other weights into an engine ({error or type(error).__name__})") from error
    if not_loaded := [name for names in llm.apply_model(_experts_left_out) for name in names]:
        raise _refusal(f"vLLM does not load experts such as {not_loaded[0]} into a running engine")


def _refusal(why: str) -> IncompatibleEngine:
    say(f"{why}, so the policy gets a new engine")
    return IncompatibleEngine("weights of another policy that vLLM cannot replace")


def _reset_packed_experts(model: Any) -> None:
    """Makes a reload pack the weights of all experts again. On CPUs vLLM packs only the first ones again, and would use
    the others as if they were packed.
    """
    if devices.device_type() == "cuda":
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _experts_left_out(model: Any) -> list[str]:
    """Names of the expert layers that `_reset_packed_experts` has reset and no reload has packed again."""
    methods = {name: getattr(module, "quant_method", None) for name, module in model.named_modules()}
    return [name for name, method in methods.items() if method and getattr(method, "moe_kernel", method) is None]


def _repack_lm_head(model: Any) -> None:
    """Renews the packed copy of the LM head, which may be the embedding itself: if it is tied, a reload leaves the old
    copy.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)


def is_separate() -> bool:
    """True if engines run in processes of their own."""
    return os.environ.get(SWITCH) == "1"


@contextmanager
def queued_together(llm: LLM, idle: bool) -> Iterator[None]:
    """Runs a block that queues requests in an engine. An `idle` engine starts none of them before the block ends.

    Otherwise timing would decide which requests are in its first steps.
    """
    if not (idle and is_separate()):
        yield
        return
    llm.sleep(level=0)
    yield
    llm.wake_up(tags=["scheduling"])


def reset_cache(llm: LLM) -> None:
    """Empties the caches of prefixes and of encoded images.

    Raises:
        IncompatibleEngine: vLLM refuses to empty them.
    """
    llm.llm_engine.reset_encoder_cache()
    if not llm.reset_prefix_cache():
        raise IncompatibleEngine("a cache in use")


def sleeps(llm: LLM) -> bool:
    """Puts an engine to sleep. Returns False if vLLM fails because it counts memory that another process has taken."""
    try:
        llm.sleep(level=1)
    except Exception as error:  # AssertionError or RuntimeError; a plain Exception from another process
        if "Memory usage increased after sleeping" not in str(error):
            raise
        return False
    return True


def check_parameters(params: SamplingParams, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
    """Checks a request's parameters, as the engine of a model with this vocabulary does.

    Raises:
        ValueError: vLLM refuses one of them.
        VLLMClientError: likewise.
    """
    from vllm.config import StructuredOutputsConfig
    from vllm.tokenizers.hf import get_cached_tokenizer

    uncached: Any = tokenizer
    cached: Any = get_cached_tokenizer(uncached)
    model: Any = SimpleNamespace(max_logprobs=0, get_vocab_size=lambda: vocabulary, is_diffusion=False)
    params.update_from_tokenizer(cached)
    params.verify(model, None, StructuredOutputsConfig(), cached)
