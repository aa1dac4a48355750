"""A table is scored before the stage `score` asks, with the same result; what differs is scored by the stage."""

import os
import shutil

import datasets
import pytest
import yaml
from helpers import Round, mini

from rloo_pipeline import kept, tables
from rloo_pipeline.config_file import load
from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards.schedule import Crews
from rloo_pipeline.stages import score as stage

MINE = """
from pathlib import Path

def length(completion_ids, answer, tokenizer_path):
    print("seen", len(completion_ids))
    with Path(__file__).with_suffix(".calls").open("a") as calls:
        calls.write("call\\n")
    return [float(len(ids)) for ids in completion_ids]
"""


FACTS = ("schema_version", "kind", "package_version")


class Case:
    """A run whose round 1 was scored by a warm worker, this process, and the rollouts of round 2."""

    def __init__(self, folder, tiny_model) -> None:
        self.folder, self.model = folder, tiny_model
        made = Round(folder / "run", tiny_model).write(1).write(2)
        self.rollouts = [made._table(number, "rollouts", 0) for number in (1, 2)]
        for file in self.rollouts:  # as the stage `rollout` writes it
            rolled = tables.read(file, "rollouts")
            tables.write(file, rolled, tables.ROLLOUTS, **tables.about(rolled) | {"run": "made-up"})
        self.prompts = folder / "run" / "prompts"
        self.write_prompts("1")
        self.function = folder / "mine.py"
        self.function.write_text(MINE)
        rewards = [{"function": f"{self.function}:length"}]
        (folder / "config.yaml").write_text(yaml.safe_dump(mini(rewards=rewards, evaluation={"breakdown": []})))
        self.config = load(folder / "config.yaml").only("score")

    def write_prompts(self, answer: str) -> None:
        rows = [{"prompt_id": f"0-{n}", "prompt": "x", "prompt_ids": [4], "answer": answer} for n in range(8)]
        shutil.rmtree(self.prompts, ignore_errors=True)
        datasets.Dataset.from_list(rows).save_to_disk(str(self.prompts / "train"))

    def score(self, number: int, **changes):
        """The table that the stage makes of a round, without its seconds."""
        output = self.folder / f"{number}.parquet"
        stage.score(self.config, self.prompts, self.model, self.rollouts[number - 1], output, **changes)
        return tables.read(output, "scores").drop_columns("seconds")

    def ahead(self, number: int, first: int = 0, end: int = 32) -> bool:
        """What a sampler's worker has done with rows of a table that it is about to write."""
        read = tables.read(self.rollouts[number - 1], "rollouts")
        about = {name: value for name, value in tables.about(read).items() if name not in FACTS}
        rows = read.to_pylist()[first:end]
        with tables.in_memory(tables.make(rows, tables.ROLLOUTS, "rollouts", **about)) as file:
            return stage.score_ahead(os.dup(file.fileno()), first, 32)

    def calls(self) -> int:
        """Of the function, so far."""
        return len(self.function.with_suffix(".calls").read_text().splitlines())


@pytest.fixture
def case(tmp_path, tiny_model, monkeypatch):
    monkeypatch.setattr(kept, "_on", True)
    monkeypatch.setattr(kept, "_things", {})
    monkeypatch.setattr(kept, "_waiting", [])
    made = Case(tmp_path, tiny_model)
    yield made
    kept.catch_up()
    for _, thing in kept._things.values():
        if isinstance(thing, Crews):
            thing.end()


def test_what_was_scored_ahead_is_the_stage_s_table_to_the_row(case, capfd) -> None:
    case.score(1)
    expected, before = case.score(2), case.calls()
    each = before // 2
    capfd.readouterr()
    assert case.ahead(2)
    assert case.calls() == before + each
    assert "seen 4" not in capfd.readouterr().err, "what functions print is for the stage's log"
    assert case.score(2).equals(expected, check_metadata=True)
    assert case.calls() == before + each, "no function is called again"
    assert capfd.readouterr().err.count("seen 4") == 8
    assert case.score(2).equals(expected, check_metadata=True)
    assert case.calls() == before + 2 * each, "it is used once"


