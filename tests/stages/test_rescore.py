"""`rloo rescore` and `rloo reward-test`: other rewards on a finished run, and a new reward on rows of data."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from helpers import MINI, Round, done, mini, rloo, write_prompts

from rloo_pipeline.artifacts import tables
from rloo_pipeline.commands.rescore import change, rescore
from rloo_pipeline.config import Reward
from rloo_pipeline.config.loading import load, load_rewards
from rloo_pipeline.errors import UserError

NAN = float("nan")
MINE = """
def length(completion_ids, factor=1.0):
    return [factor * len(ids) for ids in completion_ids]

def constant(completions):
    return [1.0] * len(completions)

def odd(completions, answer):
    if "odd" in answer:
        raise ValueError("an odd one")
    return [None if a == "none" else float(len(c[-1]["content"])) for c, a in zip(completions, answer)]
"""


@pytest.fixture
def reward_file(tmp_path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


@pytest.fixture
def run(tmp_path) -> Round:
    """A run of two rounds with synthetic rewards."""
    rounds = Round(tmp_path / "run", tmp_path / "no-model").write(1).write(2)
    rows = [
        {"prompt_id": f"{shard}-{group}", "prompt": "x", "prompt_ids": [4], "answer": "1"}
        for shard in range(2)
        for group in range(8)
    ]
    write_prompts(rounds.run / "prompts", rows)
    return rounds


def rescored(run: Round, output: Path, **reward) -> dict:
    """The part of rescore.json about all rounds."""
    config = load(run.run / "config.yaml")
    rescore(config, run.run, [Reward.model_validate(reward)], output)
    return json.loads((output / "rescore.json").read_text())["overall"]


def test_a_round_that_was_trained_on_is_not_rescored_without_one_of_its_shards(run, reward_file, tmp_path) -> None:
    folder = run.run / "rounds" / "00001"
    lost = folder / "rollouts" / "001.parquet"
    lost.unlink()
    rescored(run, tmp_path / "in-flight", function=f"{reward_file}:constant")
    (folder / "metrics.json").touch()
    with pytest.raises(UserError, match=f"{lost}: no such table"):
        rescored(run, tmp_path / "trained", function=f"{reward_file}:constant")


def test_rollouts_of_a_killed_run_that_have_no_scores_yet_are_left_out(run, reward_file, tmp_path) -> None:
    function = f"{reward_file}:constant"
    first, last = (run.run / "rounds" / name for name in ("00001", "00002"))
    shutil.rmtree(last / "scores")
    assert rescored(run, tmp_path / "out", function=function)["completions"] == 64
    (first / "scores" / "001.parquet").unlink()
    assert rescored(run, tmp_path / "half", function=function)["completions"] == 32
    shutil.rmtree(first / "scores")
    with pytest.raises(UserError, match=r"000.parquet: has no scores yet, nor has .*; continue the run$"):
        rescored(run, tmp_path / "none", function=function)
    (first / "metrics.json").touch()
    with pytest.raises(UserError, match=f"{first / 'scores' / '000.parquet'}: no such table"):
        rescored(run, tmp_path / "trained", function=function)
    shutil.rmtree(run.run / "rounds")
    with pytest.raises(UserError, match=r"has no rollouts in rounds/.*; pass the folder of a run"):
        rescored(run, tmp_path / "empty", function=function)


def test_a_finished_run_is_scored_with_other_rewards(run, reward_file, tmp_path) -> None:
    before = {file: file.read_bytes() for file in run.run.rglob("*") if file.is_file()}
    rewards = [{"function": f"{reward_file}:length"}, {"function": f"{reward_file}:constant", "weight": 0}]
    (tmp_path / "new.yaml").write_text(yaml.safe_dump({"rewards": rewards}))
    outcome = done("rescore", run.run, "--rewards", tmp_path / "new.yaml", "--out", tmp_path / "out")
    refused = rloo("rescore", run.run, "--rewards", tmp_path / "new.yaml", "--out", tmp_path / "out", "--workers=-1")
    assert "scoring.workers: Input should be greater than or equal to 1, got -1" in refused.stderr
    assert {file: file.read_bytes() for file in run.run.rglob("*") if file.is_file()} == before
    for number in (1, 2):
        for shard in range(2):
            place = f"rounds/{number:05d}/{{}}/{shard:03d}.parquet"
            table = pq.read_table(tmp_path / "out" / place.format("scores"))
            rollouts = pq.read_table(run.run / place.format("rollouts"))
            assert table["prompt_id"] == rollouts["prompt_id"]
            assert table["reward"].to_pylist() == [float(len(ids)) for ids in rollouts["completion_ids"].to_pylist()]
            assert set(table["scores/constant"].to_pylist()) == {1.0}
    summary = json.loads((tmp_path / "out" / "rescore.json").read_text())
    assert list(summary["rounds"]) == ["00001", "00002"]
    assert summary["overall"]["completions"] == 128
    assert abs(summary["overall"]["kendall"]) < 0.5
    assert summary["overall"]["unscorable"][1] == 0 < summary["overall"]["unscorable"][0]
    assert "Kendall" in outcome.stdout


def test_a_round_in_which_no_group_has_ended_is_left_out(run, reward_file, tmp_path) -> None:
    for shard in range(2):
        about = tables.footer(tables.read(run._table(1, "rollouts", shard), "rollouts"))
        none = pa.Table.from_pylist([], schema=tables.ROLLOUTS).replace_schema_metadata(about)
        run._save(1, shard, none, [], [])
    assert rescored(run, tmp_path / "out", function=f"{reward_file}:length")["completions"] == 64
    assert list(json.loads((tmp_path / "out" / "rescore.json").read_text())["rounds"]) == ["00002"]


def test_rounds_that_a_longer_run_has_left_are_not_rescored(run, reward_file, tmp_path) -> None:
    run.write(3)
    assert load(run.run / "config.yaml").rounds == 2
    assert rescored(run, tmp_path / "out", function=f"{reward_file}:length")["groups"] == 32
    assert sorted(json.loads((tmp_path / "out" / "rescore.json").read_text())["rounds"]) == ["00001", "00002"]


def test_the_same_rewards_change_nothing_and_a_constant_teaches_nothing(run, reward_file, tmp_path) -> None:
    rescored(run, tmp_path / "out", function=f"{reward_file}:length")
    for number in (1, 2):
        for shard in range(2):
            name = f"rounds/{number:05d}/scores/{shard:03d}.parquet"
            (run.run / name).write_bytes((tmp_path / "out" / name).read_bytes())
    same = rescored(run, tmp_path / "same", function=f"{reward_file}:length", options={"factor": 2.0})
    assert same["kendall"] == pytest.approx(1)
    assert same["advantage_correlation"] == pytest.approx(1)
    assert same["sign_changes"] == 0
    flat = rescored(run, tmp_path / "flat", function=f"{reward_file}:constant")
    assert flat["informative"][1] == 0
    assert flat["kendall"] is None


@pytest.mark.parametrize(
    "algorithm",
    [
        {"preset": "gdpo"},  # reads the weights of both tables
        {"teacher": {"name_or_path": "a-teacher"}, "importance_sampling_level": "token"},  # whose KL does not count
    ],
)
def test_any_algorithm_can_be_rescored(run, reward_file, tmp_path, algorithm) -> None:
    rescored(run, tmp_path / "out", function=f"{reward_file}:length")
    for file in (tmp_path / "out").glob("rounds/*/scores/*.parquet"):
        (run.run / file.relative_to(tmp_path / "out")).write_bytes(file.read_bytes())
    (run.run / "config.yaml").write_text(yaml.safe_dump(mini(algorithm=algorithm)))
    same = rescored(run, tmp_path / "same", function=f"{reward_file}:length", options={"factor": 2.0})
    assert same["advantage_correlation"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"rewards": []}, ["new.yaml", "rewards"]),
        ({"rewrds": []}, ["new.yaml", "rewrds", "did you mean 'rewards'"]),
        ({"rewards": [{"function": "no_such:f", "wight": 1}]}, ["wight", "did you mean 'weight'"]),
        ({"rewards": [{"function": "a:f"}, {"function": "b:f"}]}, ["two functions share a name"]),
    ],
)
def test_a_file_of_rewards_that_cannot_be_used_gives_a_one_line_error(tmp_path, changes, fragments) -> None:
    file = tmp_path / "new.yaml"
    file.write_text(yaml.safe_dump(changes))
    with pytest.raises(UserError) as error:
        load_rewards(file, load(MINI))
    for fragment in fragments:
        assert fragment in str(error.value)


def test_changes_by_hand() -> None:
    old, new = [[1.0, 2.0, 3.0], [1.0, 1.0, NAN]], [[3.0, 2.0, 1.0], [0.0, 1.0, 1.0]]
    old_advantages, new_advantages = [[-1, 0, 1], [0, 0, 0]], [[1, 0, -1], [-1, 0.5, 0.5]]
    changes = change(old, new, old_advantages, new_advantages)
    assert (changes.groups, changes.ranked_groups) == (2, 1)
    assert changes.kendall == pytest.approx(-1)
    assert changes.informative == (0.5, 1.0)
    assert changes.unscorable == (1, 0)
    assert changes.sign_changes == pytest.approx(2 / 6)
    twice = change(2 * old, 2 * new, 2 * old_advantages, 2 * new_advantages)
    assert (twice.groups, twice.ranked_groups, twice.completions, twice.unscorable) == (4, 2, 12, (2, 0))
    assert twice.reward == pytest.approx(changes.reward)
    assert twice.sign_changes == pytest.approx(changes.sign_changes)


def test_rewards_that_differ_by_the_rounding_of_their_sum_rank_no_group() -> None:
    advantages = [[0.0, 0.0, 0.0]]
    changes = change([[0.1 + 0.2, 0.3, NAN]], [[1.0, 0.0, 1.0]], advantages, advantages)
    assert (changes.ranked_groups, changes.kendall, changes.informative) == (0, None, (0.0, 1.0))


def test_all_rounds_weigh_each_scored_completion_equally(run, reward_file, tmp_path) -> None:
    overall = rescored(run, tmp_path / "out", function=f"{reward_file}:length")
    scored = []
    for shard in run.run.glob("rounds/*/scores/*.parquet"):
        scored += [reward for reward in pq.read_table(shard)["reward"].to_pylist() if reward is not None]
    rounds = json.loads((tmp_path / "out" / "rescore.json").read_text())["rounds"]
    assert len({changed["unscorable"][0] for changed in rounds.values()}) == 2, "so the rounds weigh differently"
    assert overall["reward"][0] == pytest.approx(sum(scored) / len(scored))


def test_a_reward_is_tried_on_rows_of_data(reward_file, tmp_path) -> None:
    data, completions = tmp_path / "data.jsonl", tmp_path / "completions.jsonl"
    data.write_text("".join(json.dumps({"question": "q", "answer": a}) + "\n" for a in ("a", "none", "bbb")))
    outcome = done("reward-test", f"{reward_file}:odd", "--data", data)
    for word in ("33.3% (1 row)", "slowest rows", "values", "rows/s"):
        assert word in outcome.stdout
    completions.write_text("".join(json.dumps({"completion": c}) + "\n" for c in ("x", "xx", "x", "x", "xx", "xxx")))
    outcome = done("reward-test", f"{reward_file}:odd", "--data", data, "--completions", completions, "--workers", 2)
    assert "66.7% of 3, with 2 each" in outcome.stdout


def test_token_ids_of_a_trial_are_made_by_the_tokenizer_that_is_named(tmp_path, tiny_model) -> None:
    data = tmp_path / "data.jsonl"
    texts = ("1+1+1+1+1+1=6", "6")
    data.write_text("".join(json.dumps({"question": "q", "answer": text}) + "\n" for text in texts))
    arguments = (
        "reward-test",
        "rloo_pipeline.rewards.length:target_length_reward",
        "--data",
        data,
        "--options",
        '{"target": 1}',
    )
    outcome = rloo(*arguments)
    assert outcome.returncode == 1
    assert "takes token ids and there are none; give a --tokenizer" in outcome.stderr
    outcome = done(*arguments, "--tokenizer", tiny_model)
    assert "minimum, maximum" in outcome.stdout
    assert ", 0" in outcome.stdout, "one text is one token"


def test_rows_that_fail_in_a_trial_are_shown(reward_file, tmp_path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": "q", "answer": a}) + "\n" for a in ("a", "odd", "bbb")))
    outcome = rloo("reward-test", f"{reward_file}:odd", "--data", data)
    assert outcome.returncode == 1
    assert "1 of 3 rows failed, row 1 first: odd raised ValueError: an odd one" in outcome.stderr
    assert "on_error and on_timeout of a reward say what a run does with such rows" in outcome.stderr
    assert "failed rows" in outcome.stdout
    for arguments, message in (
        (("--options", "{'a'"), "--options: not JSON"),
        (("--options", '{"factr": 1}'), "takes no option 'factr'"),
        (("--completions", tmp_path / "none.jsonl"), "no such file"),
    ):
        outcome = rloo("reward-test", f"{reward_file}:length", "--data", data, *arguments)
        assert outcome.returncode == 1
        assert message in outcome.stderr
