"""Every symptom shows in a run that has it, and not in a nearly identical healthy run."""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from helpers import mini, printed
from synthetic_runs import metrics_of, write_config, write_log

from rloo_pipeline.artifacts.files import read_json, write_json
from rloo_pipeline.checks.history import RoundHistory
from rloo_pipeline.checks.registry import SYMPTOMS
from rloo_pipeline.commands.watch import diagnose as print_table
from rloo_pipeline.config import Config, Gates
from rloo_pipeline.errors import UserError
from rloo_pipeline.judging import run_files
from rloo_pipeline.judging.diagnosis import Symptom, diagnose, showing
from rloo_pipeline.stages.gate import gate

ROUNDS = 12
HEALTHY = {
    "reward": 0.4,
    "reward_std": 0.5,
    "rewards/worked/mean": 0.5,
    "rewards/worked/std": 0.5,
    "frac_reward_zero_std": 0.3,
    "kl": 0.02,
    "entropy": 0.8,
    "grad_norm": 1.0,
    "completions/mean_length": 100.0,
    "completions/clipped_ratio": 0.05,
    "sampling/sampling_logp_difference/mean": 0.01,
    "sampling/kl": 0.001,
    "sampling/outside_band": 0.001,
    "sampling/effective_sample_size": 0.1,
}


def run_of(**last_values: list[float | None]) -> list[dict[str, float | None]]:
    """A healthy run in which the last rounds have other values of some metrics."""
    rounds: list[dict[str, float | None]] = [{"round": number, **HEALTHY} for number in range(1, ROUNDS + 1)]
    for name, values in last_values.items():
        for metrics, value in zip(rounds[-len(values) :], values, strict=True):
            metrics[name] = value
    return rounds


def named(symptoms: list[Symptom]) -> set[str]:
    return {symptom.name for symptom in symptoms}


RISE = [0.4] * 6 + [0.5, 0.55, 0.6, 0.65, 0.65, 0.65]
FALL = [0.5] * 6 + [0.45, 0.4, 0.35, 0.3, 0.3, 0.3]
LONG = [150.0, 180.0, 220.0, 240.0, 260.0]
ALIKE = [0.85, 0.9, 0.9]
HALF = [0.5, 0.55, 0.6]
LOW = [0.2, 0.07, 0.05, 0.04]
STILL = [0.0, *[1e-4, -1e-5] * 5, 1e-4]
MEAN, CLIPPED, ZERO = "completions/mean_length", "completions/clipped_ratio", "frac_reward_zero_std"
GAP, APART, OUTSIDE = "sampling/sampling_logp_difference/mean", "sampling/kl", "sampling/outside_band"
STALE, ESS = "sampling/staleness", "sampling/token_effective_sample_size"
MONITOR, CALLS = "rewards/worked/mean", "tools/call_frequency"
TRAINED = "trained_completions"
SEARCH, MANY = "tools/search/call_frequency", [1.5] * 4

