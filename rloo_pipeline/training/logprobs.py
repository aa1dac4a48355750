"""Log-probs of completion tokens under a causal language model, at the sampling temperature.

log π(y_t) = z_t[y_t]/T − logsumexp(z_t/T), in float32 whatever the model computes in. Logits are made only at the
places that predict a completion token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rloo_pipeline.training.packing import Pack


class TokenLogProbs(nn.Module):
    """A causal language model seen as a function from packs to log-probs and entropies of completion tokens."""

    def __init__(self, model: nn.Module, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Log-prob of each completion token, [completion tokens] float32, and the entropy there (without gradient)."""
        logits = self.model(
            input_ids=pack.input_ids,
            position_ids=pack.position_ids,
            sequence=pack.sequence,
            logits_to_keep=pack.predicting,
            use_cache=False,
        ).logits[0]
        scaled = logits.float() / self.temperature
        normalizer = scaled.logsumexp(-1)
        logps = scaled.gather(-1, pack.targets.unsqueeze(-1)).squeeze(-1) - normalizer
        with torch.no_grad():
            probs = (scaled - normalizer.unsqueeze(-1)).exp()
            entropy = normalizer - (probs * scaled).sum(-1)
        return logps, entropy
