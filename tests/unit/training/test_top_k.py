"""The divergence from a teacher's likeliest tokens is that of a plain loop in float64, on every path of the head."""

import math
from functools import cache

import peft
import pyarrow as pa
import pytest
import torch
from models import VOCABULARY, qwen3

from rloo_pipeline.algorithm import divergence
from rloo_pipeline.artifacts import tables
from rloo_pipeline.config import Algorithm, Rollout
from rloo_pipeline.errors import UserError
from rloo_pipeline.training import packing, round_data
from rloo_pipeline.training.batch import AlgorithmState, Batch, RoundTensors, make_batch
from rloo_pipeline.training.engine import loss_at_rows
from rloo_pipeline.training.kernels import lm_head
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.metrics import update_metrics
from rloo_pipeline.training.objective import Record, StepLoss

K, T, TEMPERATURE = 3, 7, 0.8
BETAS = [0.0, 0.3, 1.0]
TRUNCATED = 5
draw = torch.Generator().manual_seed(3)
PROMPTS = [torch.randint(1, VOCABULARY, (4 + row // 4,), generator=draw).tolist() for row in (0, 0, 0, 0, 4, 4, 4, 4)]
PROMPTS = [PROMPTS[row // 4 * 4] for row in range(8)]
COMPLETIONS = [torch.randint(1, VOCABULARY, (length,), generator=draw).tolist() for length in (3, 7, 1, 5, 2, 6, 4, 4)]


def loop(p: list[float], q: torch.Tensor, beta: float) -> torch.Tensor:
    """The divergence of two distributions, outcome by outcome."""
    total = torch.zeros((), dtype=torch.float64)
    for teacher, student in zip(p, q, strict=True):
        if beta == 1:
            total = total + student * (student.log() - math.log(teacher))
        elif beta == 0:
            total = total + teacher * (math.log(teacher) - student.log())
        else:
            mean = beta * teacher + (1 - beta) * student
            total = total + beta * teacher * (math.log(teacher) - mean.log())
            total = total + (1 - beta) * student * (student.log() - mean.log())
    return total


def with_rest(values: torch.Tensor) -> torch.Tensor:
    return torch.cat([values, 1 - values.sum(-1, keepdim=True)])


@pytest.mark.parametrize("beta", BETAS)
def test_the_divergence_and_its_gradient_are_those_of_a_loop_over_outcomes(beta) -> None:
    teacher, student = (torch.randn(5, 11, generator=draw, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    top, ids = teacher.topk(4)
    actual, expected = (student.clone().requires_grad_() for _ in range(2))
    divergence.of_top(actual.gather(-1, ids), top, beta).sum().backward()
    rows = [
        loop(with_rest(p.exp()).tolist(), with_rest(q.exp()), beta)
        for p, q in zip(top, expected.gather(-1, ids), strict=True)
    ]
    torch.stack(rows).sum().backward()
    torch.testing.assert_close(divergence.of_top(student.gather(-1, ids), top, beta), torch.stack(rows).detach())
    torch.testing.assert_close(actual.grad, expected.grad)
    whole = divergence.of_top(student, teacher, beta)
    exact = torch.stack([loop(p.exp().tolist(), q.exp(), beta) for p, q in zip(teacher, student, strict=True)])
    torch.testing.assert_close(whole, exact)
    assert (whole >= torch.stack(rows).detach()).all(), "to take tokens together never adds to a divergence"


@pytest.mark.parametrize("beta", BETAS)
def test_a_token_that_the_student_lacks_or_never_samples_is_one_of_the_rest_and_certainty_is_finite(beta) -> None:
    teacher = torch.tensor([[0.6, 0.2, 0.1]]).double().log()
    lacking = teacher.clone()
    lacking[0, 1] = -math.inf
    student = torch.tensor([[0.3, 0.2, 0.4]]).double().log().requires_grad_()
    value = divergence.of_top(student, lacking, beta)
    torch.testing.assert_close(value, divergence.of_top(student[:, [0, 2]], teacher[:, [0, 2]], beta))
    value.sum().backward()
    assert student.grad[0, 1] == 0
    never = torch.tensor([[0.3, 1.0, 0.4]]).double().log()
    never[0, 1] = lm_head.NEVER
    assert divergence.of_top(never, teacher, beta) == value
    lacking[0, 1] = lm_head.NEVER
    assert divergence.of_top(student, lacking, beta) == value, "so does one that the teacher never samples"
    certain, sure = torch.tensor([[0.0, -200.0]]).double(), torch.tensor([[-200.0, 0.0]]).double().requires_grad_()
    bounded = divergence.of_top(sure, certain, beta)
    bounded.sum().backward()
    assert bounded.isfinite().all()
    assert sure.grad.isfinite().all()


@cache
def teacher_table() -> pa.Table:
    """The likeliest tokens of another model, by plain transformers."""
    teacher = qwen3()
    for number, parameter in enumerate(teacher.parameters()):
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    ids, logps, sampled = [], [], []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        with torch.no_grad():
            all_logps = plain(teacher, prompt, completion)
        top = all_logps.topk(K)
        ids.append(top.indices.flatten().tolist())
        logps.append(top.values.flatten().tolist())
        sampled.append(all_logps.gather(-1, torch.tensor(completion).unsqueeze(-1)).flatten().tolist())
    rows = {"prompt_id": [""] * 8, "sample": [0] * 8, "teacher_logps": sampled, "top_ids": ids, "top_logps": logps}
    return pa.table(rows, schema=tables.WITH_TOP)


def plain(model, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """[tokens, vocabulary] log-probs at the places of a completion."""
    model.set_attn_implementation("eager")
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1)


ALGORITHM = {
    "beta": 0,
    "loss_agg_mode": "token_mean",
    "importance_sampling_level": "token",
    "mask_truncated_completions": True,
}


def batch_of(beta: float, table: pa.Table) -> tuple[Algorithm, Batch]:
    teacher = {"name_or_path": "teacher", "top_k": K, "weight": 0.7, "beta": beta}
    algorithm = Algorithm.model_validate({**ALGORITHM, "teacher": teacher})
    mask = torch.arange(T) < torch.tensor(list(map(len, COMPLETIONS))).unsqueeze(-1)
    top = torch.zeros(8, T, K)
    top[mask] = torch.tensor([value for row in table["top_logps"].to_pylist() for value in row]).view(-1, K)
    scores = torch.full((8,), math.nan, dtype=torch.float64)
    truncated = torch.arange(8) == TRUNCATED
    completions = RoundTensors(scores, mask, truncated, None, teacher_top_logps=top)
    rollout = Rollout(num_generations=4, generation_batch_size=8)
    return algorithm, make_batch(algorithm, rollout, completions, AlgorithmState())[0]


def expected(beta: float, table: pa.Table, model) -> tuple[float, torch.Tensor, float]:
    """The loss, its gradient, and the divergence of a token, in float64."""
    model = model.double()
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        if row == TRUNCATED:
            continue
        tokens += len(completion)
        probs = plain(model, prompt, completion).exp()
        ids, logps = (torch.tensor(table[name][row].as_py()).view(-1, K) for name in ("top_ids", "top_logps"))
        for place in range(len(completion)):
            p = with_rest(logps[place].double().exp()).tolist()
            total = total + loop(p, with_rest(probs[place, ids[place]]), beta)
    (0.7 * total / tokens).backward()
    return 0.7 * total.item() / tokens, trained_gradient(model), total.item() / tokens


def trained_gradient(model) -> torch.Tensor:
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.requires_grad])


def adapted(model):
    """The model with an adapter."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


PATHS = ("at once", "in slices", "all logits", "adapter")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("beta", BETAS)
def test_loss_and_gradient_are_exact_on_every_path_of_the_head(beta, path, monkeypatch) -> None:
    table = teacher_table()
    algorithm, batch = batch_of(beta, table)
    assert (batch.advantages == 0).all()
    candidates = round_data.candidates_of(table, K, VOCABULARY)
    sequences = packing.Sequences(PROMPTS, COMPLETIONS, candidates=candidates)
    if path == "in slices":
        monkeypatch.setitem(lm_head.ELEMENTS, "cpu", 4 * VOCABULARY)
        monkeypatch.setattr(lm_head, "IN_CACHE", 2 * VOCABULARY)
    build = adapted if path == "adapter" else lambda model: model
    loss, own, of_token = expected(beta, table, build(qwen3()))
    rows = [row for row in range(8) if row != TRUNCATED]
    for parts in (1, 3):
        module, record = TokenLogProbs(build(qwen3()), TEMPERATURE), Record.empty(8)
        module.head_form = None if path == "all logits" else module.head_form
        step, total = StepLoss(algorithm, batch, range(8), T, record), 0.0
        for part in (rows[number::parts] for number in range(parts)):
            share = module(sequences.pick(part), loss_at_rows(part, step))
            share.backward()
            total += float(share)
        assert total == pytest.approx(loss, rel=1e-5)
        assert (trained_gradient(module.model) - own).norm() < 1e-5 * own.norm()
        metrics = update_metrics(batch, record, algorithm, ratio_is_known=False)
        assert metrics["teacher/kl"] == pytest.approx(of_token, rel=1e-5)


@pytest.mark.parametrize("path", PATHS[:3])
def test_the_likeliest_tokens_are_those_of_plain_transformers(path, monkeypatch) -> None:
    if path == "in slices":
        monkeypatch.setattr(lm_head, "MIN_ROWS", 2)
        monkeypatch.setattr(lm_head, "IN_CACHE", 2 * VOCABULARY)
    module, exact = TokenLogProbs(qwen3(), TEMPERATURE), qwen3().double()
    module.head_form = None if path == "all logits" else module.head_form
    pack = packing.Sequences(PROMPTS, COMPLETIONS).pick(range(8))
    with torch.no_grad():
        top = module(pack, top_k=K)
        assert torch.equal(top.logps, module(pack).logps)
        logps = torch.cat([plain(exact, *pair) for pair in zip(PROMPTS, COMPLETIONS, strict=True)])
    torch.testing.assert_close(top.top_logps.double(), logps.topk(K).values, atol=1e-5, rtol=1e-5)
    assert torch.equal(top.top_ids, logps.topk(K).indices)


def test_a_table_without_the_likeliest_tokens_or_with_another_number_is_refused() -> None:
    table = teacher_table()
    for wrong, count in ((table.drop_columns("top_ids"), K), (table, K + 1)):
        with pytest.raises(UserError, match=r"the column top_ids of the teacher's tables does not have"):
            round_data.candidates_of(wrong, count, VOCABULARY)


REFUSED = {
    "discount counts the KL of later tokens": {"top_k": 4, "discount": 0.5},
    "beta: 0.5 needs the teacher's distribution": {"beta": 0.5},
    "greater than or equal to 1": {"top_k": 0},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_top_k_does_not_go_with_is_refused(message) -> None:
    with pytest.raises(ValueError, match=message):
        Algorithm.model_validate({**ALGORITHM, "teacher": {"name_or_path": "x", **REFUSED[message]}})


def test_with_top_k_a_completion_can_be_one_action_and_no_pass_for_old_log_probs_is_needed() -> None:
    section = {"beta": 0, "teacher": {"name_or_path": "x", "top_k": 4}}
    algorithm = Algorithm.model_validate(section)
    assert not algorithm.needs_old_pass
    with pytest.raises(ValueError, match="teacher needs tokens as actions"):
        Algorithm.model_validate({"beta": 0, "teacher": {"name_or_path": "x"}})
