"""The head's log-probs and loss on a GPU with one pass over the logits, and one for their gradient.

`Projection` of `kernels/lm_head.py` makes about ten passes over the logits of a group of tokens, in float32. Here the
logits keep the number format of the model. With m and s the running maximum and Σ exp(z − m), and t = Σ exp(z − m)·(z −
m), a block with the maximum m' > m changes s to s·e^(m − m') and t to (t + s·(m − m'))·e^(m − m'), as in FlashAttention
(Dao et al. 2022). The second pass writes the gradient of the logits in their place.

The kernels need Triton, and so does this module; tests/unit/training/test_one_pass.py runs them in its interpreter.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rloo_pipeline.training.kernels.lm_head import ELEMENTS, KIND, NEVER, Projection, TokenOutputs

BLOCK = 4096
"""Number of logits that a program reads at once."""
_LEAST = tl.constexpr(NEVER)


def use(model: Any) -> None:
    """Makes the head of a causal language model compute its losses this way."""
    setattr(model.get_output_embeddings(), KIND, OnePassProjection)


class OnePassProjection(Projection):
    """Does the same as `Projection` for heads without a bias or a cap."""

    largest: Tensor
    """Maximum of each row of `probs`, which holds logits here."""

    def held_at_once(self) -> tuple[torch.dtype, int]:
        """As many logits as fit into the bytes that `Projection` takes for float32 logits and their softmax."""
        return self.hidden.dtype, ELEMENTS["cuda"] * 8 // self.hidden.element_size()

    def _outputs(self, part: slice) -> TokenOutputs:
        logps, entropies, largest, sums = self._summary(part, self.logits)
        if not self.inputs.top_k:
            return TokenOutputs(logps, entropies if self.inputs.entropies else None)
        top, ids = self.logits[: len(logps)].topk(self.inputs.top_k, -1)
        return TokenOutputs(logps, None, top.float() / self.divisor - (largest + sums.log()).unsqueeze(-1), ids.int())

    def _make_room(self, most: int) -> None:
        super()._make_room(most)
        self.largest = torch.empty_like(self.sums[:, 0])

    def _softmax(self, part: slice, offset: int) -> tuple[Tensor, Tensor]:
        rows = slice(offset, offset + part.stop - part.start)
        logps, entropy, largest, sums = self._summary(part, self.probs[rows])
        self.largest[rows], self.sums[rows, 0] = largest, sums
        others = self.probs[rows].gather(-1, self.columns[part, 1:]).float() / self.divisor
        return torch.cat([logps.unsqueeze(-1), others - (largest + sums.log()).unsqueeze(-1)], -1), entropy

    def _summary(self, part: slice, buffer: Tensor) -> Tensor:
        """[4, tokens]: log-prob, entropy, maximum and Σ exp(z − maximum); leaves undivided logits in the buffer."""
        hidden = self.hidden[part]
        logits, summary = buffer[: len(hidden)], hidden.new_empty((4, len(hidden)), dtype=torch.float32)
        torch.mm(hidden, self.weight.T, out=logits)
        for token in self.inputs.never:
            logits[:, token] = NEVER
        shape = len(hidden), logits.shape[1], self.divisor
        _summarize[(len(hidden),)](logits, self.inputs.pack.targets[part], summary, *shape, BLOCK, num_warps=8)
        return summary

    def _d_logits(self, part: slice, rows: slice, scale: Tensor) -> Tensor:
        logits, total = self.probs[rows], scale.sum(-1)
        of_candidates = self._of_candidates(part, rows, scale, total)
        columns = self.inputs.pack.targets[part], self.largest[rows], self.sums[rows], scale[:, 0].contiguous(), total
        grid = len(logits), triton.cdiv(logits.shape[1], BLOCK)
        _differentiate[grid](logits, *columns, logits.shape[1], self.divisor, BLOCK, num_warps=8)
        return logits.scatter_(-1, self.columns[part, 1:], of_candidates)

    def _of_candidates(self, part: slice, rows: slice, scale: Tensor, total: Tensor) -> Tensor:
        """The gradient of the candidates' logits. Its terms can be large and cancel, so it is rounded only once."""
        ids, given = self.columns[part, 1:], scale[:, 1:]
        # tokens that the student lacks are stored as token 0, with a gradient of 0
        given = given.where(ids != 0, given.where(ids == 0, 0).sum(-1, keepdim=True))
        given = given + scale[:, :1] * (ids == self.inputs.pack.targets[part].unsqueeze(-1))
        z = self.probs[rows].gather(-1, ids).float() / self.divisor
        softmax = (z - self.largest[rows].unsqueeze(-1)).exp() / self.sums[rows]
        return (given - total.unsqueeze(-1) * softmax).to(self.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _summarize(
    logits: tl.tensor,
    targets: tl.tensor,
    summary: tl.tensor,
    rows: tl.tensor,
    vocabulary: tl.tensor,
    divisor: tl.tensor,
    block: tl.constexpr,
) -> None:
    """The four values of `_summary` for one row."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * vocabulary
    largest = _LEAST
    total = 0.0
    weighted = 0.0
    for first in range(0, vocabulary, block):
        places = first + tl.arange(0, block)
        inside = places < vocabulary
        z = tl.where(inside, tl.load(start + places, mask=inside, other=0.0).to(tl.float32) / divisor, _LEAST)
        above = tl.maximum(largest, tl.max(z, 0))
        decay, exponentials = tl.exp(largest - above), tl.where(inside, tl.exp(z - above), 0.0)
        weighted = (weighted + total * (largest - above)) * decay + tl.sum(exponentials * (z - above), 0)
        total = total * decay + tl.sum(exponentials, 0)
        largest = above
    log_total = tl.log(total)
    at_target = tl.load(start + tl.load(targets + row)).to(tl.float32) / divisor
    tl.store(summary + row, at_target - (largest + log_total))
    tl.store(summary + rows + row, log_total - weighted / total)
    tl.store(summary + 2 * rows + row, largest)
    tl.store(summary + 3 * rows + row, total)


@triton.jit  # type: ignore[untyped-decorator]
def _differentiate(
    logits: tl.tensor,
    targets: tl.tensor,
    largest: tl.tensor,
    sums: tl.tensor,
    at_target: tl.tensor,
    scales: tl.tensor,
    vocabulary: tl.tensor,
    divisor: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Overwrites a block of one row's logits with at_target · onehot − scale · softmax."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * block + tl.arange(0, block)
    inside, pointers = places < vocabulary, logits + row * vocabulary + places
    z = tl.load(pointers, mask=inside, other=0.0).to(tl.float32) / divisor
    scale = tl.load(scales + row)
    softmax = tl.exp(z - tl.load(largest + row)) / tl.load(sums + row)
    hit = tl.where(places == tl.load(targets + row), tl.load(at_target + row), 0.0)
    tl.store(pointers, (hit - scale * softmax).to(logits.dtype.element_ty), mask=inside)
