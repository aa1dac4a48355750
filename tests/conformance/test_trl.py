"""With the same completions, weights and options, loss and gradient are those of TRL's own trainers.

Both sides take two optimizer steps: the first on fresh samples, the second with weights that have moved so far that the
clip bites. Old, new and reference log-probs are each side's own, in float32.
"""

from __future__ import annotations

import gc
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
    """Imported late: TRL takes seconds. Each of its trainers collects garbage, which no import is."""
    from conformance import trl_side

    gc.freeze()
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


def relative_differences(our_steps: Sequence[Step], trl_steps: Sequence[Step]) -> list[tuple[float, float]]:
    """Differences of each step's loss and gradient, relative to TRL's.

    The first step's loss is measured against the larger one of the two: on fresh samples it cancels to 0 where the
    advantages of a group do.
    """
    first, second = (abs(step.loss) for step in trl_steps)
    differences = []
    for our_step, trl_step, scale in zip(our_steps, trl_steps, (max(first, second), second), strict=True):
        assert our_step.gradient.keys() == trl_step.gradient.keys()
        our_gradient, trl_gradient = (
            torch.cat([step.gradient[name].flatten() for name in trl_step.gradient]) for step in (our_step, trl_step)
        )
        differences.append(
            (
                abs(our_step.loss - trl_step.loss) / scale,
                float((our_gradient - trl_gradient).norm() / trl_gradient.norm()),
            )
        )
    return differences


def equal(our_steps: Sequence[Step], trl_steps: Sequence[Step]) -> bool:
    return all(loss < EQUAL and gradient < EQUAL for loss, gradient in relative_differences(our_steps, trl_steps))


def different(our_steps: Sequence[Step], trl_steps: Sequence[Step]) -> bool:
    return any(gradient > DIFFERENT for _, gradient in relative_differences(our_steps, trl_steps))


def check(case: Case, trl_steps: Sequence[Step], round_: Round, model, sampler) -> list[Step]:
    """Checks that our steps equal TRL's, and differ with options that change the algorithm. Returns our steps."""
    rows, options = [step.rows for step in trl_steps], {**case.our_options, **case.common_options}
    our_steps = our_side.steps(model, round_, rows, sampler, **options)
    assert abs(our_steps[1].loss) > LEFT * our_steps[1].metrics["terms"]
    assert equal(our_steps, trl_steps), relative_differences(our_steps, trl_steps)
    for other in case.other_algorithms:
        assert different(our_side.steps(model, round_, rows, sampler, **merged(options, dict(other))), trl_steps), other
    return our_steps


@pytest.mark.parametrize("case", RLOO, ids=lambda case: case.name.replace(" ", "-"))
def test_loss_and_gradient_are_those_of_trls_rloo_trainer(tiny_model, tokenizer, trl_side, tmp_path, case) -> None:
    round_ = make_round(tokenizer, case.samples, case.functions, case.unknown)
    options = {**case.common_options, **case.trl_options}
    trl_steps = trl_side.steps(trl_side.Rloo, tiny_model, tokenizer, round_, tmp_path, **options)
    assert trl_steps[1].metrics["clip_ratio/region_mean"] > 0
    check(case, trl_steps, round_, tiny_model, None)


@pytest.mark.long
@pytest.mark.parametrize("case", GRPO, ids=lambda case: case.name.replace(" ", "-"))
def test_loss_and_gradient_are_those_of_trls_grpo_trainer(tiny_model, tokenizer, trl_side, tmp_path, case) -> None:
    round_ = make_round(tokenizer, case.samples, case.functions, case.unknown)
    sampler = our_side.sampling_logps(tiny_model, round_) if case.sampler else None
    options = {**case.common_options, **case.trl_options}
    trl_steps = trl_side.steps(trl_side.Grpo, tiny_model, tokenizer, round_, tmp_path, sampler, **options)
    clipped = "cispo_clip_ratio" if case.trl_options["loss_type"] == "cispo" else "clip_ratio/region_mean"
    assert trl_steps[1].metrics[clipped] > 0
    our_steps = check(case, trl_steps, round_, tiny_model, sampler)
    if sampler and "mask_truncated_completions" not in case.common_options:
        names = [name for name in trl_steps[0].metrics if name.startswith("sampling/")]
        assert len(names) == 5
        assert [our_steps[0].metrics[name] for name in names] == pytest.approx(
            [trl_steps[0].metrics[name] for name in names], rel=1e-4
        )


