"""The mathematics of episodes is over the model's own tokens: loss, gradient and statistics are those of a plain loop
over them in float64, and answers of tools are context and nothing else."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
import torch
from models import VOCABULARY, gradient, qwen3
from synthetic_runs import configuration
from torch import Tensor

from rloo_pipeline import import_string
from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.round_tables import RoundTables
from rloo_pipeline.config import Algorithm, estimator
from rloo_pipeline.config.presets import PRESETS
from rloo_pipeline.training import batch_forms, forward_only, packing, round_data
from rloo_pipeline.training.batch import AlgorithmState, Batch, make_batch
from rloo_pipeline.training.engine import loss_at_rows
from rloo_pipeline.training.lengths import length_metrics
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.metrics import tool_metrics, update_metrics
from rloo_pipeline.training.objective import Record, StepLoss
from rloo_pipeline.training.packing import Sequences

TURNS = [[3], [2, 3, 2], [1, 4, 1], [4, 2, 3], [2, 1, 1, 2, 3], [1, 1], [5], [2, 2, 4]] * 2
"""Tokens of each turn of a completion: of the model, of a tool, of the model, and so on."""
SCORES = [1.0, 0.0, 0.5, 1.0, 0.0, 0.25, 1.0, 0.75, 1.0, 1.0, 1.0, 1.0, 0.0, 0.5, 0.5, 1.0]
TRUNCATED = (2, 13)
LONGEST, TEMPERATURE, K = 20, 0.8, 4
NAN = float("nan")


def rows() -> list[dict[str, Any]]:
    """Four groups of four episodes; every second prompt is that of the group before."""
    draw = torch.Generator().manual_seed(5)

    def ids(count: int) -> list[int]:
        return torch.randint(1, VOCABULARY, (count,), generator=draw).tolist()

    prompts = [ids(6), ids(3), ids(7), ids(6)]
    written = []
    for place, lengths in enumerate(TURNS):
        ends = [sum(lengths[: turn + 1]) for turn in range(len(lengths))]
        mask = [turn % 2 == 0 for turn, length in enumerate(lengths) for _ in range(length)]
        own = [-1.0 - float(torch.rand((), generator=draw)) for _ in range(sum(mask))]
        turns = [
            {"start": start, "end": end, "role": "tool" if turn % 2 else "assistant"}
            for turn, (start, end) in enumerate(pairwise([0, *ends]))
        ]
        written.append(
            {"prompt_id": f"p{place // K}", "sample": place % K, "prompt_ids": prompts[place // K]}
            | {"completion_ids": ids(len(mask)), "completion": "", "sampling_logps": own, "seed": 0}
            | {"finish_reason": "length" if place in TRUNCATED else "stop", "loss_mask": mask, "turns": turns}
            | {
                "messages": "[]",
                "environment_reward": None,
                "environment_state": None,
                "tool_calls": 3,
                "tool_failures": place % 2,
            }
        )
    return written


ROWS = rows()


def model(noise: float = 0.0) -> Any:
    """A small policy; `noise` is by how much its weights are away from those of π_old."""
    policy = qwen3()
    draw = torch.Generator().manual_seed(9)
    for parameter in policy.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=draw)
    return policy


class Own(NamedTuple):
    """What plain transformers in float64 give for the model's own tokens of a completion, one after the other."""

    logps: list[Tensor]
    entropy: float


def plain(policy: Any) -> list[Own]:
    """One sequence at a time, one token at a time."""
    policy.set_attn_implementation("eager")
    result = []
    for row in ROWS:
        logits = policy(input_ids=torch.tensor([row["prompt_ids"] + row["completion_ids"]])).logits[0] / TEMPERATURE
        logps, entropy = [], 0.0
        for place, own in enumerate(row["loss_mask"]):
            if own:
                distribution = logits[len(row["prompt_ids"]) + place - 1].log_softmax(-1)
                logps.append(distribution[row["completion_ids"][place]])
                entropy -= float((distribution.exp() * distribution).sum().detach())
        result.append(Own(logps, entropy))
    return result


def values(policy: Any) -> list[list[float]]:
    with torch.no_grad():
        return [[float(logp) for logp in own.logps] for own in plain(policy.double())]


