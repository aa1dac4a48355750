"""The stage `score` scores a shard's held-out completions in the processes that score the shard; `held-out` sums up."""

import pyarrow as pa
import pytest
import yaml
from helpers import Round, mini, rloo, write_prompts

from rloo_pipeline.artifacts import lineage, tables
from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.round_tables import RoundFiles
from rloo_pipeline.config.loading import load
from rloo_pipeline.stages.held_out import held_out
from rloo_pipeline.stages.score import score
from rloo_pipeline.trackers.names import eval_metrics

MINE = """
from pathlib import Path

with Path(__file__).with_suffix(".starts").open("a") as file:
    file.write("x")

def answered(completions, answer):
    return [float(one) for one in answer]

def of_table(completions, answer):
    return [float(sum(map(float, answer)))] * len(completions)

async def later(completions, answer):
    return [None if one == "3" else -float(one) for one in answer]
"""
REWARDS = (("answered", {}), ("of_table", {"batch": "all"}), ("later", {}))


def test_held_out_completions_are_scored_by_themselves_and_start_no_process(tmp_path, tiny_model) -> None:
    run = Round(tmp_path / "run", tiny_model).write(1)
    table = run._table(1, "rollouts", 0)
    prompts = [{"prompt_id": f"0-{n}", "prompt": "x", "prompt_ids": [4], "answer": str(n)} for n in range(8)]
    write_prompts(run.run / "prompts", prompts)
    held_out = [{**row, "prompt_id": f"held-out-{n}", "answer": f"{n}00"} for n, row in enumerate(prompts[:3])]
    write_prompts(run.run / "prompts", held_out, "eval")
    rollouts = tables.read(table, "rollouts")
    first = rollouts.filter([sample == 0 for sample in rollouts["sample"].to_pylist()]).slice(0, 3)
    first = first.set_column(0, first.schema.field(0), pa.array([row["prompt_id"] for row in held_out]))
    (tmp_path / "mine.py").write_text(MINE)
    rewards = [{"function": f"{tmp_path}/mine.py:{name}", **keys} for name, keys in REWARDS]
    config = mini(rewards=rewards, correct={"reward": "answered"})
    config["scoring"] = {"workers": 1}
    (run.run / "config.yaml").write_text(yaml.safe_dump(config))
    about = {name: tables.footer(rollouts)[name] for name in ("run", "round", "shard", "seed", "policy")}
    tables.write(tmp_path / "held_out.parquet", first, tables.ROLLOUTS, "held_out", **about)
    sampled, scored = tmp_path / "held_out.parquet", tmp_path / "held_out_scores.parquet"
    inputs = (load(run.run / "config.yaml").only("score"), run.run / "prompts", Policy(tiny_model), table)
    score(*inputs, tmp_path / "beside.parquet", held_out=(sampled, scored))
    assert (tmp_path / "mine.starts").read_text() == "x" * len(REWARDS)
    scores = tables.read(scored, "held_out_scores")
    assert scores["prompt_id"].to_pylist() == first["prompt_id"].to_pylist()
    assert scores["scores/answered"].to_pylist() == [0.0, 100.0, 200.0]
    assert scores["scores/of_table"].to_pylist() == [300.0] * 3, (
        "a call with the whole table has no rows of another table"
    )
    assert scores["scores/later"].to_pylist() == [0.0, -100.0, -200.0]
    assert tables.footer(scores)["rollouts"] == tables.footer(tables.read(sampled, "held_out"))[tables.DIGEST]
    tables.write(sampled, first.slice(0, 0), tables.ROLLOUTS, "held_out", **about)
    score(*inputs, tmp_path / "alone.parquet", held_out=(sampled, scored))
    assert not len(tables.read(scored, "held_out_scores")), "evaluation.each_round is 0"
    beside, alone = (
        tables.read(tmp_path / f"{name}.parquet", "scores").drop_columns("seconds").to_pylist()
        for name in ("beside", "alone")
    )
    assert beside == alone


@pytest.fixture
def summary_of(tmp_path, tiny_model):
    """What `held-out` writes of completions that are all right, with a judge of this weight that needs a GPU."""

    def summary(weight: float = 0.0, temperature: float = 1.0):
        run = Round(tmp_path / "run", tiny_model, correct={"reward": "answer"}).write(1)
        config = load(run.run / "config.yaml")
        answer = next(reward for reward in config.rewards if reward.column == "answer")
        judge = answer.model_copy(update={"name": "judge", "weight": weight, "gpus": 1})
        config = config.model_copy(update={"rewards": [answer, judge]}).only("held-out")
        about = {"run": "mini", "round": 1, "shard": 0, "seed": 1, "policy": "p", "sampling_temperature": temperature}
        rollouts = tables.read(run._table(1, "rollouts", 0), "rollouts")
        files = RoundFiles([tmp_path / "held_out.parquet"], [tmp_path / "held_out_scores.parquet"])
        first = rollouts.take([*range(0, len(rollouts), 4)])
        tables.write(files.rollouts[0], first, tables.ROLLOUTS, "held_out", **about)
        held_out_rows = tables.read(files.rollouts[0], "held_out")
        keys = [{name: row[name] for name in ("prompt_id", "sample")} for row in held_out_rows.to_pylist()]
        scores = [{**key, "scores/answer": 1.0, "reward": 1.0, "seconds": 0.0, "error": None} for key in keys]
        about = tables.facts_about(held_out_rows)
        tables.write(files.scores[0], scores, tables.scores_schema(["answer"]), "held_out_scores", **about)
        held_out(config, files.rollouts, files.scores, 1, tmp_path / "held_out.json", tmp_path / "events")
        return read_json(tmp_path / "held_out.json")

    return summary


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_the_sum_of_a_round_is_left_out_where_a_part_of_it_needs_a_gpu(weight, summary_of) -> None:
    summary = summary_of(weight)
    assert summary["rewards"]["answer"]["value"] == 1.0
    assert (summary["rewards"]["reward"] is None) == (weight > 0)
    assert ("reward" in {name for name, value in eval_metrics(summary).items() if value is not None}) == (weight == 0)


def test_a_round_that_was_sampled_at_another_temperature_is_not_measured(summary_of) -> None:
    """evaluation.temperature was changed since; the curve has accuracies at one temperature."""
    assert summary_of()["accuracy"] == summary_of()["temperature"] == 1.0
    assert summary_of(temperature=0.0) == {"policy": 0, "prompts": 0, "accuracy": None}


def test_held_out_completions_sampled_with_other_settings_are_refused_by_the_name_of_the_key(
    tmp_path, tiny_model
) -> None:
    run = Round(tmp_path / "run", tiny_model).write(1)
    (run.run / "config.yaml").write_text(yaml.safe_dump(mini()))
    table = run._table(1, "rollouts", 0)
    sampled, scores = (run.run / "rounds" / "00001" / name / "held_out.parquet" for name in ("held_out", "scores"))
    hotter = load(run.run / "config.yaml", ["rollout={temperature: 0.5}"])
    for file in (sampled, scores):  # the scores of an earlier start do not count
        with tables.common_facts(**lineage.decided(hotter, "rollout")):
            tables.write(file, tables.read(table, "rollouts"), tables.ROLLOUTS, "held_out")
    arguments = ["score", "--prompts", run.run / "prompts", "--policy", tiny_model, "--rollouts", table]
    arguments += ["--held-out", sampled, scores, "--output", run.run / "rounds" / "00001" / "scores" / "000.parquet"]
    outcome = rloo(*arguments)
    assert f"{sampled}: made with rollout.temperature 0.5, but this run has 1.0" in outcome.stderr