@pytest.mark.parametrize("name", ["dapo", "cispo"])
def test_trl_divides_a_step_by_the_tokens_of_the_round(tiny_model, tokenizer, trl_side, tmp_path, name) -> None:
    """The difference that docs/trl.md names: the step's own tokens over those of a mean step of the round."""
    case = next(case for case in GRPO if case.name == name)
    round_ = make_round(tokenizer, 4)
    options = {**case.common_options, **case.trl_options, "steps_per_generation": 2}
    trl_steps = trl_side.steps(trl_side.Grpo, tiny_model, tokenizer, round_, tmp_path, **options)
    rows = [step.rows for step in trl_steps]
    our_steps = our_side.steps(tiny_model, round_, rows, **case.our_options, **case.common_options)
    tokens = [sum(len(round_.completion_ids[row]) for row in chosen) for chosen in rows]
    factors = [2 * own / sum(tokens) for own in tokens]
    scaled = [
        step._replace(loss=step.loss * factor, gradient={key: factor * value for key, value in step.gradient.items()})
        for step, factor in zip(our_steps, factors, strict=True)
    ]
    assert equal(scaled, trl_steps), relative_differences(scaled, trl_steps)
    assert all(0.05 < abs(factor - 1) < 0.2 for factor in factors), factors


def test_trl_averages_the_token_means_of_micro_batches(tiny_model, tokenizer, trl_side, tmp_path) -> None:
    """Another difference that docs/trl.md names, of `bnpo`."""
    case = next(case for case in GRPO if case.name == "bnpo")
    round_ = make_round(tokenizer, 4)
    options = {**case.trl_options, "gradient_accumulation_steps": 2}
    trl_steps = trl_side.steps(trl_side.Grpo, tiny_model, tokenizer, round_, tmp_path, **options)
    rows = [step.rows for step in trl_steps]
    means = []
    for place, chosen in enumerate(rows):
        first, second = (
            our_side.steps(tiny_model, round_, [*rows[:place], part], **case.our_options)[place]
            for part in (chosen[: len(chosen) // 2], chosen[len(chosen) // 2 :])
        )
        gradient = {name: (first.gradient[name] + second.gradient[name]) / 2 for name in first.gradient}
        means.append(first._replace(loss=(first.loss + second.loss) / 2, gradient=gradient))
    assert equal(means, trl_steps), relative_differences(means, trl_steps)
    assert different(our_side.steps(tiny_model, round_, rows, **case.our_options), trl_steps)


def test_with_equal_scores_trl_divides_by_the_spread_of_the_kl(tiny_model, tokenizer, trl_side, tmp_path) -> None:
    """The other difference: in the first step, the gradient has the same direction and another length."""
    round_ = make_round(tokenizer, 4)._replace(scores=[[1.0] * 16])
    options = {"normalize_advantages": True}
    trl_steps = trl_side.steps(trl_side.Rloo, tiny_model, tokenizer, round_, tmp_path, **options)
    our_steps = our_side.steps(tiny_model, round_, [step.rows for step in trl_steps], **options)
    names = trl_steps[0].gradient
    ours, theirs = (
        torch.cat([steps[0].gradient[name].flatten() for name in names]) for steps in (our_steps, trl_steps)
    )
    torch.testing.assert_close(ours / ours.norm(), theirs / theirs.norm(), atol=1e-4, rtol=0)
    assert ours.norm() < 0.8 * theirs.norm()


def test_the_end_token_counts_on_both_sides_even_where_it_is_the_pad_token(
    tiny_model, tokenizer, trl_side, tmp_path
) -> None:
    round_ = make_round(tokenizer, 4)
    tokenizer.pad_token = tokenizer.eos_token
    trl_steps = trl_side.steps(trl_side.Rloo, tiny_model, tokenizer, round_, tmp_path)
    check(Case("the end token pads", []), trl_steps, round_, tiny_model, None)
    pairs = zip(round_.completion_ids, round_.truncated, strict=True)
    without_end_tokens = round_._replace(completion_ids=[ids if truncated else ids[:-1] for ids, truncated in pairs])
    assert different(our_side.steps(tiny_model, without_end_tokens, [step.rows for step in trl_steps]), trl_steps)
