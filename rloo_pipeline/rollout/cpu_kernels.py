"""Replaces kernels of vLLM for CPUs that are wrong or missing.

They decide values, so the module belongs to the digest of rollouts, which leaves out `runtime/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


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