@pytest.fixture(scope="module")
def logps() -> dict[str, list[list[float]]]:
    """Log-probs of the own tokens under π_old, π_ref and the sampler."""
    draw = torch.Generator().manual_seed(2)
    old = values(model())
    noisy = [[logp + 0.1 * float(torch.randn((), generator=draw)) for logp in row] for row in old]
    return {"old": old, "reference": values(model(-0.01)), "sampling": noisy}


def batch_of(algorithm: dict[str, Any], logps: dict[str, list[list[float]]]) -> tuple[Batch, Algorithm]:
    """The batch that an update makes of the tables."""
    rollout = {"num_generations": K, "generation_batch_size": len(ROWS), "max_completion_length": LONGEST}
    config = configuration(algorithm=algorithm, rollout={**rollout, "temperature": TEMPERATURE})
    episodes = [row | {"sampling_logps": own} for row, own in zip(ROWS, logps["sampling"], strict=True)]
    rollouts = pa.Table.from_pylist(episodes, schema=tables.EPISODES)
    reference = {"reference_logps": pa.array(logps["reference"], pa.list_(pa.float32()))}
    scores = pa.table({"reward": pa.array(SCORES)})
    data = round_data.completions_of(
        config.algorithm, RoundTables(rollouts, scores, pa.table(reference)), config.rollout.cut_by
    )
    if not config.algorithm.beta:
        data = data._replace(reference_logps=None)
    old = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in logps["old"]], batch_first=True)
    return make_batch(config.algorithm, config.rollout, data._replace(old_logps=old), AlgorithmState())[0], (
        config.algorithm
    )


def test_the_overlong_penalty_counts_what_tools_answered_and_the_target_length_does_not(logps) -> None:
    length = {"overlong_cache": LONGEST, "overlong_penalty": 0.5, "target": 4, "target_penalty": 0.1}
    batch, _ = batch_of({"beta": 0, "response_length": length}, logps)
    penalties = [0.5 * sum(turns) / LONGEST + 0.1 * abs(sum(turns[::2]) - 4) / 4 for turns in TURNS]
    assert batch.rewards.tolist() == pytest.approx([s - p for s, p in zip(SCORES, penalties, strict=True)])


def kl_of(name: str, logp: Any, reference: float) -> Any:
    if name == "k1":
        return logp - reference
    if name == "k2":
        return 0.5 * (logp - reference) ** 2
    difference = reference - logp
    ratio = difference.exp() if isinstance(difference, Tensor) else torch.tensor(difference).double().exp()
    return ratio - 1 - difference


def advantages_of(algorithm: Algorithm, batch: Batch, logps: dict[str, list[list[float]]]) -> list[list[float]]:
    """The advantage of each own token of each completion."""
    token_kl = [
        [float(kl_of(algorithm.kl.estimator, o, r)) * (not masked) for o, r in zip(old, reference, strict=True)]
        for old, reference, masked in zip(logps["old"], logps["reference"], batch.masked.tolist(), strict=True)
    ]
    placement, beta = algorithm.kl.placement, algorithm.beta
    rewards = [NAN if out else score for score, out in zip(SCORES, batch.excluded.tolist(), strict=True)]
    if placement == "reward":
        rewards = [reward - beta * sum(kl) for reward, kl in zip(rewards, token_kl, strict=True)]
    function = import_string.load(estimator(algorithm.advantage))
    groups = torch.tensor(rewards, dtype=torch.float64).view(-1, K)
    plain = function.formula(groups).flatten().tolist()
    result = [[value] * len(kl) for value, kl in zip(plain, token_kl, strict=True)]
    if placement == "token_reward":
        result = [[a - beta * sum(kl[t:]) for t, a in enumerate(row)] for row, kl in zip(result, token_kl, strict=True)]
    if function.whitened:
        over = [a for row in result for a in (row if placement == "token_reward" else row[:1]) if a == a]
        mean = sum(over) / len(over)
        std = (sum((a - mean) ** 2 for a in over) / (len(over) - 1)) ** 0.5
        result = [[(a - mean) / (std + 1e-4) for a in row] for row in result]
    return [[0.0 if a != a else a for a in row] for row in result]


def clamped(value: Tensor, low: float | None, high: float | None) -> Tensor:
    return value if low is None and high is None else value.clamp(low, high)