CASES: dict[str, list[tuple[Mapping[str, list[float | None]], Mapping[str, list[float | None]]]]] = {
    # (metrics that show it, similar metrics that are healthy)
    "unstable": [({"grad_norm": [9.0, 1.0, 8.0, 1.0]}, {"grad_norm": [9.0, 1.0, 1.0, 1.0]})],
    "kl_explosion": [
        ({"kl": [0.2, 0.4, 0.55]}, {"kl": [0.12, 0.12, 0.12, 0.2, 0.3, 0.45]}),
        ({"kl": [0.05, 0.15, 0.3]}, {"kl": [0.05, 0.15, 0.24]}),
        ({"kl": [0.05, 0.1, 0.2, 0.3]}, {"kl": [-0.05, 0.1, 0.2, 0.3]}),  # below 0 with rollout.lag
    ],
    "reward_collapse": [
        ({ZERO: ALIKE}, {ZERO: ALIKE, "reward": [0.9, 0.95, 0.97], "reward_std": [0.3, 0.25, 0.2]}),
        ({ZERO: ALIKE}, {ZERO: [0.7, 0.75, 0.8]}),
        ({"entropy": LOW, ZERO: HALF}, {"entropy": [0.2, 0.15, 0.12, 0.1], ZERO: HALF}),
        ({"entropy": LOW, ZERO: HALF}, {"entropy": LOW}),
    ],
    "reward_hacking": [
        ({"reward": RISE, MONITOR: FALL}, {"reward": RISE, MONITOR: [0.5] * 6 + [0.45] * 6}),
        ({"reward": RISE, MONITOR: FALL}, {"reward": [0.4] * 6 + [0.45] * 6, MONITOR: FALL}),
    ],
    "length_explosion": [
        ({MEAN: LONG, CLIPPED: [0.3] * 5, "reward": RISE}, {MEAN: LONG, CLIPPED: [0.1] * 5, "reward": RISE}),
        ({MEAN: LONG}, {MEAN: [120.0, 150.0, 170.0, 180.0, 190.0]}),
    ],
    "empty_outputs": [
        ({MEAN: [20.0, 8.0, 8.0, 8.0]}, {MEAN: [30.0, 20.0, 20.0, 20.0]}),
        ({MEAN: [1.5] * ROUNDS}, {MEAN: [4.0] * ROUNDS}),
    ],
    "cold_start": [
        ({ZERO: [1.0] * ROUNDS}, {ZERO: [1.0, 1.0, 0.85] + [1.0] * 9, "reward_std": [0.0] * ROUNDS}),
        ({TRAINED: [0.0] * ROUNDS}, {TRAINED: [0.0, 4.0] + [0.0] * 10}),
    ],
    "stale_rollouts": [
        ({STALE: [2.0], ESS: [0.4], APART: [0.4]}, {STALE: [2.0], ESS: [0.6], APART: [0.4]}),
        ({STALE: [1.0], ESS: [0.4]}, {STALE: [0.0], ESS: [0.4]}),
    ],
    "sampler_mismatch": [
        ({GAP: [0.15]}, {GAP: [0.08]}),
        ({APART: [0.02]}, {APART: [0.005]}),
        ({OUTSIDE: [0.03]}, {OUTSIDE: [0.01]}),
    ],
    "expert_collapse": [
        (
            {"experts/entropy": [0.9, 0.8, 0.6, 0.3], "experts/largest_share": [0.7] * ROUNDS},
            {"experts/entropy": [0.9, 0.8, 0.6, 0.5], "experts/largest_share": [0.7] * ROUNDS},
        )
    ],
    "no_movement": [
        ({"kl": STILL}, {"kl": [*STILL[:-5], 3e-4, 4e-4, 5e-4, 6e-4, 7e-4]}),
        ({"kl": STILL}, {"kl": STILL, "reward": RISE}),
        ({"kl": STILL}, {"kl": STILL, ZERO: [0.95] * ROUNDS, "reward_std": [0.0] * ROUNDS}),
    ],
    "unused_tools": [
        ({CALLS: [0.5, 0.0, 0.0, 0.0]}, {CALLS: [0.5, 0.01, 0.0, 0.0]}),
        ({CALLS: MANY, SEARCH: [0.5, 0.0, 0.0, 0.0]}, {CALLS: MANY, SEARCH: [0.5, 0.01, 0.0, 0.0]}),
    ],
}


def test_a_healthy_run_has_no_symptom() -> None:
    assert diagnose(run_of(), monitors=["worked"]) == []
    learning = [metrics_of(number) for number in range(1, 41)]
    assert diagnose(learning, monitors=["worked"]) == [], "with two rounds in it that could not be scored"


def test_every_symptom_has_a_case() -> None:
    assert CASES.keys() | {"memory"} == SYMPTOMS.keys() == Gates.model_fields.keys()


