"""Log-probs of completion tokens under a causal language model, at the sampling temperature.

log π(y_t) = z_t[y_t]/T − logsumexp(z_t/T), in float32 for every number format of the model. Logits are computed only at
positions that predict a token that the model sampled, and never all at once if the model supports that
(`kernels/lm_head.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rloo_pipeline.artifacts import vision
from rloo_pipeline.errors import IncompatibleEngine, UserError
from rloo_pipeline.runtime import devices
from rloo_pipeline.training import batch_forms, model_support, sequence_group
from rloo_pipeline.training.kernels import attention, lm_head
from rloo_pipeline.training.kernels.lm_head import LossOf
from rloo_pipeline.training.kernels.logit_rows import Top, top_of
from rloo_pipeline.training.packing import Pack
from rloo_pipeline.training.sequence_group import SequenceGroup
from rloo_pipeline.transformers_internals.router_replay import RouterReplay


class TokenLogProbs(nn.Module):
    """A causal language model as a function from a pack to log-probs of completion tokens, or to a loss of them."""

    def __init__(
        self, model: nn.Module, temperature: float, group: SequenceGroup | None = None, offloads: bool = False
    ) -> None:
        """Wraps a causal language model, or a PEFT model around one, and installs the kernels in it.

        Args:
            model: the model.
            temperature: sampling temperature T.
            group: ranks that share the tokens of a pack; None for this rank only.
            offloads: True keeps what the decoder stores for the backward pass in host memory; for a model that
                recomputes its layers and so stores their inputs only.

        Raises:
            UserError: this model's packs cannot be split over a group.
        """
        super().__init__()
        self.model = model
        self.group = group or sequence_group.alone()
        self.offloads = offloads
        self.temperature = temperature
        """Sampling temperature T."""
        base: Any = model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
        self.name = type(base).__name__
        self.num_layers: int = base.config.get_text_config().num_hidden_layers
        self.form = batch_forms.form_of(base)
        self.replay = RouterReplay(base, self.num_layers)
        self.never = tuple(vision.placeholder_ids(base.config.to_dict()))
        self.length_limit = model_support.length_limit(base.config.to_dict())
        self.split = lm_head.attach(model)
        """The model before its vocabulary projection, and that; None computes all logits at once."""
        if self.group.size > 1 and (self.split is None or self.form.name != batch_forms.Packed.name):
            cause = f"trains in {self.form.name} batches" if self.split else "has its own vocabulary projection"
            raise sequence_group.refusal(self.name, cause)

    def forward(
        self, pack: Pack, loss_of: LossOf | None = None, top_k: int = 0
    ) -> Float[Tensor, " completion_tokens"] | Float[Tensor, ""] | Top:
        """Computes log-probs or a loss.

        Args:
            pack: sequences.
            loss_of: the loss of the sequences' log-probs; None for the log-probs themselves.
            top_k: number of likeliest tokens to return at each position; without a loss and a gradient.

        Returns:
            Log-probs in float32; with `loss_of` the loss; with `top_k` the likeliest tokens too.

        Raises:
            UserError: the model does not process each sequence of the pack on its own.
        """
        if self.split is None or (loss_of is None and torch.is_grad_enabled()):
            return self._from_all_logits(pack, loss_of, top_k)
        decoder, head, form = self.split
        inputs = self.form.inputs(pack)
        with self._checked(pack), self._kept():
            states = decoder(**inputs.arguments, use_cache=False).last_hidden_state
        hidden = states.flatten(0, 1).index_select(0, inputs.predicting)
        result: Tensor | Top = head(
            hidden, lm_head.HeadInputs(pack, self.temperature, loss_of, form, self.never, top_k)
        )
        return result

    @contextmanager
    def _checked(self, pack: Pack) -> Iterator[None]:
        """Checks the length of the sequences, and that every layer of a pack attends through `packed_attention`."""
        longest = pack.layout.blocks[0].tokens
        if self.length_limit is not None and longest > self.length_limit.tokens:
            raise UserError(
                f"a sequence of {longest} tokens: {self.name} has {self.length_limit.cause}, so training "
                f"covers at most {self.length_limit.tokens} tokens; shorten prompts, completions or demonstrations, or "
                "use another model"
            )
        if self.form.name != batch_forms.Packed.name:
            if pack.experts is not None:
                raise UserError(
                    f"rollout.router_replay: {self.name} trains in {self.form.name} batches, but replay only supports "
                    "packed ones; set it to false"
                )
            yield
            return
        self.replay.use(pack.experts, pack.input_ids.device)
        if pack.vision is not None:
            raise UserError(
                f"{self.name} was loaded for prompts without images, and these have some; run the stage "
                "`warmstart` of this run again"
            )
        with attention.checked_forward(self.name, self.num_layers):
            yield

    def _kept(self) -> AbstractContextManager[Any]:
        """A block whose stored activations are kept in host memory if offloading is on."""
        if not self.offloads:
            return nullcontext()
        return torch.autograd.graph.save_on_cpu(pin_memory=devices.device_type() == "cuda")

    def leave_gpu(self) -> None:
        """Moves the model to host memory.

        Raises:
            IncompatibleEngine: ZeRO 3 has split the weights.
        """
        if next(self.parameters()).is_cuda:
            if any(hasattr(parameter, "ds_id") for parameter in self.parameters()):
                raise IncompatibleEngine("weights that ZeRO 3 has split")
            self.to("cpu")
            torch.cuda.empty_cache()

    def _from_all_logits(self, pack: Pack, loss_of: LossOf | None, top_k: int) -> Tensor | Top:
        """The result of `forward`, with entropies that have no gradient."""
        with self._checked(pack):
            logits = self.form.logits(self.model, pack)
        scaled = logits.float() / self.temperature
        for token in self.never:
            scaled[:, token] = lm_head.NEVER
        normalizer = scaled.logsumexp(-1)
        at_targets = scaled.gather(-1, pack.targets.unsqueeze(-1)).squeeze(-1)
        if top_k:
            return top_of(scaled, at_targets, normalizer, top_k)
        if loss_of is None:
            return at_targets - normalizer
        with torch.no_grad():
            probs = (scaled - normalizer.unsqueeze(-1)).exp()
            entropy = normalizer - (probs * scaled).sum(-1)
        padded, mask = pack.unpack(at_targets - normalizer)
        others: tuple[Tensor, ...] = ()
        if pack.candidates is not None:
            others = (pack.unpack(scaled.gather(-1, pack.candidates) - normalizer.unsqueeze(-1))[0],)
        return loss_of(range(len(mask)), padded, mask, pack.unpack(entropy)[0], *others)