def weight_of(algorithm: Algorithm, differences: list[float]) -> list[float]:
    """The mismatch weight of each action: of each token, or of the completion."""
    section = algorithm.mismatch
    if section.correction == "none":
        return [1.0]
    if not section.correction.startswith("token"):
        differences = [sum(differences) / (len(differences) if "mean" in section.correction else 1)]
    weights = [float(torch.tensor(difference).double().exp()) for difference in differences]
    if section.correction.endswith("tis"):
        return [float(clamped(torch.tensor(w).double(), section.min, section.max)) for w in weights]
    inside = [(section.min or 0.0) <= w <= (section.max or float("inf")) for w in weights]
    return [(1.0 if "mean" in section.correction else w) * within for w, within in zip(weights, inside, strict=True)]


def kept_by(algorithm: Algorithm, differences: list[float]) -> list[float]:
    """1 for each token that the rejection keeps, else 0."""
    rule = algorithm.mismatch.reject
    if rule is None:
        return [1.0] * len(differences)
    whole = sum(differences) / (len(differences) if rule.by == "sequence_mean" else 1)
    judged = differences if rule.by == "token" else [whole] * len(differences)
    low, high = rule.min or 0.0, rule.max or float("inf")
    return [float(low <= math.exp(difference) <= high) for difference in judged]


def total(algorithm: Algorithm, terms: list[list[Tensor]], lengths: list[int], batch: Batch) -> Tensor:
    """The aggregation, written out."""
    number, mode = int((~batch.excluded).sum()), algorithm.loss_agg_mode
    tokens = sum(length for length, masked in zip(lengths, batch.masked.tolist(), strict=True) if not masked)
    result = torch.zeros((), dtype=torch.float64)
    for of_row, length in zip(terms, lengths, strict=True):
        if not of_row:
            continue
        own = of_row * length if len(of_row) == 1 and mode != "sequence" else of_row
        divisor = {
            "sequence": number,
            "token_mean": tokens,
            "sequence_mean_token_mean": number * length,
            "sequence_mean_token_sum": number,
            "sequence_mean_token_sum_norm": number * LONGEST,
        }[mode]
        result = result + torch.stack(own).sum() / divisor
    return result


def loop(algorithm: Algorithm, batch: Batch, logps: dict[str, list[list[float]]], policy: Any) -> tuple[Tensor, float]:
    """The loss of a step and the entropy of its tokens, in plain loops over the model's own tokens."""
    advantages = advantages_of(algorithm, batch, logps)
    high = algorithm.epsilon if algorithm.epsilon_high is None else algorithm.epsilon_high
    terms: list[list[Tensor]] = []
    kls: list[list[Tensor]] = []
    entropy = 0.0
    own_tokens = plain(policy)
    for row, own in enumerate(own_tokens):
        terms.append([])
        kls.append([])
        if batch.masked[row]:
            continue
        entropy += own.entropy
        old, count = logps["old"][row], len(own.logps)
        differences = [logp - o for logp, o in zip(own.logps, old, strict=True)]
        if algorithm.importance_sampling_level == "sequence":
            differences = [torch.stack(differences).sum()]
        elif algorithm.importance_sampling_level == "sequence_mean":
            differences = [torch.stack(differences).sum() / count]
        ratios = [difference.exp() for difference in differences]
        actions = len(ratios) if algorithm.clip in ("ppo", "clip_cov") else count
        gaps = [o - s for o, s in zip(old, logps["sampling"][row], strict=True)]
        mismatch, kept = weight_of(algorithm, gaps), kept_by(algorithm, gaps)
        for t in range(actions):
            advantage, ratio = advantages[row][t], ratios[t % len(ratios)]
            if algorithm.clip in ("ppo", "clip_cov"):  # no token is chosen here, but in test_token_choice.py
                bounded = clamped(ratio, None, algorithm.delta)
                clipped = ratio.clamp(1 - algorithm.epsilon, 1 + high)
                loss = -torch.minimum(bounded * advantage, clipped * advantage)
            elif algorithm.clip == "kl_cov":
                loss = -ratio * advantage
            elif algorithm.clip == "cispo":
                loss = -ratio.detach().clamp(max=1 + high) * advantage * own.logps[t]
            elif algorithm.clip == "sapo":
                side = algorithm.sapo_temperature_pos if advantage > 0 else algorithm.sapo_temperature_neg
                loss = -4 / side / (1 + (-side * (ratio - 1)).exp()) * advantage
            elif algorithm.clip == "dppo_tv":
                moved = float(own.logps[t].detach().exp()) - math.exp(old[t])
                outside = moved > high if advantage > 0 else moved < -algorithm.epsilon
                loss = -ratio.detach().clamp(max=20) * advantage * own.logps[t] * (not outside)
            elif algorithm.clip == "vespo":
                side = ("pos", "neg")[advantage < 0]
                k, rate = (getattr(algorithm, f"vespo_{name}_{side}") for name in ("k", "lambda"))
                w = math.exp(sum(float(difference) for difference in differences))
                loss = -math.exp(rate) * w**k * math.exp(-rate * w) * advantage * own.logps[t]
            else:
                loss = -advantage * own.logps[t]
            terms[-1].append(loss * mismatch[t % len(mismatch)] * kept[t])
        for t, logp in enumerate(own.logps):
            kl = kl_of(algorithm.kl.estimator, logp, logps["reference"][row][t])
            kls[-1].append(kl * ratios[t % len(ratios)] if algorithm.kl.bias_correction else kl)
    lengths = [len(own.logps) for own in own_tokens]
    loss = total(algorithm, terms, lengths, batch)
    if algorithm.kl.placement == "loss" and algorithm.beta:
        loss = loss + algorithm.beta * total(algorithm, kls, [len(kl) for kl in kls], batch)
    return loss, entropy


