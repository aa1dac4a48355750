"""Parts of a pack for ranks that share it, and what they are refused for; tests/stages/test_sequence_parallel.py runs
such ranks.
"""

import numpy as np
import pytest
import torch
from models import gradient, qwen3
from synthetic_runs import configuration

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.errors import UserError
from rloo_pipeline.training import forward_only, sequence_group
from rloo_pipeline.training.deepspeed_internals import split_model
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.packing import Sequences
from rloo_pipeline.training.sequence_group import SequenceGroup

PROMPT = [5, 6, 7]
SEQUENCES = Sequences([PROMPT, PROMPT, [8]], [[9, 10, 11, 12], [13], [14, 15, 16]])


def group(number: int, size: int = 3) -> SequenceGroup:
    """A rank of a group that is not connected."""
    return SequenceGroup(number, size, 0, 1)


def test_parts_of_a_row_together_are_the_row() -> None:
    numbers = np.arange(100).reshape(-1, 1)
    sequences = SEQUENCES._replace(
        loss_masks=[[True, False, True, True], [True], [True] * 3],
        experts=[numbers[:6], numbers[10:13], numbers[20:23]],
        candidates=[numbers[:3], numbers[10:11], numbers[20:23]],
    )
    whole, parts = sequences.pick(range(3)), [sequences.pick(range(3), group(number)) for number in range(3)]
    assert [part.input_ids.shape[1] for part in parts] == [3, 3, 3]
    for name in ("input_ids", "position_ids"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts], 1), getattr(whole, name))
    assert whole.experts.flatten().tolist() == [*range(6), *range(20, 23)], "the second shares the first's prompt"
    assert torch.equal(torch.cat([part.experts for part in parts]), whole.experts)
    assert whole.candidates.flatten().tolist() == [0, 1, 2, 10, 20, 21, 22]
    starts = [0, 3, 6]
    predicting = torch.cat([part.predicting + start for part, start in zip(parts, starts, strict=True)])
    for part, start in zip(parts, starts, strict=True):
        assert part.own is not None
        assert torch.equal(whole.predicting[part.own.places], predicting)
        assert torch.equal(whole.targets[part.own.mine], part.targets)
        assert torch.equal(whole.candidates[part.own.mine], part.candidates)
        assert torch.equal(whole.predicting[part.own.mine], part.predicting + start)
        assert [len(other.targets) for other in parts] == list(part.own.counts)
        assert part.layout.first_copy.tolist() == whole.layout.first_copy.tolist()
        assert part.completion_lengths.tolist() == whole.completion_lengths.tolist()


def test_a_rank_whose_tokens_predict_nothing_that_was_sampled_counts_0() -> None:
    sequences = Sequences([[5, 6]], [[9, 10, 11, 12, 13]], [[True] + [False] * 4])
    for number, predicting in enumerate(([1], [], [])):
        part = sequences.pick([0], group(number))
        assert (part.predicting.tolist(), part.own and part.own.counts) == (predicting, (1, 0, 0))


def test_a_group_of_one_has_the_whole_row() -> None:
    assert Sequences([PROMPT], [[9]]).pick([0], group(0, 1)).own is None


def test_a_row_with_fewer_tokens_than_ranks_is_refused() -> None:
    with pytest.raises(UserError, match="a micro-batch of 2 tokens cannot be split over 3 processes"):
        Sequences([[5]], [[9, 10]]).pick([0], group(0))


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(UserError, match="4 attention heads cannot be divided among the 3 processes"):
        group(0).to_heads([torch.zeros(3, 4, 8)], 9)


def test_a_model_whose_packs_cannot_be_split_is_refused() -> None:
    with pytest.raises(UserError, match="Qwen3ForCausalLM has its own vocabulary projection"):
        TokenLogProbs(qwen3(dtype=torch.float16), 1.0, group(0))


def test_ranks_are_connected_and_have_their_gpus_before_they_load_a_model(monkeypatch, tmp_path) -> None:
    calls: list[str] = []
    monkeypatch.setattr(split_model, "start_ranks", lambda: calls.append("connect"))
    monkeypatch.setattr(forward_only, "load", lambda *_: calls.append("load") or qwen3())
    monkeypatch.setattr(sequence_group, "group_of", lambda size: group(0, size))
    config = configuration(deepspeed={"processes": 2, "sequence_parallel": 2})
    assert forward_only.load_configured(config, Policy(tmp_path), 1.0).group.size == 2
    assert calls == ["connect", "load"]


def test_inputs_of_layers_in_host_memory_give_the_same_gradient(monkeypatch) -> None:
    kept, save = list[int](), torch.autograd.graph.save_on_cpu

    class Counting(save):
        def __init__(self, pin_memory: bool) -> None:
            super().__init__(pin_memory)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: kept.append(tensor.numel()) or pack(tensor)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Counting)
    pack, gradients = Sequences([PROMPT, [8]], [[9, 10, 11], [12]]).pick([0, 1]), []
    for offloads in (False, True):
        model = qwen3().train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
        TokenLogProbs(model, 1.0, offloads=offloads)(pack, lambda _, logps, mask, __: (logps * mask).sum()).backward()
        gradients.append(gradient(model))
    assert torch.equal(*gradients)
    assert kept.count(pack.input_ids.shape[1] * 32) >= 2, "the input of each layer"
