"""Whole runs with several features at once: their tables agree with plain transformers and with the formulas."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import Project, printed

from rloo_pipeline.commands.plan import plan
from rloo_pipeline.config import Config
from rloo_pipeline.config.run_set import read_runs

pytestmark = [pytest.mark.slow, pytest.mark.long]

GAPPY = """
def gappy(completions, **_):
    lengths = [len(messages[0]["content"]) for messages in completions]
    return [None if length % 3 == 0 else length % 7 / 7 for length in lengths]
"""
REWARDS = [
    {"function": "gappy.py:gappy"},
    {"function": "rloo_pipeline.rewards.format:think_format_reward", "name": "format", "weight": 0},
]
FEW = {"num_generations": 1, "greedy": False, "num_prompts": 8}
ADAPTER = {"learning_rate": 0.02, "lora": {"r": 4}}
COMBINATIONS: dict[str, dict[str, Any]] = {
    "adapter, lag, KL in the reward, drawn prompts": {
        "rounds": 3,  # the first one that samples from a trained policy
        "update": ADAPTER,
        "rollout": {"lag": 1, "temperature": 1.2},
        "dataset": {"select": {"weights": "online"}},
        "algorithm": {"num_iterations": 2},
    },
    "adapter, token budget, KL in the loss": {
        "update": ADAPTER,
        "rollout": {"token_budget": 20, "shards": 3},
        "algorithm": {"kl": {"placement": "loss", "estimator": "k3"}},
    },
    "oversampling, refill, masked completions": {
        "rollout": {"oversample": 1.25, "refill": 1},
        "algorithm": {"filter_zero_variance": True, "mask_truncated_completions": True},
    },
}


@pytest.mark.parametrize("changes", COMBINATIONS.values(), ids=COMBINATIONS)
def test_tables_agree_with_plain_transformers_and_the_formulas(tmp_path, changes) -> None:
    project = Project(tmp_path / "project")
    (project.folder / "gappy.py").write_text(GAPPY)
    changes = {"rounds": 2, "rewards": REWARDS, "correct": {"reward": "format"}, "evaluation": FEW, **changes}
    outcome = project.snakemake("--cores", "1", **changes)
    printed_by_run = outcome.stdout + outcome.stderr
    assert outcome.returncode == 0, printed_by_run
    runs = read_runs(project.folder / "config" / "test.yaml")
    jobs = int(printed(plan, runs, None).partition("jobs: ")[2].split()[0])
    assert f"{jobs + 1} of {jobs + 1} steps" in printed_by_run, "the last one only names the files"
    run = project.folder / "results" / "mini"
    assert (run / "policies" / "00001" / "adapter_model.safetensors").exists() == ("update" in changes)
    for number in range(1, changes["rounds"] + 1):
        check_round(run, number, runs.first)
    before = project.files("**/*")
    again = project.snakemake("--cores", "1", **changes)
    assert "Nothing to be done" in again.stdout + again.stderr
    assert project.files("**/*") == before


def check_round(run: Path, number: int, config: Config) -> None:
    """Compares log-probs, rewards, KL and advantages of a round with what this file computes from its completions."""
    folder, algorithm = run / "rounds" / f"{number:05d}", config.algorithm
    rows = [row for row in table(folder, "rollouts") if not row.get("carried")]
    for row, scores in zip(rows, table(folder, "scores"), strict=True):
        assert (row["prompt_id"], row["sample"]) == (scores["prompt_id"], scores["sample"])
        length = len(row["completion"])
        row["reward"] = None if length % 3 == 0 else length % 7 / 7
        assert scores["reward"] == row["reward"]
        sampled_by = row.get("segments") or [
            {"end": len(row["completion_ids"]), "policy_round": max(0, number - 1 - config.rollout.lag)}
        ]
        start = 0
        for segment in sampled_by:
            part = slice(start, start := segment["end"])
            expected = logps(run, segment["policy_round"], row, config)[part]
            assert row["sampling_logps"][part] == pytest.approx(expected, abs=1e-3)
    in_reward = algorithm.kl.placement == "reward"
    trained = {key(row): row for row in pq.read_table(folder / "train.parquet", partitioning=None).to_pylist()}
    groups = [rows[first : first + 4] for first in range(0, len(rows), 4)]
    used = [group for group in groups if key(group[0]) in trained]
    assert len(trained) == 4 * len(used)
    assert used or number > 1, "round 1 trains"
    for group in used:
        left_out = [trained[key(row)]["masked"] for row in group]
        returns = []
        for row, masked in zip(group, left_out, strict=True):
            kl = 0.0
            if in_reward and not masked:
                pairs = zip(logps(run, number - 1, row, config), logps(run, 0, row, config), strict=True)
                kl = math.fsum(new - old for new, old in pairs)
                assert trained[key(row)]["kl"] == pytest.approx(kl, abs=2e-3)
            returns.append(None if masked or row["reward"] is None else row["reward"] - algorithm.beta * kl)
        advantages = [trained[key(row)]["advantage"] for row in group]
        assert advantages == pytest.approx(leave_one_out(returns), abs=1e-3)
    metrics = json.loads((folder / "metrics.json").read_text())
    lengths = [len(row["completion_ids"]) for row in rows]
    assert metrics["num_completion_tokens"] == sum(lengths)
    assert metrics["unscorable"] == sum(row["reward"] is None for row in rows)


def table(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The rows of all shards and of the refill."""
    files = [*sorted(folder.glob(f"{kind}/*.parquet")), *folder.glob(f"refill/{kind}.parquet")]
    return pa.concat_tables([pq.read_table(file, partitioning=None) for file in files]).to_pylist()


def key(row: dict[str, Any]) -> tuple[str, int]:
    return row["prompt_id"], row["sample"]


def leave_one_out(rewards: list[float | None]) -> list[float]:
    """RLOO's advantages; 0 without a reward, or without a sibling that has one."""
    known = [reward for reward in rewards if reward is not None]
    if len(known) < 2:
        return [0.0] * len(rewards)
    means = [0.0 if reward is None else (sum(known) - reward) / (len(known) - 1) for reward in rewards]
    return [0.0 if reward is None else reward - mean for reward, mean in zip(rewards, means, strict=True)]


def logps(run: Path, policy: int, row: dict[str, Any], config: Config) -> list[float]:
    """Log-probs of a completion under a policy, by plain transformers and PEFT."""
    import torch

    ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
    with torch.no_grad():
        logits = model_of(run, policy)(ids).logits[0, len(row["prompt_ids"]) - 1 : -1] / config.rollout.temperature
    return logits.log_softmax(-1).gather(-1, ids[0, len(row["prompt_ids"]) :, None])[:, 0].tolist()


MODELS: dict[Path, Any] = {}


def model_of(run: Path, policy: int) -> Any:
    """A policy with its adapter, if it has one, merged."""
    import peft
    from transformers import AutoModelForCausalLM

    folder = run / "policies" / f"{policy:05d}"
    if folder not in MODELS:
        is_adapter = (folder / "adapter_config.json").exists()
        model = AutoModelForCausalLM.from_pretrained(run / "policies" / "00000" if is_adapter else folder)
        MODELS[folder] = peft.PeftModel.from_pretrained(model, folder).merge_and_unload() if is_adapter else model
    return MODELS[folder]