def sequences() -> Sequences:
    return round_data.sequences_of(pa.Table.from_pylist(ROWS, schema=tables.EPISODES), None, Policy(Path()))


def trained(algorithm: Algorithm, batch: Batch, module: TokenLogProbs, parts: int = 2) -> tuple[float, Tensor, Record]:
    """Loss, gradient and record of one step in some micro-batches."""
    record = Record.empty(len(ROWS))
    step = StepLoss(algorithm, batch, range(len(ROWS)), LONGEST, record, first=True)
    unmasked = [row for row in range(len(ROWS)) if not batch.masked[row]]
    loss = 0.0
    for part in (unmasked[number::parts] for number in range(parts)):
        share = module(sequences().pick(part), loss_at_rows(part, step))
        share.backward()
        loss += float(share)
    return loss, gradient(module.model), record


TOKENS = {"importance_sampling_level": "token", "beta": 0.0}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"preset": name} for name in PRESETS if name not in ("maxrl", "gdpo")},  # tests/pipeline has gdpo
    "truncated are masked": {"preset": "rloo", "mask_truncated_completions": True},
    "truncated are masked as in trl": {"preset": "trl", "mask_truncated_completions": True},
    "kl in the loss of completions": {"beta": 0.2, "kl": {"placement": "loss", "estimator": "k3"}},
    "kl with the ratio": {"beta": 0.2, "kl": {"placement": "loss", "estimator": "k3", "bias_correction": True}},
    "sum of tokens": {**TOKENS, "loss_agg_mode": "sequence_mean_token_sum"},
    "a completion counts its tokens": {"loss_agg_mode": "token_mean"},
    "token_tis": {**TOKENS, "loss_agg_mode": "token_mean", "mismatch": {"correction": "token_tis", "max": 1.05}},
    "token_mis": {
        **TOKENS,
        "loss_agg_mode": "token_mean",
        "mismatch": {"correction": "token_mis", "min": 0.9, "max": 1.1},
    },
    "sequence_tis": {"mismatch": {"correction": "sequence_tis", "max": 1.1}},
    "sequence_mis": {"mismatch": {"correction": "sequence_mis", "min": 0.8, "max": 1.2}},
    "sequence_mean_mis": {"mismatch": {"correction": "sequence_mean_mis", "min": 0.97, "max": 1.03}},
    "token_tis and a rejection of completions": {
        **TOKENS,
        "loss_agg_mode": "token_mean",
        "mismatch": {"correction": "token_tis", "max": 1.05, "reject": {"min": 0.97, "max": 1.03}},
    },
    "sequence_tis and a rejection of tokens": {
        **TOKENS,
        "loss_agg_mode": "sequence_mean_token_mean",
        "mismatch": {"correction": "sequence_tis", "max": 1.1, "reject": {"by": "token", "min": 0.9}},
    },
    "sequence_mis and a rejection by the mean": {
        "mismatch": {"correction": "sequence_mis", "max": 1.2, "reject": {"min": 0.97, "max": 1.03}},
    },
}


