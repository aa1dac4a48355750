"""Held-out accuracy of each round, on a finished run: what it is of, and that it changes no completion of a round."""

import json

import pytest
from helpers import rloo
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.files import read_artifact
from rloo_pipeline.report.origin import versions

pytestmark = [pytest.mark.slow, pytest.mark.long]

SAMPLED = ["prompt_id", "completion_ids", "completion", "seed"]


def test_the_first_rounds_completions_are_those_of_the_warm_starts_evaluation(finished) -> None:
    run = finished.folder / "results" / "mini"
    shards = [run / "rounds" / "00001" / "held_out" / f"00{shard}.parquet" for shard in range(2)]
    held_out = tables.read_all(shards, "held_out")
    evaluated = tables.read(run / "evaluation" / "warmstart" / "completions.parquet", "completions")
    first = evaluated.take([*range(0, 2 * len(held_out), 2)])  # of two samples a prompt, the first
    assert held_out.select(SAMPLED).to_pylist() == first.select(SAMPLED).to_pylist()
    summary = json.loads((run / "rounds" / "00001" / "held_out.json").read_text())
    assert (summary["policy"], summary["prompts"], summary["num_generations"]) == (0, 3, 1), "a twentieth of 64"
    assert summary["rewards"]["format"]["value"] == sum(first["scores/format"].to_pylist()) / 3
    second = json.loads((run / "rounds" / "00002" / "held_out.json").read_text())
    assert second["policy"] == 1


def test_tensorboard_has_held_out_accuracy_at_the_step_of_its_policy(finished) -> None:
    run = finished.folder / "results" / "mini"
    events = EventAccumulator(str(run / "tensorboard" / "eval")).Reload()
    made = read_artifact(run / "rounds" / "00001" / "metrics.json")["step"]
    assert made > 1, "or the number of the round would do"
    assert [event.step for event in events.Scalars("eval/accuracy")] == [0, made]


def test_a_rounds_completions_are_the_same_without_held_out_prompts_beside_them(finished, tmp_path) -> None:
    run = finished.folder / "results" / "mini"
    output = tmp_path / "000.parquet"
    config = ("--configfile", run / "config.yaml")
    inputs = ("--prompts", run / "prompts", "--policy", run / "policies" / "00000")
    outcome = rloo("rollout", *config, *inputs, "--round", 1, "--shard", 0, "--output", output)
    assert outcome.returncode == 0, outcome.stderr
    assert output.read_bytes() == (run / "rounds" / "00001" / "rollouts" / "000.parquet").read_bytes()


def test_a_page_was_written_after_the_first_round(finished) -> None:
    run = finished.folder / "results" / "mini"
    assert read_artifact(run / "pages" / "00001.json") == {"round": 1, "versions": versions()}
    assert not (run / "pages" / "00002.json").exists(), "the last page is the report's"
    assert "warn" not in (run / "logs" / "report_so_far" / "00001.log").read_text()
