"""Vocabulary projection in pieces: loss and gradient are those of all logits at once."""

from math import inf

import pytest
import torch
from models import SIZES, gradient, qwen3
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rloo_pipeline.training import logprobs, packing
from rloo_pipeline.training.kernels import attention, lm_head
from rloo_pipeline.training.logprobs import TokenLogProbs

LENGTHS = [7, 1, 12, 5]


def pack() -> packing.Pack:
    torch.manual_seed(1)
    prompts = [torch.randint(1, 97, (3 + i,)).tolist() for i in range(len(LENGTHS))]
    return packing.pack(prompts, [torch.randint(1, 97, (length,)).tolist() for length in LENGTHS])


def clipped(rows, logps, mask, entropy):
    """A loss of clipped sequence ratios, which needs whole sequences."""
    torch.manual_seed(2)
    old = (torch.randn(len(LENGTHS)) * 0.3)[list(rows)]
    ratio = ((logps * mask).sum(-1) / 20 - old).exp()
    advantages = torch.tensor([1.0, -2.0, 0.5, 0.0])[list(rows)]
    entropies_of_loss.extend(((entropy * mask).sum(-1)).tolist())
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()


entropies_of_loss: list[float] = []


def run(
    model: torch.nn.Module, plain: bool, temperature: float = 0.7, never: tuple[int, ...] = ()
) -> tuple[float, list[float], torch.Tensor]:
    """Loss, entropies and gradient."""
    entropies_of_loss.clear()
    module = TokenLogProbs(model, temperature)
    module.never = never
    assert module.head_form is not None
    module.head_form = None if plain else module.head_form
    loss = module(pack(), clipped)
    model.zero_grad()
    (3.0 * loss).backward()
    return loss.item(), list(entropies_of_loss), gradient(model)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tokens", [1, 3, 8, 10**6])
def test_a_few_tokens_at_a_time_give_the_loss_and_gradient_of_all_logits(monkeypatch, tied, tokens) -> None:
    whole = run(qwen3(tied), plain=True)
    monkeypatch.setitem(lm_head.ELEMENTS, "cpu", 97 * tokens)
    loss, entropies, slope = run(qwen3(tied), plain=False)
    assert loss == pytest.approx(whole[0], rel=1e-6)
    assert entropies == pytest.approx(whole[1], rel=1e-6)
    assert (slope - whole[2]).norm() < 1e-6 * whole[2].norm()


@pytest.mark.parametrize("kind", [None, "gemma2"])
@pytest.mark.parametrize("tokens", [3, 10**6])
def test_log_probs_and_entropies_are_the_same_numbers_with_and_without_a_loss(monkeypatch, tokens, kind) -> None:
    """So that the ratio of a policy to itself is 1."""
    monkeypatch.setitem(lm_head.ELEMENTS, "cpu", 97 * tokens)
    module, from_loss = TokenLogProbs(qwen3() if kind is None else scaled(kind), 0.7), list[torch.Tensor]()

    def loss(_, logps, mask, entropy):
        from_loss.append(torch.stack([logps[mask].detach(), entropy[mask]]))
        return logps.sum()

    module(pack(), loss)
    with torch.no_grad():
        logps, entropies, *_ = module(pack(), entropies=True)
        assert torch.equal(torch.cat(from_loss, -1), torch.stack([logps, entropies]))
        assert torch.equal(logps, module(pack()).logps)


@pytest.mark.parametrize("tokens", [3, 10**6])
def test_log_probs_are_those_of_all_logits(monkeypatch, tokens) -> None:
    monkeypatch.setitem(lm_head.ELEMENTS, "cpu", 97 * tokens)
    split, whole = TokenLogProbs(qwen3(), 0.7), TokenLogProbs(qwen3(), 0.7)
    whole.head_form = None
    with torch.no_grad():
        torch.testing.assert_close(split(pack()).logps, whole(pack()).logps, rtol=1e-6, atol=1e-6)


def test_bfloat16_is_as_near_to_float32_as_all_logits_are() -> None:
    """The gradient of the projection is summed in float32, so it may be nearer."""
    exact = run(qwen3(tied=False), plain=True)[2]
    errors = [(run(qwen3(False, torch.bfloat16), plain)[2].float() - exact).norm() for plain in (True, False)]
    assert errors[1] < 1.05 * errors[0] < 0.1 * exact.norm()