@pytest.mark.parametrize("keys", CASES.values(), ids=CASES)
def test_an_update_is_the_plain_loop_over_the_models_own_tokens(keys, logps) -> None:
    batch, algorithm = batch_of(keys, logps)
    theta = model(0.005)
    exact = model(0.005).double()
    expected, entropy = loop(algorithm, batch, logps, exact)
    expected.backward()
    expected_gradient = gradient(exact)
    loss, own, record = trained(algorithm, batch, TokenLogProbs(theta, TEMPERATURE))
    assert loss == pytest.approx(float(expected), rel=1e-4, abs=2e-6)
    assert (own - expected_gradient).norm() < 1e-3 * expected_gradient.norm()
    assert float(record.entropy.sum()) == pytest.approx(entropy, rel=1e-5)
    tokens = sum(sum(row["loss_mask"]) for row, out in zip(ROWS, batch.masked.tolist(), strict=True) if not out)
    metrics = update_metrics(batch, record, algorithm, ratio_is_known=True)
    assert metrics["entropy"] == pytest.approx(entropy / tokens, rel=1e-5)
    assert not batch.masked.all()


def entropies_alone(logps, old_logps, advantages, mask, entropies):
    """A user's loss, without a gradient of its own."""
    return entropies + 0 * logps


def wrapped(*arguments, **keywords):
    """A loss behind a decorator that passes on whatever it gets."""
    return compiled(*arguments, **keywords)


