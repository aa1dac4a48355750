"""Log-probs of completion tokens under a causal language model, at the sampling temperature.

log π(y_t) = z_t[y_t]/T − logsumexp(z_t/T), in float32 whatever the model computes in. Logits are made only at the
places that predict a completion token, and where the model allows it never all at once (`head`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rloo_pipeline.errors import UserError
from rloo_pipeline.training import model_support
from rloo_pipeline.training.kernels import attention, layers, lm_head
from rloo_pipeline.training.kernels.lm_head import LossOf
from rloo_pipeline.training.packing import Pack


class TokenLogProbs(nn.Module):
    """A causal language model seen as a function from packs to log-probs of completion tokens, or to a loss of them."""

    def __init__(self, model: nn.Module, temperature: float, whole: bool = False) -> None:
        """Takes the model as it is; `whole` computes its layers and all logits as any other implementation would."""
        super().__init__()
        self.model = model
        self.temperature = temperature
        base: Any = model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
        self.name = type(base).__name__
        self.layers: int = base.config.get_text_config().num_hidden_layers
        self.limit = model_support.limit(base.config.to_dict())
        self.parts = None if whole else lm_head.attach(model)
        if not whole:
            layers.install(model)

    def forward(self, pack: Pack, loss_of: LossOf | None = None) -> Tensor:
        """Log-prob of each completion token, [completion tokens] float32; with `loss_of` the loss, a scalar."""
        if self.parts is None or (loss_of is None and torch.is_grad_enabled()):
            logps, entropy = self._whole(pack)
            if loss_of is None:
                return logps
            padded, mask = pack.unpack(logps)
            return loss_of(range(len(mask)), padded, mask, pack.unpack(entropy)[0])
        decoder, projection, form = self.parts
        with self._under_way(pack):
            states = decoder(**pack.inputs(), use_cache=False).last_hidden_state
        hidden = states.squeeze(0).index_select(0, pack.predicting)
        found: Tensor = projection(hidden, lm_head.Job(pack, self.temperature, loss_of, form))
        return found

    @contextmanager
    def _under_way(self, pack: Pack) -> Iterator[None]:
        """A block in which the pack goes through the model.

        Raises:
            UserError: the model does not compute its sequences each for itself.
        """
        longest = pack.layout.blocks[0].tokens
        if self.limit is not None and longest > self.limit.tokens:
            raise UserError(
                f"a sequence of {longest} tokens: {self.name} has {self.limit.key}, and {model_support.OUTSIDE}; "
                "shorten prompts, completions or demonstrations, or take another model"
            )
        with attention.pack_under_way(self.name, self.layers):
            yield

    def leave_gpu(self) -> None:
        """Moves the model to the host's memory."""
        if next(self.parameters()).is_cuda:
            self.to("cpu")
            torch.cuda.empty_cache()

    def _whole(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Log-probs, and entropies without gradient, [completion tokens] float32, from all logits."""
        with self._under_way(pack):
            logits = self.model(**pack.inputs(), logits_to_keep=pack.predicting, use_cache=False).logits[0]
        scaled = logits.float() / self.temperature
        normalizer = scaled.logsumexp(-1)
        logps = scaled.gather(-1, pack.targets.unsqueeze(-1)).squeeze(-1) - normalizer
        with torch.no_grad():
            probs = (scaled - normalizer.unsqueeze(-1)).exp()
            entropy = normalizer - (probs * scaled).sum(-1)
        return logps, entropy
