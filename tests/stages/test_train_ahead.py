"""A round is trained on before the stage `update` asks, with the same bytes; what differs is left to the stage.

Each case is a process of its own, as a worker is.
"""

import json
import os
import subprocess
import sys

import pytest
from helpers import Round

pytestmark = pytest.mark.slow

WORKER = """
import json, os, sys
from pathlib import Path
from rloo_pipeline import cli, kept, runtime, tables
from rloo_pipeline.stages import update

answer = os.fdopen(os.dup(1), "w")  # a stage turns the output to its log
told = []
kept.start(lambda role, ahead, shard, files: told.append((role, sorted(ahead))))
plan = json.loads(sys.argv[1])

def stage(words):
    try:
        with runtime.outputs_to(os.dup(2)):  # what it turns to its log is turned back, as a worker does
            cli.main(words)
    except SystemExit as end:
        return int(end.code or 0)
    except kept.Unfit as why:
        return f"unfit: {why}"
    return 0

def copies(places):
    for place in places:
        kind = place.split("/")[-2]
        read = tables.read(Path(place), kind)
        about = tables.about(read)
        for name in ("schema_version", "kind", "package_version"):
            del about[name]
        with tables.in_memory(tables.make(read.to_pylist(), read.schema, kind, **about)) as file:
            yield os.dup(file.fileno())

said = []
for step, what in plan:
    said.append(stage(what) if step == "stage" else update.train_ahead(*copies(what)))
print(json.dumps({"said": said, "told": told}), file=answer)
"""


def run(plan) -> dict:
    """What the steps of a worker gave: `stage` with its words, `ahead` with the tables that it is told of."""
    words = [(step, [str(word) for word in what]) for step, what in plan]
    command = [sys.executable, "-c", WORKER, json.dumps(words)]
    outcome = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert outcome.returncode == 0, outcome.stderr
    return json.loads(outcome.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def expected(tmp_path_factory, tiny_model):
    """Two rounds, each in a process of its own."""
    made = Round(tmp_path_factory.mktemp("expected") / "run", tiny_model).write(1).write(2)
    for number in (1, 2):
        outcome = made.update(number)
        assert outcome.returncode == 0, outcome.stderr
    return made


@pytest.fixture
def case(tmp_path, tiny_model) -> Round:
    return Round(tmp_path / "run", tiny_model).write(1).write(2)


def tables_of(case: Round, number: int = 2) -> list:
    return [case._table(number, kind, shard) for shard in range(2) for kind in ("rollouts", "scores", "reference")]


def written(case: Round) -> dict[str, bytes]:
    """What both updates made."""
    names = ("policies/*/*", "trainer/**/*", "rounds/*/train.parquet", "rounds/*/metrics.json", "tensorboard/*")
    return {str(f.relative_to(case.run)): f.read_bytes() for n in names for f in case.run.glob(n) if f.is_file()}


def test_a_round_trained_ahead_is_the_same_to_the_byte(case, expected) -> None:
    first, *others = tables_of(case)
    found = run(
        [
            ("stage", case.words(1)),
            ("ahead", tables_of(case, 1)),  # late: that round is over
            ("ahead", [first]),
            ("ahead", others),
            ("ahead", others),  # told again, it does not train again
            ("stage", case.words(2)),
        ]
    )
    assert found["said"] == [0, False, True, True, False, 0]
    assert found["told"] == [["sampler", ["policy"]]] * 2
    assert "ahead of the stage" in (case.run / "logs" / "update-2.log").read_text()
    assert "ahead of the stage" not in (case.run / "logs" / "update-1.log").read_text()
    assert len(written(expected)) > 20
    assert written(case) == written(expected)


def test_what_was_trained_on_something_else_is_not_used(case, expected) -> None:
    """The stage is left to itself, since this process has no other policy any more."""
    told = [
        case.run / "told" / kind / f"{shard}.parquet"
        for shard in range(2)
        for kind in ("rollouts", "scores", "reference")
    ]
    for place, table in zip(told, tables_of(case.write(2, reward=0.5)), strict=True):
        place.parent.mkdir(parents=True, exist_ok=True)
        table.rename(place)
    case.write(2)
    found = run([("stage", case.words(1)), ("ahead", told), ("stage", case.words(2))])
    assert found["said"][:2] == [0, True]
    assert found["said"][2].startswith("unfit: a policy that it trained ahead")
    assert not case.policy(2).exists()
    assert case.update(2).returncode == 0
    assert written(case) == written(expected)
    assert not [file for file in (case.run / "policies").iterdir() if file.name.startswith(".")], (
        "nothing is left of it"
    )


def test_without_a_policy_of_the_round_before_nothing_is_trained(case) -> None:
    assert run([("ahead", tables_of(case))])["said"] == [False]