def test_only_what_is_trained_gets_a_gradient() -> None:
    model = qwen3(tied=False)
    model.lm_head.weight.requires_grad_(False)
    TokenLogProbs(model, 1.0)(pack(), clipped).backward()
    assert model.lm_head.weight.grad is None
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0


def test_a_bias_of_the_projection_has_its_gradient(monkeypatch) -> None:
    def biased() -> LlamaForCausalLM:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
        model.lm_head = torch.nn.Linear(32, 97, bias=True)
        return model

    attention.register()
    monkeypatch.setitem(lm_head.ELEMENTS, "cpu", 97 * 8)
    whole, parts = run(biased(), plain=True), run(biased(), plain=False)
    assert (parts[2] - whole[2]).norm() < 1e-6 * whole[2].norm()


FORMS = {
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.3},
    "gemma2": {"final_logit_softcapping": 0.2, "attn_logit_softcapping": None},
}
"""Of models whose logits are a scale of products with the vocabulary, or these with a cap, near enough to be felt."""


def scaled(kind: str) -> torch.nn.Module:
    attention.register()
    torch.manual_seed(4)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **FORMS[kind]))


@pytest.mark.parametrize("never", [(), (0,)], ids=["every token", "a token that is never sampled"])
@pytest.mark.parametrize("tokens", [3, 8, 10**6])
@pytest.mark.parametrize("kind", FORMS)
def test_scaled_and_capped_logits_are_computed_in_pieces_too(kind, tokens, never, monkeypatch) -> None:
    whole = run(scaled(kind), plain=True, never=never)
    monkeypatch.setitem(lm_head.ELEMENTS, "cpu", 97 * tokens)
    loss, entropies, slope = run(scaled(kind), plain=False, never=never)
    assert loss == pytest.approx(whole[0], rel=1e-5)
    assert entropies == pytest.approx(whole[1], rel=1e-5)
    assert (slope - whole[2]).norm() < 1e-5 * whole[2].norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_form_of_logits_is_that_of_the_configuration(dtype) -> None:
    forms = [logprobs.form_of_logits(scaled(kind).to(dtype)) for kind in FORMS]
    assert forms == [(1 / 3.0, inf), (0.3, inf), (1.0, 0.2)]


def test_a_cap_does_not_hide_a_scale(monkeypatch) -> None:
    model = scaled("gemma2")
    plain, cap = type(model).forward, model.config.final_logit_softcapping

    def halved(self, *args, **named):
        """c · tanh(z / 2c) for the cap c."""
        self.config.final_logit_softcapping = 2 * cap
        out = plain(self, *args, **named)
        self.config.final_logit_softcapping = cap
        return type(out)(logits=out.logits / 2)

    monkeypatch.setattr(type(model), "forward", halved)
    assert logprobs.form_of_logits(model) is None


def test_logits_of_another_form_are_computed_all_at_once(monkeypatch) -> None:
    model, plain = qwen3(), type(qwen3()).forward

    def squared(self, *args, **named):
        out = plain(self, *args, **named)
        return type(out)(logits=out.logits.square())

    def scaled_by_itself(self, *args, **named):
        out = plain(self, *args, **named)
        return type(out)(logits=out.logits * 0.77)

    def with_own_embeddings(self, input_ids, **named):
        return plain(self, inputs_embeds=2 * self.get_input_embeddings()(input_ids), **named)

    assert logprobs.form_of_logits(qwen3()) is not None
    monkeypatch.setattr(type(model), "forward", with_own_embeddings)
    assert logprobs.form_of_logits(model) is None, "the projection does not get what the decoder makes of the ids"
    monkeypatch.setattr(type(model), "forward", scaled_by_itself)
    assert logprobs.form_of_logits(model) is None, "a scale that is not in config.json is only known rounded"
    monkeypatch.setattr(type(model), "forward", squared)
    assert logprobs.form_of_logits(model) is None
    assert logprobs.form_of_logits(qwen3(dtype=torch.float16)) is None
