"""An update refuses rollouts whose log-probs are those of another policy, before it moves a weight."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from helpers import Round, rloo, succeeded

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.training import forward_only
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.packing import Sequences

pytestmark = pytest.mark.slow

FIRST_STEP = {"algorithm": {"beta": 0, "steps_per_generation": 1}}
WAYS = {
    "the first step": FIRST_STEP,
    "the pass for the old policy": {},
    "a pass without dropout": {"update": {"lora": {"lora_dropout": 0.5}}, **FIRST_STEP},
    "a truncated distribution": {"rollout": {"top_p": 0.9}, **FIRST_STEP},
    "masked tokens": {
        "rollout": {"generation_kwargs": {"min_tokens": 2}},
        "algorithm": {"beta": 0, "steps_per_generation": 1, "mismatch": {"correction": "sequence_tis"}},
    },
    "the older policy of a lag": {"rollout": {"lag": 1}, **FIRST_STEP},
}
"""What the sampler's log-probs are compared with."""


def sampled(folder: Path, model: Path, shift: float, raised: float = 0.0, **changes) -> tuple[Round, list[object]]:
    """A round with the log-probs that a model gives, each `raised` and then `shift` nats off; and the arguments of its
    update.
    """
    lag = changes.get("rollout", {}).get("lag", 0)
    number, about = 1 + lag, {"policy": Policy(model).digest, "policy_round": 0}
    run = Round(folder, model, **changes)
    if lag:
        succeeded(run.write(1).update())
    run.write(number, **about)
    scorer = TokenLogProbs(forward_only.load(Policy(model), "float32"), 1.0)
    for shard in range(run.shards):
        rollouts, scores, reference = (
            tables.read(run._table(number, kind, shard), kind) for kind in ("rollouts", "scores", "reference")
        )
        sequences = Sequences(rollouts["prompt_ids"].to_pylist(), rollouts["completion_ids"].to_pylist())
        logps = [
            [logp + raised + shift * (-1) ** place for place, logp in enumerate(row)]
            for row in forward_only.score(scorer, sequences, 10_000, "tokens").logps
        ]
        index = rollouts.schema.get_field_index("sampling_logps")
        rollouts = rollouts.set_column(index, rollouts.schema.field(index), pa.array(logps, pa.list_(pa.float32())))
        run._save(number, shard, rollouts, scores, reference)
    checks = folder / "checks.json"
    checks.write_text(json.dumps({"sampler_difference": 1e-7}))
    older = ["--sampler", model] if lag else []
    return run, [*run.update_arguments(number), "--checks", checks, *older]


@pytest.mark.parametrize("way", WAYS)
def test_rollouts_of_another_policy_are_refused_however_they_are_compared(tmp_path, tiny_model, way) -> None:
    run, arguments = sampled(tmp_path / "run", tiny_model, 0.05, **WAYS[way])
    outcome = rloo(*arguments)
    assert outcome.returncode == 1
    [line] = [line for line in outcome.stderr.splitlines() if line.startswith("rloo update: error")]
    nats = "0.02" if way in ("a truncated distribution", "masked tokens") else "0.05 nats"
    for part in (
        "the rollouts of round",
        f"not sampled from {tiny_model}",
        nats,
        "at most 0.0001",
        "likely cause",
        "rollouts",
    ):
        assert part in line
    assert not run.policy(2 if "lag" in way else 1).exists()


@pytest.mark.parametrize("way", ["a pass without dropout", "a truncated distribution", "the older policy of a lag"])
def test_rollouts_of_the_policy_are_trained_on_and_nothing_is_compiled(tmp_path, tiny_model, monkeypatch, way) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "compiled"))
    run, arguments = sampled(tmp_path / "run", tiny_model, 0.0, **WAYS[way])
    succeeded(rloo(*arguments))
    assert run.policy(2 if "lag" in way else 1).exists()
    assert not (tmp_path / "compiled").exists()


def test_log_probs_of_a_masked_distribution_are_above_the_trainers_and_weigh_the_losses(tmp_path, tiny_model) -> None:
    run, arguments = sampled(tmp_path / "run", tiny_model, 0.0, raised=0.1, **WAYS["masked tokens"])
    succeeded(rloo(*arguments))
    metrics = json.loads((run.run / "rounds" / "00001" / "metrics.json").read_text())
    assert metrics["sampling/outside_band"] is None
    assert metrics["sampling/sampling_logp_difference/mean"] is None
    assert 0 < metrics["sampling/importance_sampling_ratio/max"] < 1
