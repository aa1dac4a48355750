"""Trained with the experts that the sampler chose: their weights still come from the trainer's router."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from cases import PACKED, config

from rloo_pipeline.artifacts import tables
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout.sampler import _experts_of
from rloo_pipeline.training import round_data
from rloo_pipeline.training.kernels import attention
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.packing import Pack, Sequences
from rloo_pipeline.training.self_check import small

KINDS = ["qwen3_moe", "mixtral", "gpt_oss"]
SEQUENCES = Sequences([[5, 6, 7], [5, 6, 7], [8, 9]], [[10, 11, 12], [13, 14], [15, 16, 17, 18]])
"""Two share a prompt."""


def module_of(kind: str) -> TokenLogProbs:
    attention.register()
    model = small.build(config(kind, PACKED[kind]), False, attention.NAME)
    return TokenLogProbs(model, 1.0)


def own_choice(module: TokenLogProbs, pack: Pack) -> torch.Tensor:
    """[tokens, layers × choices] What the routers choose by themselves."""
    chosen: list[torch.Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _, __, out: chosen.append(out[-1])) for router in module.replay.routers
    ]
    with torch.no_grad():
        module(pack)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1).flatten(1).int()


def passed(module: TokenLogProbs, pack: Pack) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Log-probs, and the gradient of their sum."""
    module.zero_grad()
    logps = module(pack).logps
    logps.sum().backward()
    return logps.detach(), [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_the_routers_own_experts_give_the_same_bits_forward_and_backward(kind) -> None:
    module, pack = module_of(kind), SEQUENCES.pick(range(3))
    expected, gradients = passed(module, pack)
    logps, replayed = passed(module, pack._replace(experts=own_choice(module, pack)))
    assert torch.equal(logps, expected)
    assert all(torch.equal(a, b) for a, b in zip(gradients, replayed, strict=True) if a is not None)
    assert torch.equal(passed(module, pack)[0], expected), "without experts the routers choose again"


@pytest.mark.parametrize("kind", KINDS)
def test_other_experts_change_what_follows_from_their_token_and_nothing_else(kind) -> None:
    module, pack = module_of(kind), SEQUENCES.pick(range(3))
    experts = own_choice(module, pack)
    expected, _ = passed(module, pack)
    most, place = int(module.replay.routers[0].num_experts), 4  # the second token of the first completion
    experts[place] = (experts[place] + 1) % most
    logps, gradients = passed(module, pack._replace(experts=experts))
    changed = ((logps - expected).abs() > 1e-5).tolist()  # experts round otherwise with another number of tokens
    assert changed == [False, False, True, *[False] * 6], "the token after it, in its own sequence"
    assert all(router.weight.grad.abs().sum() > 0 for router in module.replay.routers), "they still learn"
    assert any(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)


def test_a_shared_prompt_has_the_experts_of_its_first_sequence() -> None:
    experts = [np.full((len(p) + len(c) - 1, 4), n) for n, (p, c) in enumerate(zip(*SEQUENCES[:2], strict=True))]
    pack = SEQUENCES._replace(experts=experts).pick(range(3))
    assert pack.experts[:, 0].tolist() == [0, 0, 0, 0, 0, 1, 2, 2, 2, 2, 2]
    assert pack.experts.shape == (pack.input_ids.shape[1], 4)


def table(experts: list[list[int] | None]) -> pa.Table:
    columns = {"prompt_ids": [[5, 6], [5, 6]], "completion_ids": [[7, 8], [9]], tables.EXPERTS: experts}
    return pa.table(columns, schema=pa.schema([tables.WITH_EXPERTS.field(name) for name in columns]))


@pytest.mark.parametrize("experts", [[[0] * 12, None], [[0] * 12, [0] * 7], [[0] * 12, [0] * 4], [[], []]])
def test_a_table_without_experts_for_each_token_is_refused(experts) -> None:
    with pytest.raises(UserError, match=r"^rollout.router_replay: .*delete the round's rollouts and run again"):
        round_data.experts_of(table(experts))
    with pytest.raises(UserError, match="2 of 2 rollouts have no experts"):
        round_data.experts_of(table(experts).drop_columns(tables.EXPERTS))
    first, second = round_data.experts_of(table([list(range(12)), list(range(8))]))
    assert first.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert second.shape == (2, 4)


@pytest.mark.parametrize(("kind", "width", "value"), [("mixtral", 6, 0), ("mixtral", 4, 9), ("deepseek_v3", 4, 0)])
def test_a_model_that_they_are_not_of_or_that_cannot_replay_is_refused(kind, width, value) -> None:
    module, pack = module_of(kind), SEQUENCES.pick(range(3))
    experts = torch.full((pack.input_ids.shape[1], width), value, dtype=torch.int32)
    with pytest.raises(UserError, match=r"^rollout.router_replay: "):
        module(pack._replace(experts=experts))


def test_vllms_experts_are_those_of_all_tokens_but_the_last() -> None:
    assert [*_experts_of(np.arange(12, dtype=np.uint8).reshape(3, 2, 2), 2)] == list(range(8))
    assert _experts_of(None, 2) is None
    with pytest.raises(UserError, match="3 of 4 tokens"):
        _experts_of(np.zeros((3, 2, 2)), 4)