@pytest.mark.parametrize(
    ("name", "sick", "healthy"), [(name, *pair) for name, pairs in CASES.items() for pair in pairs]
)
def test_a_symptom_shows_and_a_similar_healthy_run_does_not_show_it(name, sick, healthy) -> None:
    symptoms = diagnose(run_of(**sick), monitors=["worked"])
    assert named(symptoms) == {name}
    assert symptoms[0].last == ROUNDS
    assert symptoms[0].action == "warn"
    assert name not in named(diagnose(run_of(**healthy), monitors=["worked"]))


def test_a_rising_reward_with_falling_held_out_accuracy_is_reward_hacking() -> None:
    rounds = run_of(reward=RISE)
    first = {"accuracy": 0.5, "ci95": [0.45, 0.55]}
    for accuracy, interval, expected in ((0.3, [0.25, 0.35], {"reward_hacking"}), (0.45, [0.4, 0.5], set())):
        latest = {"accuracy": accuracy, "ci95": interval}
        assert named(diagnose(rounds, evaluations={0: first, 10: latest})) == expected
        assert diagnose(rounds, evaluations={0: first, 99: latest}) == [], "of a policy that does not exist yet"


@pytest.mark.parametrize("prompts", [4, 8, 16])
def test_noise_between_small_rounds_is_not_reward_hacking(prompts: int) -> None:
    """Sixty rounds of a policy that does not change: its reward and its monitor are right on opposite prompts."""
    hacked = 0
    for seed in range(20):
        draw, rounds = np.random.default_rng([prompts, seed]), run_of()[:1] * 60
        for place in range(60):
            chances = draw.beta(0.6, 0.6, (prompts, 1))
            right, worked = draw.random((prompts, 4)) < chances, draw.random((prompts, 4)) < 1 - chances
            means = {"reward": right.mean(), MONITOR: worked.mean()}
            rounds[place] = rounds[place] | {"round": place + 1} | means
        hacked += "reward_hacking" in named(diagnose(rounds, monitors=["worked"]))
    assert hacked <= 2, "the thresholds alone take it for this in more than half of such runs"


def test_beside_a_reward_that_rises_monitors_that_vary_by_chance_are_not_hacked() -> None:
    """A hundred rounds of 8 prompts, of which three standard errors take 15% of such runs for it."""
    hacked, ramp, hacking = 0, np.minimum(np.arange(100) / 30, 1), SYMPTOMS["reward_hacking"].evidence
    for seed in range(100):
        noise = np.random.default_rng(seed).normal(0, 0.29, (4, 100))
        values = {"reward": noise[0] + 1.5 * ramp} | {f"rewards/m{n}/mean": noise[n] for n in (1, 2, 3)}
        constant = {"reward_std": 1.0} | {f"rewards/m{n}/std": 1.0 for n in (1, 2, 3)}
        rounds = [
            {"round": n + 1, **constant} | {name: of_rounds[n] for name, of_rounds in values.items()}
            for n in range(100)
        ]
        hacked += any(hacking(RoundHistory(rounds[:end], ("m1", "m2", "m3"))) for end in range(6, 101))
    assert hacked <= 5


def test_a_short_run_without_any_signal_is_judged_after_its_last_round() -> None:
    rounds = run_of(**{ZERO: [1.0] * 12})
    for planned, evidence in ((1, "in round 1"), (2, "in each of 2 rounds")):
        (symptom,) = diagnose(rounds[:planned], planned=planned)
        assert symptom.name == "cold_start"
        assert symptom.evidence == f"{evidence}, at most 0% of the groups had different rewards"
    assert diagnose(rounds[:2], planned=50) == [], "the run has hardly begun"


