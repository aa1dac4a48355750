"""Finds out how a model computes its logits from the products of hidden states and vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Form(NamedTuple):
    """Formula of logits from products z: scale · z, or with a cap, cap · tanh(scale · z / cap)."""

    scale: float = 1.0
    """Granite: 1 / logits_scaling; Cohere: logit_scale."""
    cap: float = inf
    """Gemma 2: final_logit_softcapping."""

    def logits(self, products: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The logits of these products."""
        scaled = products * self.scale
        return scaled if self.cap == inf else (scaled / self.cap).tanh() * self.cap


@torch.no_grad()
def detect(causal: Any, head: nn.Linear) -> Form | None:
    """The form of a model's logits, found by feeding it made-up products: small ones for the scale, large for the cap.

    Args:
        causal: causal language model of transformers.
        head: its vocabulary projection.

    Returns:
        The form; None if the logits are not a `Form` of what `head` makes of the last hidden states.
    """
    ids = torch.ones((1, 2), dtype=torch.long, device=head.weight.device)
    training = causal.training
    causal.eval()
    try:
        output = causal.base_model(input_ids=ids, use_cache=False)
        hidden = getattr(output, "last_hidden_state", None)
        if hidden is None:
            return None
        with _decoder_returns(causal.base_model, output, ids):
            trials = [_run_with_products(causal, head, ids, size) for size in (0.01, 1000.0)]
    finally:
        causal.train(training)
    if not all(torch.equal(hidden, head_input) for head_input, _, _ in trials):
        return None
    _, products, logits = trials[0]
    text_config = causal.config.get_text_config()
    scale = _configured_scale(float(logits[-1] / products[-1]), text_config)
    if scale is None:
        return None
    form = Form(scale, getattr(text_config, "final_logit_softcapping", None) or inf)
    rtol = 1e-5 if logits.dtype == torch.float32 else 1e-2
    same = (torch.allclose(form.logits(z.double()), y.double(), rtol=rtol, atol=rtol / 100) for _, z, y in trials)
    return form if all(same) else None


@contextmanager
def _decoder_returns(decoder: Any, output: object, ids: Tensor) -> Iterator[None]:
    """A block in which a decoder returns `output` for `ids` without computing, which takes long if its weights are
    split. It computes if it gets other tensors, such as embeddings that the model scales.
    """
    own, compute = decoder.__dict__.get("forward"), decoder.forward

    def forward(*args: Any, **named: Any) -> Any:
        tensors = [each for each in (*args, *named.values()) if isinstance(each, Tensor)]
        return output if len(tensors) == 1 and tensors[0] is ids else compute(*args, **named)

    decoder.forward = forward
    try:
        yield
    finally:
        del decoder.forward
        if own is not None:
            decoder.forward = own


def _configured_scale(measured: float, config: Any) -> float | None:
    """The scale in config.json that agrees with the measured one, which is rounded; None if there is no such scale."""
    candidates = [1.0, getattr(config, "logit_scale", None), 1 / (getattr(config, "logits_scaling", None) or inf)]
    return next((float(scale) for scale in candidates if scale and abs(measured / scale - 1) < 1e-2), None)


def _run_with_products(causal: Any, head: nn.Linear, ids: Tensor, size: float) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the model with products up to `size` in place of the head's output.

    Returns:
        The input of the head, the products (flat), and the logits that the model makes of them (flat).
    """
    recorded: list[Tensor] = []

    def replace_output(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        products = torch.linspace(-size, size, output.numel()).view_as(output).to(output)
        recorded.extend((inputs[0], products))
        return products

    hook = head.register_forward_hook(replace_output)
    try:
        logits = causal(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    return recorded[0], recorded[1].flatten(), logits.flatten()
