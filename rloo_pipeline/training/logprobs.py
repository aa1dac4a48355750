"""Log-probs of completion tokens under a causal language model, at the sampling temperature.

log π(y_t) = z_t[y_t]/T − logsumexp(z_t/T), in float32 for every number format of the model. Logits are computed only at
positions that predict a sampled token. If the model supports it, they never exist all at once
(`kernels/lm_head.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rloo_pipeline.artifacts import vision
from rloo_pipeline.artifacts.model_dims import length_limit
from rloo_pipeline.errors import IncompatibleEngine, UserError
from rloo_pipeline.runtime import host_copies
from rloo_pipeline.runtime.host_copies import HostCopies
from rloo_pipeline.training import batch_forms, sequence_group
from rloo_pipeline.training.kernels import attention, lm_head
from rloo_pipeline.training.kernels.lm_head import Form, LossOf, TokenOutputs, outputs_of
from rloo_pipeline.training.packing import Pack
from rloo_pipeline.training.sequence_group import SequenceGroup
from rloo_pipeline.transformers_internals.router_replay import RouterReplay


class TokenLogProbs(nn.Module):
    """A causal language model as a function from a pack to log-probs of completion tokens, or to a loss over them."""

    def __init__(
        self, model: nn.Module, temperature: float, group: SequenceGroup | None = None, offloads: bool = False
    ) -> None:
        """Wraps a causal language model, or a PEFT model around one, and installs the kernels in it.

        Args:
            model: the model.
            temperature: sampling temperature T.
            group: ranks that share the tokens of a pack; None for this rank only.
            offloads: True keeps the activations that the decoder stores for the backward pass in host memory. Use it
                for a model that recomputes its layers and so stores only their inputs.

        Raises:
            UserError: this model's packs cannot be split over a group.
        """
        super().__init__()
        self.model = model
        self.group = group or sequence_group.group_of(1)
        self.offloads = offloads
        self.temperature = temperature
        """Sampling temperature T."""
        self._copies = HostCopies()
        base = self.full_model
        self.name = type(base).__name__
        self.num_layers: int = base.config.get_text_config().num_hidden_layers
        self.form = batch_forms.form_of(base)
        self.replay = RouterReplay(base, self.num_layers)
        self.never = tuple(vision.placeholder_ids(base.config.to_dict()))
        self.length_limit = length_limit(base.config.to_dict())
        self.head_form = form_of_logits(base)
        """The form of the logits, if the vocabulary projection computes log-probs; None computes all logits at once."""
        if self.head_form is not None:
            lm_head.use(base.get_output_embeddings())
        if self.group.size > 1 and self.form.name != batch_forms.Packed.name:
            raise sequence_group.refusal(self.name, f"trains in {self.form.name} batches")
        if self.group.size > 1 and self.head_form is None:
            raise sequence_group.refusal(self.name, "has its own vocabulary projection")

    @property
    def full_model(self) -> Any:
        """The causal language model, without its adapter."""
        model: Any = self.model
        return model.get_base_model() if hasattr(model, "peft_config") else model

    def forward(
        self, pack: Pack, loss_of: LossOf | None = None, top_k: int = 0, entropies: bool = False
    ) -> TokenOutputs | Float[Tensor, ""]:
        """Computes log-probs or a loss.

        Args:
            pack: sequences.
            loss_of: the loss of the sequences' log-probs; None for the log-probs themselves.
            top_k: number of likeliest tokens to return at each position.
            entropies: True to return entropies; without `top_k`.

        Returns:
            The loss if there is one; otherwise log-probs, and what else is asked for.

        Raises:
            UserError: the model does not process each sequence of the pack on its own.
        """
        if self.head_form is None or (loss_of is None and torch.is_grad_enabled()):
            return self._from_all_logits(pack, loss_of, top_k, entropies)
        arguments, predicting = self.form.inputs(pack)
        causal = self.full_model
        with self._checked(pack), host_copies.activations(self.offloads):
            states = causal.base_model(**arguments, use_cache=False).last_hidden_state
        hidden = states.flatten(0, 1).index_select(0, predicting)
        inputs = lm_head.HeadInputs(pack, self.temperature, loss_of, self.head_form, self.never, top_k, entropies)
        result: TokenOutputs | Tensor = causal.get_output_embeddings()(hidden, inputs)
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
        if pack.experts is not None:
            self.replay.require(self.form.name)
        if self.form.name != batch_forms.Packed.name:
            yield
            return
        self.replay.use(pack.experts, pack.input_ids.device)
        if pack.vision is not None:
            raise UserError(
                f"{self.name} was loaded for prompts without images, but these have some; run the stage "
                "`warmstart` of this run again"
            )
        with attention.checked_forward(self.name, self.num_layers):
            yield

    def leave_gpu(self) -> None:
        """Moves a model that does not train to host memory, until `enter_gpu`; does nothing on a CPU.

        Raises:
            IncompatibleEngine: ZeRO 3 has split the weights.
        """
        if next(self.parameters()).is_cuda:
            self.offload()
            torch.cuda.empty_cache()

    def offload(self) -> None:
        """As `leave_gpu`, but on any device."""
        if any(hasattr(parameter, "ds_id") for parameter in self.parameters()):
            raise IncompatibleEngine("weights that ZeRO 3 has split")
        self._copies.take((), [*self.parameters(), *self.buffers()])

    def discard(self) -> None:
        """Frees the memory of a model that is not used again: a reference cycle would keep it until it is collected."""
        for storage in host_copies.storages([*self.parameters(), *self.buffers()]).values():
            if storage.resizable():  # on a CPU weights may be mapped from a file
                storage.resize_(0)
        torch.cuda.empty_cache()  # gives it back to other processes on the GPU

    def enter_gpu(self) -> None:
        """Moves the model back to its device."""
        self._copies.restore()

    def _from_all_logits(
        self, pack: Pack, loss_of: LossOf | None, top_k: int, entropies: bool
    ) -> TokenOutputs | Tensor:
        """The result of `forward`, with entropies that have no gradient."""
        with self._checked(pack):
            logits = self.form.logits(self.model, pack)
        scaled = logits.float() / self.temperature
        for token in self.never:
            scaled[:, token] = lm_head.NEVER
        normalizer = scaled.logsumexp(-1)
        outputs = outputs_of(scaled, pack.targets, normalizer, top_k)
        if loss_of is None and not entropies:
            return outputs
        with torch.no_grad():
            probs = (scaled - normalizer.unsqueeze(-1)).exp()
            entropy = normalizer - (probs * scaled).sum(-1)
        if loss_of is None:
            return outputs._replace(entropies=entropy)
        padded, mask = pack.unpack(outputs.logps)
        others: tuple[Tensor, ...] = ()
        if pack.candidates is not None:
            others = (pack.unpack(scaled.gather(-1, pack.candidates) - normalizer.unsqueeze(-1))[0],)
        return loss_of(range(len(mask)), padded, mask, pack.unpack(entropy)[0], *others)


@torch.no_grad()
def form_of_logits(causal: Any) -> Form | None:
    """Finds the form of a causal language model's logits by feeding it made-up products, small ones and large ones.

    Returns:
        The form; None if the logits are not a `Form` of the vocabulary projection of the last hidden states, or are
        float16, whose gradients need a loss scale that is not known here.
    """
    head = causal.get_output_embeddings()
    if type(head) is not nn.Linear or head.weight.dtype == torch.float16:
        return None
    ids = torch.ones((1, 2), dtype=torch.long, device=head.weight.device)
    training = causal.training
    causal.eval()
    try:
        output, recorded, logits = _run_with_products(causal, head, ids)
        # where the decoder gets more, such as embeddings that the model scales, it may compute something else
        if output is None:
            output = causal.base_model(input_ids=ids, use_cache=False)
    finally:
        causal.train(training)
    hidden = getattr(output, "last_hidden_state", None)
    if hidden is None or not recorded:
        return None
    head_input, products, *_ = recorded
    if not torch.equal(hidden, head_input):
        return None
    config = causal.config.get_text_config()
    scales = 1.0, getattr(config, "logit_scale", None), 1 / (getattr(config, "logits_scaling", None) or inf)
    cap = getattr(config, "final_logit_softcapping", None) or inf
    rtol = 1e-5 if logits.dtype == torch.float32 else 1e-2
    for form in (Form(float(scale), cap) for scale in scales if scale):
        if torch.allclose(form.logits(products.double()), logits.double(), rtol=rtol, atol=rtol / 100):
            return form
    return None


def _run_with_products(causal: Any, head: nn.Linear, ids: Tensor) -> tuple[Any, list[Tensor], Tensor]:
    """Runs the model with products up to 1000 in place of the head's output.

    Returns:
        The output of the decoder, None if it got other tensors than `ids`; the input of the head and the products
        (flat), if the model calls it; and the logits that it computes from them (flat).
    """
    outputs, recorded = list[Any]([None]), list[Tensor]()

    def keep_output(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        others = [each for each in (*args, *named.values()) if isinstance(each, Tensor) and each is not ids]
        outputs.append(None if others else output)

    def replace_output(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        # the fifth power has small products too, without which a cap would hide the scale
        products = (1000 * torch.linspace(-1, 1, output.numel()) ** 5).view_as(output).to(output)
        recorded.extend((inputs[0], products.flatten()))
        return products

    hooks = [
        causal.base_model.register_forward_hook(keep_output, with_kwargs=True),
        head.register_forward_hook(replace_output),
    ]
    try:
        logits = causal(input_ids=ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return outputs[-1], recorded, logits.flatten()