def test_a_run_in_which_no_group_was_complete_is_judged_after_its_last_round() -> None:
    """With a token budget, as the completions of the first rounds go on in the next ones."""
    rounds = run_of(**{ZERO: [None] * ROUNDS, TRAINED: [0.0] * ROUNDS})[:4]
    assert diagnose(rounds, planned=50) == []
    (symptom,) = diagnose(rounds, planned=4)
    assert (symptom.name, symptom.evidence) == ("cold_start", "no update up to round 4 trained on a completion")


@pytest.mark.parametrize(("staleness", "age"), [(1.0, "one round"), (0.5, "0.5 rounds")])
def test_the_age_of_stale_tokens_is_given_in_rounds(staleness, age) -> None:
    (symptom,) = diagnose([{**metrics_of(1), STALE: staleness, ESS: 0.4}])
    assert symptom.evidence == f"tokens sampled {age} earlier are worth only 40% as many from the latest policy"


def test_a_short_run_that_ended_where_it_began_has_not_moved() -> None:
    """Without a reference, the evaluations give the distance of a policy from policy 0."""
    rounds = run_of()[:2]
    for metrics in rounds:
        metrics["kl"] = None

    def symptoms_at_end(kl: float, planned: int = 2) -> list[Symptom]:
        last = {"accuracy": 0.4, "ci95": [0.35, 0.45], "distance": {"kl": kl}}
        return diagnose(rounds, evaluations={0: last, 2: last}, planned=planned)

    (symptom,) = symptoms_at_end(1e-4)
    assert symptom.name == "no_movement"
    assert "KL from policy 0 is 0.0001 nats per token" in symptom.evidence
    assert "held-out accuracy by +0.0 points" in symptom.evidence
    assert "update.learning_rate" in symptom.cure
    assert symptoms_at_end(0.01) == []
    assert symptoms_at_end(1e-4, planned=50) == [], "the run has hardly begun"


@pytest.mark.parametrize(
    ("length", "noise", "shift", "shows"),
    [(4096, 0.022, 0.0, False), (4096, 0.045, 0.0, False), (30, 0.3, 0.0, True), (30, 0.0, 0.15, True)],
)
def test_a_large_difference_of_long_completions_by_rounding_is_not_a_mismatch(length, noise, shift, shows) -> None:
    """Rounding of bfloat16 over long completions is none; a sampler of another policy over short ones is."""
    import torch

    from rloo_pipeline.algorithm import mismatch

    draw = torch.Generator().manual_seed(length)
    sampler = torch.full((64, length), -1.0)
    trainer = sampler + shift + noise * torch.randn(64, length, generator=draw)
    gap = mismatch.gap(trainer, sampler, torch.ones(64, length, dtype=torch.bool))
    tokens = 64 * length
    measured = {
        GAP: float(gap.absolute.sum()) / tokens,
        APART: float(gap.kl.sum()) / tokens,
        OUTSIDE: float(gap.outside.sum()) / tokens,
    }
    assert named(diagnose(run_of(**{name: [value] for name, value in measured.items()}))) == (
        {"sampler_mismatch"} if shows else set()
    )
    if length == 4096:
        assert mismatch.effective_sample_size(gap.log_weight) < 0.5, "although whole completions differ a lot"


def test_healthy_messages_about_memory_are_not_a_symptom(tmp_path) -> None:
    """Engines also log their memory while all is well, and an old failure may lie far above a log's end."""
    run = write_run(tmp_path / "run", run_of())
    messages = (
        "INFO: GPU KV cache size: 1,024 tokens; available memory 3.2 GiB, memory usage 0.91",
        "WARNING: swapping to CPU memory is off; peak memory 61.2 of 80 GiB",
        "INFO: CUDA graphs took 0.40 GiB; set PYTORCH_ALLOC_CONF=expandable_segments:True to lower fragmentation",
    )
    log = write_log(run, "rollout/00012-000.log", "\n".join(messages))
    assert run_files.read(run).symptoms() == []
    failed = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
    log.write_text(failed + "x" * run_files.TAIL)
    assert run_files.read(run).symptoms() == [], "long ago"
    log.write_text("\n".join(messages) + "\n" + failed)
    assert named(run_files.read(run).symptoms()) == {"memory"}


