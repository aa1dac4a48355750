"""A whole run whose rollouts are sampled with FP8 weights, by an engine that stays alive."""

import pytest
from helpers import Project

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.training import sampler_proof

pytestmark = [pytest.mark.slow, pytest.mark.long]

FP8 = {
    "model": {"dtype": "bfloat16", "build_options": {"hidden_size": 64, "intermediate_size": 128}},
    "rollout": {"quantization": "fp8_per_channel", "shards": 1},
    "algorithm": {"old_logps": "trainer"},
    "checks": {"accept": ["entropy"]},
    "evaluation": {"greedy": False, "num_prompts": 8},
}


def test_rollouts_in_fp8_are_weighted_and_evaluations_have_the_policys_weights(tmp_path) -> None:
    project = Project(tmp_path / "project")
    outcome = project.snakemake("--cores", "1", plain=False, **FP8)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    run = project.folder / "results" / "mini"
    checks = read_json(run / "warmstart" / "checks.json")
    assert checks[sampler_proof.FORMAT] == "fp8"
    ratios = [read_json(run / "rounds" / f"0000{n}" / "metrics.json") for n in (1, 2)]
    gaps = [metrics["sampling/sampling_logp_difference/mean"] for metrics in ratios]
    assert all(0.5 < gap / checks[sampler_proof.KEY] < 2 for gap in gaps), "also after a swap of weights"
    assert all(metrics["sampling/importance_sampling_ratio/max"] <= 2 for metrics in ratios)
    facts = [
        tables.footer(tables.read(file, kind))
        for kind, file in (
            ("rollouts", run / "rounds" / "00002" / "rollouts" / "000.parquet"),
            ("completions", run / "evaluation" / "final" / "completions.parquet"),
        )
    ]
    assert [about.get("quantization") for about in facts] == ["fp8_per_channel", None]
    distance = read_json(run / "evaluation" / "final" / "distance.json")
    assert distance["policy"]
    workers = "".join(log.read_text() for log in (run / "logs" / "workers").glob("sampler-*.log"))
    assert "gets a new engine" not in workers
