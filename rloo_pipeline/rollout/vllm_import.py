"""Imports vLLM with the parts of it that are replaced here, which decide values: so the digest of rollouts has them.

vLLM ranks each sampled token within the vocabulary, which nothing here reads, and compiles that code with PyTorch. This
takes 3 s at each engine start, and needs a C++ compiler on every node. `import_vllm` replaces the ranks with zeros.

vLLM imports modules that import torchvision: for one function on sizes (Qwen-VL), or for the name of a class (Gemma 3).
Where torchvision is missing, `register` imports them with empty modules in its place. Kernels for CPUs that are wrong
or missing are replaced by `rotate_heads`, `leave_experts_to_cpus` and `attend_within_images`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.runtime import devices, guard
from rloo_pipeline.runtime.progress import announcing
from rloo_pipeline.transformers_internals import optional_parts

if TYPE_CHECKING:
    from torch import Tensor

IMAGE_MODULES = {
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Gemma3ForConditionalGeneration": "gemma3_mm",
}
"""vLLM's modules of image models, by architecture."""
TORCHVISION = [f"torchvision{rest}" for rest in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")]


def import_vllm() -> ModuleType:
    """Imports vLLM so that an engine in this process reports 0 for the rank of each token.

    Raises:
        UserError: vLLM is not the version whose internals are used in this package.
    """
    guard.require("vllm")
    with announcing("importing vLLM"):
        replace_ranks()
        return import_module("vllm")


def prepare(policy: Policy) -> None:
    """Replaces what an engine in this process needs for a policy."""
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
    """Makes vLLM's sampler return zeros for ranks."""
    sampler: Any = import_module("vllm.v1.sample.sampler")
    if sampler.batched_count_greater_than.__module__ != __name__:  # not yet replaced in this process
        sampler.batched_count_greater_than = _no_ranks


def _no_ranks(logps: Tensor, _: Tensor) -> Tensor:
    """Zeros [tokens], in place of the ranks of the sampled log-probs [tokens, 1] among `logps` [tokens, vocabulary]."""
    return logps.new_zeros(logps.shape[0]).long()


def register(architecture: str) -> None:
    """Makes vLLM use an architecture of IMAGE_MODULES from this process; else it would import it in another one."""
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
    """Imports in advance what an engine needs."""
    import_vllm()
    import_module("vllm.entrypoints.llm")


def rotate_heads() -> None:
    """Makes vLLM on CPUs rotate queries [tokens, heads, size] in PyTorch: its kernel is right for queries
    [tokens, heads · size] and wrong for these, which latent attention (MLA) has.
    """
    base: Any = import_module("vllm.model_executor.layers.rotary_embedding.base").RotaryEmbedding
    kernel = base.forward_cpu
    if kernel.__module__ == __name__:  # replaced in this process
        return

    def forward_cpu(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        return (self.forward_native if query.dim() > 2 else partial(kernel, self))(positions, query, key)

    base.forward_cpu = forward_cpu


def leave_experts_to_cpus() -> None:
    """Makes vLLM choose its kernel of experts for CPUs under LoRA too, where it would choose that of Triton; an adapter
    must not be on the experts themselves.
    """
    module: Any = import_module("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method")
    select = module.select_unquantized_moe_backend
    if select.__module__ == __name__:  # replaced in this process
        return

    def select_unquantized_moe_backend(moe_config: Any) -> Any:
        moe_config.is_lora_enabled = False
        return select(moe_config)

    module.select_unquantized_moe_backend = select_unquantized_moe_backend


def attend_within_images() -> None:
    """Makes vLLM on CPUs attend in both directions within an image, for models that do (Gemma 3): its kernel attends
    causally everywhere.

    The kernel can attend in both directions to the end of a sequence. So a prompt becomes several sequences for it,
    with the same cache: each image one that ends with the image, and the text between images.
    """
    builder: Any = import_module("vllm.v1.attention.backends.cpu_attn").CPUAttentionMetadataBuilder
    build = builder.build
    if build.__module__ == __name__:  # replaced in this process
        return

    def build_in_parts(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        return build(self, common_prefix_len, split_at_images(common_attn_metadata), fast_build)

    builder.build = build_in_parts


def split_at_images(batch: Any) -> Any:
    """vLLM's description of a batch (CommonAttentionMetadata) in which each part of a sequence that attends in one way
    is a sequence; unchanged where no new token is in an image.
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
    """The parts of the new tokens of a sequence: start, end, and whether they attend causally.

    Args:
        first: position of the first new token; those before are in the cache.
        length: length of the sequence.
        images: positions of the first and the last token of each.
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