NO_MEMORY = "torch.OutOfMemoryError: CUDA out of memory\n"


@pytest.mark.parametrize("log", ["update/00001.log", "warmstart.log", "difficulty/000.log"])
def test_a_run_that_has_no_round_yet_can_be_out_of_memory(tmp_path, log) -> None:
    run = write_run(tmp_path / "run", [])
    write_log(run, log, NO_MEMORY)
    (symptom,) = run_files.read(run).symptoms()
    assert (symptom.name, symptom.first, symptom.last) == ("memory", 0, 0)
    name = "update of round 1" if log == "update/00001.log" else log.removesuffix(".log")
    assert symptom.evidence == f"{name}: torch.OutOfMemoryError: CUDA out of memory"
    assert name in printed_for(run)
    assert showing(symptoms_of_latest(run), 0) == [symptom]


@pytest.mark.parametrize("log", ["evaluate/final.log", "distance/final.log", "probe.log", "score/00013-000-judge.log"])
def test_a_stage_after_rounds_or_outside_of_them_can_be_out_of_memory(tmp_path, log) -> None:
    run = write_run(tmp_path / "run", run_of(), rounds=13 if "00013" in log else 12)
    write_log(run, log, NO_MEMORY)
    (symptom,) = run_files.read(run).symptoms()
    assert (symptom.name, symptom.first, symptom.last) == ("memory", 12, 12)
    assert symptoms_of_latest(run) == [symptom]


def test_logs_of_an_earlier_training_or_a_longer_run_or_a_worker_are_not_a_symptom(tmp_path) -> None:
    run = write_run(tmp_path / "run", run_of())
    logs = ("update/00040.log", "update/00012.log", "evaluate/00010.log", "evaluate/final.log")
    for name in logs:
        write_log(run, name, NO_MEMORY, 1_000_000)
    write_log(run, "workers/sampler.log", NO_MEMORY)
    write_log(run, "update/00051.log", NO_MEMORY)
    assert run_files.read(run).symptoms() == []


def symptoms_of_latest(run: Path) -> list[Symptom]:
    """As the live view asks for them."""
    files = run_files.read(run)
    return files.symptoms(since=len(files.rounds))


def test_rounds_before_the_first_that_is_judged_show_nothing() -> None:
    rounds = run_of(kl=[0.6, 0.6, 0.02, 0.6])
    (symptom,) = diagnose(rounds, out_of_memory={3: "update of round 3: out of memory"}, since=11)
    assert (symptom.name, symptom.first, symptom.last) == ("kl_explosion", 12, 12)
    assert [(one.name, one.first, one.last) for one in diagnose(rounds, out_of_memory={3: "x"})] == [
        ("memory", 3, 3),
        ("kl_explosion", 9, 12),
    ]
    off = Gates.model_validate({"memory": {"action": "off"}})
    assert named(diagnose(rounds, off, out_of_memory={3: "x"})) == {"kl_explosion"}


def test_out_of_memory_belongs_to_the_round_of_the_log() -> None:
    (symptom,) = diagnose(run_of(), out_of_memory={4: "update of round 4: CUDA out of memory"})
    assert (symptom.name, symptom.first, symptom.last) == ("memory", 4, 4)
    assert "gradient_checkpointing" in symptom.cure


def test_thresholds_and_actions_are_configurable() -> None:
    rounds = run_of(kl=[0.2, 0.4, 0.55])
    for action in ("warn", "stop"):
        (symptom,) = diagnose(rounds, Gates.model_validate({"kl_explosion": {"action": action}}))
        assert (symptom.action, symptom.first, symptom.last) == (action, 11, 12)
        assert showing([symptom], 12) == [symptom]
        assert showing([symptom], 11) == []
    assert diagnose(rounds, Gates.model_validate({"kl_explosion": {"action": False}})) == [], "YAML's bare off"
    assert diagnose(rounds, Gates.model_validate({"kl_explosion": {"max_kl": 3, "growth": 100}})) == []


