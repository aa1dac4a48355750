"""With the same completions, weights and options, loss and gradient are those of TRL's own trainers.

Both sides take two optimizer steps: the first on fresh samples, the second with weights that have moved so far that the
clip bites. Old, new and reference log-probs are each side's own, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from conformance import our_side
from conformance.cases import GRPO, RLOO, Case
from conformance.rounds import Round, Step, make_round
from helpers import merged
from transformers import AutoTokenizer, PreTrainedTokenizerBase

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

EQUAL = 1e-5
DIFFERENT = 1e-3
LEFT = 0.1
"""Of a loss's terms, at least: where they cancel further, what is relative to the loss is float32's rounding."""


@pytest.fixture(scope="module")
def trl_side() -> ModuleType:
    """Imported late: TRL takes seconds."""
    from conformance import trl_side

    return trl_side


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tokenizer(tiny_model) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


def apart(ours: Sequence[Step], theirs: Sequence[Step]) -> list[tuple[float, float]]:
    """How far each step's loss and gradient are apart, relative to theirs.

    The first step's loss is measured against the larger one of the two: on fresh samples it cancels to 0 where the
    advantages of a group do.
    """
    first, second = (abs(step.loss) for step in theirs)
    differences = []
    for our, their, scale in zip(ours, theirs, (max(first, second), second), strict=True):
        assert our.gradient.keys() == their.gradient.keys()
        left, right = (torch.cat([step.gradient[name].flatten() for name in their.gradient]) for step in (our, their))
        differences.append((abs(our.loss - their.loss) / scale, float((left - right).norm() / right.norm())))
    return differences


def equal(ours: Sequence[Step], theirs: Sequence[Step]) -> bool:
    return all(loss < EQUAL and gradient < EQUAL for loss, gradient in apart(ours, theirs))


def different(ours: Sequence[Step], theirs: Sequence[Step]) -> bool:
    return any(gradient > DIFFERENT for _, gradient in apart(ours, theirs))


def check(case: Case, theirs: Sequence[Step], round_: Round, model, sampler) -> list[Step]:
    """Our steps, once they equal theirs, and differ with options that make another algorithm."""
    rows, options = [step.rows for step in theirs], {**case.ours, **case.both}
    ours = our_side.steps(model, round_, rows, sampler, **options)
    assert abs(ours[1].loss) > LEFT * ours[1].metrics["terms"]
    assert equal(ours, theirs), apart(ours, theirs)
    for other in case.unlike:
        assert different(our_side.steps(model, round_, rows, sampler, **merged(options, dict(other))), theirs), other
    return ours


@pytest.mark.parametrize("case", RLOO, ids=lambda case: case.name.replace(" ", "-"))
def test_loss_and_gradient_are_those_of_trls_rloo_trainer(tiny_model, tokenizer, trl_side, tmp_path, case) -> None:
    round_ = make_round(tokenizer, case.samples, case.functions, case.unknown)
    options = {**case.both, **case.theirs}
    theirs = trl_side.steps(trl_side.Rloo, tiny_model, tokenizer, round_, tmp_path, **options)
    assert theirs[1].metrics["clip_ratio/region_mean"] > 0
    check(case, theirs, round_, tiny_model, None)


@pytest.mark.parametrize("case", GRPO, ids=lambda case: case.name.replace(" ", "-"))
def test_loss_and_gradient_are_those_of_trls_grpo_trainer(tiny_model, tokenizer, trl_side, tmp_path, case) -> None:
    round_ = make_round(tokenizer, case.samples, case.functions, case.unknown)
    sampler = our_side.sampling_logps(tiny_model, round_) if case.sampler else None
    options = {**case.both, **case.theirs}
    theirs = trl_side.steps(trl_side.Grpo, tiny_model, tokenizer, round_, tmp_path, sampler, **options)
    clipped = "cispo_clip_ratio" if case.theirs["loss_type"] == "cispo" else "clip_ratio/region_mean"
    assert theirs[1].metrics[clipped] > 0
    ours = check(case, theirs, round_, tiny_model, sampler)
    if sampler and "mask_truncated_completions" not in case.both:
        names = [name for name in theirs[0].metrics if name.startswith("sampling/")]
        assert len(names) == 5
        assert [ours[0].metrics[name] for name in names] == pytest.approx(
            [theirs[0].metrics[name] for name in names], rel=1e-4
        )


def test_the_end_token_counts_for_trl_as_here_though_it_pads_as_well(tiny_model, tokenizer, trl_side, tmp_path) -> None:
    round_ = make_round(tokenizer, 4)
    tokenizer.pad_token = tokenizer.eos_token
    theirs = trl_side.steps(trl_side.Rloo, tiny_model, tokenizer, round_, tmp_path)
    check(Case("the end token pads", []), theirs, round_, tiny_model, None)
    pairs = zip(round_.completion_ids, round_.truncated, strict=True)
    shorn = round_._replace(completion_ids=[ids if truncated else ids[:-1] for ids, truncated in pairs])
    assert different(our_side.steps(tiny_model, shorn, [step.rows for step in theirs]), theirs)