@torch.jit.script
def compiled(logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """A compiled loss, which has no signature."""
    return -advantages * logps


@pytest.mark.parametrize("name", ["wrapped", "compiled"])
def test_a_loss_that_does_not_name_entropies_gets_none(name, logps) -> None:
    keys = {**TOKENS, "loss": f"{__name__}:{name}", "loss_agg_mode": "token_mean"}
    batch, algorithm = batch_of(keys, logps)
    trained(algorithm, batch, TokenLogProbs(model(0.005), TEMPERATURE))


def test_a_loss_of_ones_own_gets_the_entropies_of_its_tokens_and_no_clip_is_claimed_for_it(logps) -> None:
    keys = {**TOKENS, "loss": f"{__name__}:entropies_alone", "loss_agg_mode": "token_mean"}
    batch, algorithm = batch_of(keys, logps)
    loss, own_gradient, record = trained(algorithm, batch, TokenLogProbs(model(0.005), TEMPERATURE))
    metrics = update_metrics(batch, record, algorithm, ratio_is_known=True)
    assert loss == pytest.approx(metrics["entropy"], rel=1e-5)
    assert loss > 0.1
    assert own_gradient.norm() == 0
    assert {metrics[f"clip_ratio/{part}_mean"] for part in ("low", "high", "region")} == {None}


def test_lengths_are_of_the_models_own_tokens() -> None:
    metrics = length_metrics(pa.Table.from_pylist(ROWS, schema=tables.EPISODES))
    own = [sum(row["loss_mask"]) for row in ROWS]
    assert metrics["completions/mean_length"] == sum(own) / len(own)
    assert metrics["num_completion_tokens"] == sum(own)
    assert metrics["completions/clipped_ratio"] == len(TRUNCATED) / len(ROWS)


def test_calls_of_tools_are_those_of_a_completion_and_failures_those_of_a_call() -> None:
    table = pa.Table.from_pylist(ROWS, schema=tables.EPISODES)
    metrics = tool_metrics(table)
    assert metrics == {"tools/call_frequency": 3.0, "tools/failure_frequency": (len(ROWS) // 2) / (3 * len(ROWS))}
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    for end, made in (("length", 2.0), ("stop", 1.0)):  # a limit of turns prevents the last call
        rows = [row | {"messages": json.dumps([call, call]), "finish_reason": end} for row in ROWS]
        named = tables.build(rows, tables.EPISODES, "rollouts", tools='["look", "search"]')
        by_tool = {"tools/look/call_frequency": made, "tools/search/call_frequency": 0.0}
        assert tool_metrics(named) == metrics | by_tool, "of all tools, those that nothing called too"
    none = pa.Table.from_pylist([row | {"tool_calls": 0, "tool_failures": 0} for row in ROWS], schema=tables.EPISODES)
    assert tool_metrics(none) == {"tools/call_frequency": 0.0, "tools/failure_frequency": 0.0}
    assert tool_metrics(table.drop_columns("loss_mask")) == {}


def test_the_gap_to_the_sampler_is_over_own_tokens(logps) -> None:
    batch, algorithm = batch_of({}, logps)
    metrics = update_metrics(batch, Record.empty(len(ROWS)), algorithm, ratio_is_known=True)
    gaps = [
        abs(o - s) for pair in zip(logps["old"], logps["sampling"], strict=True) for o, s in zip(*pair, strict=True)
    ]
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-5)


def changed(row: int, place: int) -> Sequences:
    """The sequences with another token at one place of a completion."""
    prompts, completions, masks, *_ = sequences()
    other = [list(ids) for ids in completions]
    other[row][place] = other[row][place] % (VOCABULARY - 1) + 1
    return Sequences(prompts, other, masks)


def test_a_token_of_a_tool_changes_what_follows_it_and_nothing_else() -> None:
    """Row 1 is 2 own tokens, 3 of a tool, 2 own."""
    module = TokenLogProbs(model(), TEMPERATURE)
    with torch.no_grad():
        before, after = (module(each.pick([1])).logps for each in (sequences(), changed(1, 3)))
    assert torch.equal(before[:2], after[:2])
    assert (before[2:] != after[2:]).all()
    assert torch.equal(sequences().pick([1]).targets, changed(1, 3).pick([1]).targets)


def test_a_last_token_of_a_tool_enters_nowhere(logps) -> None:
    """Row 5 is one own token and one of a tool that nothing follows."""
    module = TokenLogProbs(model(), TEMPERATURE)
    results = []
    for each in (sequences(), changed(5, 1)):
        loss = module(each.pick([4, 5, 6]), lambda _, logps, mask, entropy: (logps * mask * entropy).sum())
        loss.backward()
        results.append((loss.detach(), gradient(module.model)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_a_mask_of_all_true_equals_no_mask_bit_for_bit() -> None:
    prompts, completions, *_ = sequences()
    masks = [[True] * len(ids) for ids in completions]
    module = TokenLogProbs(model(), TEMPERATURE)
    results = []
    for each in (Sequences(prompts, completions), Sequences(prompts, completions, masks)):
        pack = each.pick(range(len(ROWS)))
        loss = module(pack, lambda _, logps, mask, entropy: (logps.exp() * mask + entropy).sum())
        loss.backward()
        results.append((*pack[:2], *pack[3:6], loss.detach(), gradient(module.model)))
        assert each.sampled() == pack.completion_lengths.tolist()
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("form", batch_forms.FORMS.values(), ids=batch_forms.FORMS)
def test_together_is_one_sequence_at_a_time(form) -> None:
    policy = model()
    if form.attention is None:
        policy.set_attn_implementation("eager")
    module = TokenLogProbs(policy, TEMPERATURE)
    module.form = form
    every = sequences()
    with torch.no_grad():
        one_by_one = torch.cat([module(every.pick([row])).logps for row in range(len(ROWS))])
    expected = torch.tensor([logp for row in values(model()) for logp in row], dtype=torch.float32)
    torch.testing.assert_close(one_by_one, expected, rtol=1e-5, atol=1e-5)
    batches = form.micro_batches(every, range(len(ROWS)), 60)
    assert sorted(row for part in batches for row in part) == list(range(len(ROWS)))
    scored = forward_only.score(module, every, 60, "log-probs", entropies=True)
    assert [len(row) for row in scored.logps] == [len(row) for row in scored.entropies] == every.sampled()
    packed = torch.tensor([logp for row in scored.logps for logp in row])
    torch.testing.assert_close(packed, one_by_one, rtol=1e-5, atol=1e-5)


def test_a_pack_without_a_mask_is_made_without_one(monkeypatch) -> None:
    monkeypatch.setattr(packing, "_of_sampled", None)
    assert len(packing.pack([[1]], [[2, 3]]).targets) == 2