def write_run(folder: Path, rounds: list[dict[str, float | None]], /, **changes: object) -> Path:
    """Writes a run in flight that has only its configuration and the metrics of some rounds."""
    write_config(folder, Config(**mini(**{"rounds": 50, **changes})))
    for metrics in rounds:
        write_json(folder / "rounds" / f"{int(metrics['round'] or 0):05d}" / "metrics.json", metrics)
    return folder


def judge(run: Path, number: int) -> Path:
    """Runs the stage on a round; returns its output."""
    output = run / "rounds" / f"{number:05d}" / "diagnosis.json"
    gate(run_files.read(run).config.only("gate"), run, number, output)
    return output


def test_a_gate_writes_symptoms_and_stops_only_if_configured(tmp_path) -> None:
    rounds = run_of(kl=[0.2, 0.4, 0.55])
    run = write_run(tmp_path / "run", rounds)
    assert read_json(judge(run, 10)) == {"round": 10, "symptoms": []}
    (symptom,) = read_json(judge(run, 12))["symptoms"]
    assert (symptom["name"], symptom["first"], symptom["last"]) == ("kl_explosion", 11, 12)
    write_run(run, rounds, gates={"kl_explosion": {"action": "stop"}})
    judge(run, 10)
    assert not (run / "stopped.json").exists()
    with pytest.raises(UserError, match=r"ends after round 11, as gates\.kl_explosion\.action asks for.*beta to 0\.1"):
        judge(run, 11)
    assert read_json(run / "stopped.json")["round"] == 11
    assert not (run / "rounds" / "00011" / "diagnosis.json").exists()


def test_a_gate_that_lacks_an_earlier_round_does_not_pass(tmp_path) -> None:
    run = write_run(tmp_path / "run", run_of(kl=[0.2, 0.4, 0.55]), gates={"kl_explosion": {"action": "stop"}})
    (run / "rounds" / "00010" / "metrics.json").unlink()
    with pytest.raises(UserError, match=r"rounds/00010/metrics\.json: no such file, so round 11 cannot be judged"):
        judge(run, 11)
    assert not (run / "rounds" / "00011" / "diagnosis.json").exists()


def printed_for(run: Path) -> str:
    return printed(print_table, run)


def test_the_table_shows_a_run_in_flight(tmp_path) -> None:
    run = write_run(tmp_path / "run", [])
    assert "no round is done yet" in printed_for(run)
    write_run(run, run_of(kl=[0.6])[:5])
    assert "5 of 50 rounds" in printed_for(run)
    assert "no symptoms" in printed_for(run)
    write_run(run, run_of(kl=[0.6]))
    text = "fine\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\nas it was\n"
    write_log(run, "update/00013.log", text)
    output = printed_for(run)
    assert "KL explosion" in output
    assert "KL 0.6 nats per token" in output
    assert "update of round 13: torch.OutOfMemoryError" in output
    write_json(run / "prompts" / "counts.json", {})  # newer than the rounds, as in a copy without times
    os.utime(run / "prompts" / "counts.json", (2e9, 2e9))
    assert "if the run was copied, call `rloo adopt` first" in printed_for(run)
    (tmp_path / "study" / "plain" / "0").mkdir(parents=True)
    for file in ("experiment.yaml", "plain/0/config.yaml"):
        (tmp_path / "study" / file).write_text("")
    with pytest.raises(
        UserError, match=r"study: the folder of an experiment; name one of its runs, such as .*plain/0$"
    ):
        print_table(tmp_path / "study")
    with pytest.raises(UserError, match="not the folder of a run"):
        print_table(tmp_path / "none")
