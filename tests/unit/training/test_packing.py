"""Packing: sequences in one row give what each gives alone, and are split into micro-batches."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import VOCABULARY, gradient, qwen3

from rloo_pipeline.training import packing
from rloo_pipeline.training.batch_forms import FORMS
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.packing import Sequences

FORM = FORMS["packed"]


def ids(length: int, seed: int) -> list[int]:
    return torch.randint(1, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [ids(9, 1), ids(9, 1), ids(9, 1), ids(4, 2), ids(9, 3), ids(9, 3)]
COMPLETIONS = [ids(length, 10 + length) for length in (5, 1, 8, 6, 3, 2)]


def loss(_, logps, mask, __):
    return (logps * mask * torch.linspace(0.5, 1.5, 20)[: logps.shape[1]]).sum()


def test_a_shared_prompt_gives_the_log_probs_and_gradient_of_prompts_of_ones_own() -> None:
    module = TokenLogProbs(qwen3(), 1.0)
    pack = packing.pack(PROMPTS, COMPLETIONS)
    assert pack.input_ids.shape[1] == 9 + 4 + 9 + sum(len(ids) - 1 for ids in COMPLETIONS)
    module(pack, loss).backward()
    together = gradient(module.model)
    singles = [packing.pack([p], [c]) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    with torch.no_grad():
        alone = torch.cat([module(single).logps for single in singles])
        torch.testing.assert_close(module(pack).logps, alone, rtol=1e-6, atol=1e-6)
    for single in singles:
        module(single, loss).backward()
    alone = gradient(module.model)
    assert (together - alone).norm() < 1e-6 * alone.norm()


@given(
    prompts=st.lists(st.sampled_from([(1,), (2, 3), (4, 5, 6, 7)]), min_size=1, max_size=20),
    limit=st.integers(3, 60),
    shares=st.integers(1, 3),
    data=st.data(),
)
def test_micro_batches_hold_every_row_once_within_the_limit(prompts, limit, shares, data) -> None:
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=len(prompts), max_size=len(prompts)))
    sequences = Sequences(prompts, [[1] * length for length in lengths])
    batches = FORM.micro_batches(sequences, range(len(prompts)), limit, shares)
    assert sorted(row for batch in batches for row in batch) == list(range(len(prompts)))
    for batch in batches:
        tokens = sequences.pick(batch).input_ids.shape[1]
        assert tokens <= limit or len(batch) == 1
    longest = [len(prompts[batch[0]]) + lengths[batch[0]] for batch in batches]
    assert longest[0] == max(map(sum, zip(map(len, prompts), lengths, strict=True)))


@pytest.mark.parametrize("limit", [20, 10**6])
def test_samples_of_a_prompt_stay_together(limit) -> None:
    batches = FORM.micro_batches(Sequences(PROMPTS, COMPLETIONS), [5, 0, 3, 1, 4, 2], limit)
    order = [tuple(PROMPTS[row]) for batch in batches for row in batch]
    changes = sum(before != after for before, after in pairwise(order))
    assert changes == 2


def test_prompts_with_images_are_not_shared() -> None:
    """Where ids are the same, images may differ."""

    class NoImages:
        def pick(self, rows: object) -> None:
            """They have none."""

    prompts, completions = [[1, 2], [1, 2]], [[3, 4], [5, 6]]
    assert Sequences(prompts, completions).pick([0, 1]).input_ids.tolist() == [[1, 2, 3, 5]]
    alone = Sequences(prompts, completions, images=NoImages()).pick([0, 1])
    assert alone.input_ids.tolist() == [[1, 2, 3, 1, 2, 5]]
    assert alone.predicting.tolist() == [1, 2, 4, 5]
