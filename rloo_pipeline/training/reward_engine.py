"""A DeepSpeed engine around a reward model: a decoder with a linear head of one output, read at the last token.

It trains in the same packs as policies (`preference_pairs`), where the two conversations of a pair share their
beginning, and writes a model that transformers' AutoModelForSequenceClassification loads.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from rloo_pipeline.artifacts.model_files import check_loading_info
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import JSON, Dtype
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import host_copies
from rloo_pipeline.training import plain_model, self_check
from rloo_pipeline.training.batch_forms import FORMS, Packed
from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.kernels import attention
from rloo_pipeline.training.kernels.lm_head import LossOf, TokenOutputs
from rloo_pipeline.training.packing import Pack, Sequences
from rloo_pipeline.training.preference_pairs import pad_of
from rloo_pipeline.transformers_internals import optional_parts

HEAD = "score.weight"


class RewardHead(nn.Module):
    """A model for sequence classification as a function from a pack to rewards, or to a loss over them."""

    def __init__(self, model: Any, form: Packed, offloads: bool = False) -> None:
        """Wraps a model that was loaded for this form of batch; `offloads` is that of `TokenLogProbs`."""
        super().__init__()
        self.model = model
        self.form = form
        self.offloads = offloads
        self.num_layers: int = model.config.get_text_config().num_hidden_layers

    def forward(self, pack: Pack, loss_of: LossOf | None = None, **_: bool) -> TokenOutputs | Float[Tensor, ""]:
        """The rewards in float32 in place of log-probs; with `loss_of` the loss of the rewards, [sequences, 1]."""
        (arguments, predicting), packed = self.form.inputs(pack), self.form.name == Packed.name
        checked = attention.checked_forward(type(self.model).__name__, self.num_layers) if packed else nullcontext()
        with checked, host_copies.activations(self.offloads):
            states = self.model.base_model(**arguments, use_cache=False).last_hidden_state
        rewards: Tensor = self.model.score(states.flatten(0, 1).index_select(0, predicting)).squeeze(-1)
        if loss_of is None:
            return TokenOutputs(rewards)
        values, mask = pack.unpack(rewards)
        return loss_of(range(len(values)), values, mask, torch.zeros_like(values))


class RewardEngine(Engine):
    """A reward model in training on this rank; rows 2i and 2i + 1 of its sequences are a pair, which stays together."""

    def load(self, configuration: JSON) -> tuple[Any, Any]:  # noqa: ARG002, DeepSpeed splits the whole model
        """Loads the causal language model with a new head, on each rank; under ZeRO 3 it is split afterwards."""
        model, form = load_with_head(self.policy, self.settings.dtype)
        if self.settings.deepspeed.recomputes:
            plain_model.recompute_layers(model)
        return model, RewardHead(model.train(), form, self.settings.deepspeed.gradient_checkpointing == "offload")

    def _own_micro_batches(self, sequences: Sequences, rows: Sequence[int]) -> list[list[int]]:
        """As for policies, but pair by pair, counting the length of the longer conversation for both."""
        longer = [max(map(len, sequences.completions[row : row + 2])) for row in range(0, len(sequences.prompts), 2)]
        prompts = [list(prompt) for prompt in sequences.prompts[::2]]
        rest = [[0] * (len(prompt) + 2 * length) for prompt, length in zip(prompts, longer, strict=True)]
        pairs = super()._own_micro_batches(Sequences(prompts, rest), [row // 2 for row in rows[::2]])
        return [[row for pair in batch for row in (2 * pair, 2 * pair + 1)] for batch in pairs]


def load_with_head(policy: Policy, dtype: Dtype) -> tuple[Any, Packed]:
    """Loads a causal language model with a random one-output head in place of its own; also returns its form of batch.

    Raises:
        UserError: transformers cannot load it this way, weights are missing, or the model takes images.
    """
    optional_parts.prepare_transformers()
    from transformers import AutoModelForSequenceClassification

    form = FORMS[self_check.load_or_run(policy).form]
    attention.register()
    policy.weights  # noqa: B018, checks that they are complete
    kind, advice = AutoModelForSequenceClassification, "name a different one in reward_model.name_or_path"
    options = {"num_labels": 1, "attn_implementation": form.attention}
    model, loading_info = plain_model.from_pretrained(policy, dtype, kind, advice, **options)
    head = getattr(model, "score", None)
    if type(head) is not nn.Linear or head.bias is not None or head.out_features != 1:
        raise UserError(
            f"{policy.base}: {type(model).__name__} has no head `score` of one output without bias; {advice}, of "
            "another family"
        )
    output = {name for name in loading_info["unexpected_keys"] if name.rpartition(".")[0] in ("lm_head", "embed_out")}
    known = {"missing_keys": {HEAD}, "unexpected_keys": output}
    check_loading_info(policy.base, {**loading_info, **{key: set(loading_info[key]) - of for key, of in known.items()}})
    # in float32 whatever the model's format, and called as a module, so that ZeRO 3 gathers its weight
    head.forward = lambda states: linear(states.float(), head.weight.float())
    model.config.get_text_config().pad_token_id = pad_of(policy)
    plain_model.remove_dropout(model)
    return model, form