@pytest.mark.parametrize("known", [12, 28, 32])
def test_rows_are_scored_while_others_are_sampled_and_none_twice(case, capfd, known) -> None:
    """By functions that remember, so that the order of their calls shows; the stage does what is left."""
    case.function.write_text(MINE.replace("return [float(len(ids))", "calls = globals().setdefault('calls', [])\n"
                                          "    calls += completion_ids\n    return [float(len(calls))"))  # fmt: skip
    case.score(1)
    expected = case.score(2)
    assert len(set(expected["length"].to_pylist())) == 8
    before = case.calls()
    capfd.readouterr()
    for first, end in ((0, 12), (12, 28), (28, 32)):
        if end <= known:
            assert case.ahead(2, first, end)
            assert case.calls() == before + end // 4
    assert case.score(2).equals(expected, check_metadata=True)
    assert case.calls() == before + 8
    assert capfd.readouterr().err.count("seen 4") == 8


def test_rows_that_do_not_follow_those_before_them_are_left(case) -> None:
    case.score(1)
    expected, before = case.score(2), case.calls()
    assert not case.ahead(2, 12)
    assert case.ahead(2, 0, 12)
    assert not case.ahead(2, 16)
    assert case.ahead(1, 0, 16), "of another table: it is begun with in its place"
    assert not case.ahead(2, 16)
    assert case.calls() == before + 3 + 4
    assert case.score(2).equals(expected, check_metadata=True)
    assert case.calls() == before + 7 + 8


def test_a_function_of_the_whole_table_waits_for_it(case) -> None:
    whole = case.config.rewards[0].model_copy(update={"batch": "all"})
    case.config = case.config.model_copy(update={"rewards": [whole]})
    case.score(1)
    expected, before = case.score(2), case.calls()
    assert case.ahead(2, 0, 16)
    assert case.calls() == before
    assert case.ahead(2, 16)
    assert case.calls() == before + 1
    assert case.score(2).equals(expected, check_metadata=True)
    assert case.calls() == before + 1


def test_the_first_of_a_worker_is_left(case) -> None:
    assert not case.ahead(1)


@pytest.mark.parametrize("change", ["rollouts", "prompts", "function", "rewards"])
def test_another_thing_than_the_stage_asks_for_is_scored_again(case, change) -> None:
    case.score(1)
    assert case.ahead(2)
    before = case.calls()
    if change == "rollouts":
        case.rollouts[1] = case.rollouts[0]
    if change == "prompts":
        case.write_prompts("2")
    if change == "function":
        case.function.write_text(MINE.replace("float(len(ids))", "-1.0"))
    if change == "rewards":
        other = case.config.rewards[0].model_copy(update={"weight": 3.0})
        case.config = case.config.model_copy(update={"rewards": [other]})
    found = case.score(2)
    assert case.calls() == before + 8
    lengths = tables.read(case.rollouts[1], "rollouts")["completion_ids"].to_pylist()
    assert found["length"].to_pylist() == (
        [-1.0] * 32 if change == "function" else [float(len(ids)) for ids in lengths]
    )
    weight = 3.0 if change == "rewards" else 1.0
    assert found["reward"].to_pylist() == [weight * one for one in found["length"].to_pylist()]


def test_a_function_that_fails_is_the_stage_s_to_say(case) -> None:
    case.score(1)
    case.function.write_text(MINE.replace("return [", "raise ValueError('no') or ["))
    kept.catch_up()
    assert not case.ahead(2)
    with pytest.raises(UserError, match="raised ValueError: no"):
        case.score(2)


def test_one_function_alone_is_nothing_to_go_by(case) -> None:
    """It may be one that needs a GPU."""
    stage.score(case.config, case.prompts, case.model, case.rollouts[0], case.folder / "part.parquet", only="length")
    assert not case.ahead(2)
