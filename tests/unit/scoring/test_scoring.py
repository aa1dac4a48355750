"""Scoring in worker processes: what a function may do to itself harms no other row, and no result depends on where it
ran.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers import ROOT, until

from rloo_pipeline.config import Reward
from rloo_pipeline.errors import UserError
from rloo_pipeline.scoring.scoring import Batch, Scored, score, score_all

FUNCTIONS = """
import asyncio, os, re, signal, time
from rloo_pipeline.scoring.calls import unscored

def length(completions):
    return [float(len(text)) for text in completions]

def number(completions, **columns):
    return [float(text) for text in completions]

def sleeps(completions):
    if "7" in completions:
        time.sleep(1e6)
    return number(completions)

def backtracks(completions):
    if "7" in completions:
        re.match("(a+)+$", "a" * 60 + "b")
    return number(completions)

def crashes(completions):
    if "7" in completions:
        os.kill(os.getpid(), signal.SIGSEGV)
    return number(completions)

def leaves(completions):
    if "7" in completions:
        os._exit(3)
    return number(completions)

def raises(completions):
    if "7" in completions:
        raise ValueError("boom")
    return number(completions)

def raises_together(completions):
    if len(completions) > 1 and "7" in completions:
        raise ValueError("boom")
    return number(completions)

def alarmed(completions):
    def ring(*_):
        raise TimeoutError
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(60)
    except TimeoutError:
        return [1.0] * len(completions)

def best_of_group(completions):
    values = number(completions)
    return [float(value == max(values)) for value in values]

def share(completions):
    return [float(len(completions))] * len(completions)

def nan_at_seven(completions):
    return [float("nan") if text == "7" else 0.0 for text in completions]

def starts_a_child(completions):
    child = os.fork()
    if child:
        with open(__file__ + ".child", "w") as file:
            file.write(str(child))
    time.sleep(1e6)

def tells(completions):
    for place, text in enumerate(completions):
        if text in ("5", "7"):
            unscored(place, "got nothing to read")
    return [None if text in ("5", "7", "9") else float(text) for text in completions]

async def tells_later(completions):
    await asyncio.sleep(0.01)
    return tells(completions)

def threads_and_process(completions):
    return [float(os.environ["OMP_NUM_THREADS"]) + os.getpid() / 1e9] * len(completions)

under_way = 0

async def meet(completions):
    # four calls wait for each other; the score is how many there are
    global under_way
    under_way += 1
    while under_way < 4:
        await asyncio.sleep(0.01)
    return [float(under_way)] * len(completions)

async def counts(completions):
    global under_way
    under_way += 1
    await asyncio.sleep(0.01)
    found, under_way = under_way, under_way - 1
    return [float(found)] * len(completions)

async def waits_for_ever(completions):
    if "7" in completions:
        await asyncio.sleep(1e6)
    return number(completions)

async def never_awaits(completions):
    await asyncio.sleep(0.01)
    if "7" in completions:
        time.sleep(1e6)
    return number(completions)
"""
NUMBERS = [float(row) for row in range(20)]


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(FUNCTIONS)
    return path


def batch(rows: int = 20) -> Batch:
    return Batch(["p"] * rows, [str(row) for row in range(rows)], [[1]] * rows, {"answer": ["1"] * rows})


def scored(file: Path, name: str, workers: int = 2, groups=(4,) * 5, **keys) -> Scored:
    reward = Reward.model_validate({"function": f"{file}:{name}", **keys})
    return score_all([reward], batch(sum(groups)), groups, workers)[0]


def without(row: int) -> list[float | None]:
    return [None if place == row else value for place, value in enumerate(NUMBERS)]


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("sleeps", {}, "took over 2 s"),
        ("backtracks", {}, "took over 2 s"),
        ("waits_for_ever", {}, "took over 2 s"),
        ("never_awaits", {}, "took over 2 s"),
        ("crashes", {"on_error": "none"}, "died of SIGSEGV"),
        ("leaves", {"on_error": "none"}, "ended its process with exit code 3"),
        ("raises", {"on_error": "none"}, "raised ValueError: boom (mine.py, line 33)"),
    ],
)
def test_a_row_that_fails_loses_its_own_score_and_no_others(file, name, keys, said) -> None:
    found = scored(file, name, timeout=2, **keys)
    assert found.scores == without(7)
    assert [place for place, error in enumerate(found.errors) if error] == [7]
    assert found.errors[7] == f"{name} {said}"


@pytest.mark.parametrize("name", ["raises", "crashes", "leaves"])
def test_a_failing_row_is_named_with_its_function(file, name) -> None:
    with pytest.raises(UserError, match=rf"'{name}' \(.*mine.py:{name}\) .* for row 7; mend the function.*on_error"):
        scored(file, name)


def test_rows_that_fail_only_together_are_named_together(file) -> None:
    with pytest.raises(
        UserError, match=r"boom \(mine.py, line 38\) for rows 4 to 7 together and for none of them alone"
    ):
        scored(file, "raises_together")


def test_a_late_row_gets_what_the_policy_says(file) -> None:
    found = scored(file, "sleeps", timeout=2, on_timeout="value", timeout_value=-1.0)
    assert found.scores[6:9] == [6.0, -1.0, 8.0]
    assert "took over" in str(found.errors[7])
    assert found.seconds[7] >= 2
    with pytest.raises(UserError, match="for row 7; raise its timeout"):
        scored(file, "sleeps", timeout=0.3, on_timeout="fail")


def test_a_killed_call_leaves_nothing_that_it_started(file) -> None:
    before = set(psutil.Process().children())
    scored(file, "starts_a_child", groups=(1,), timeout=3)
    child = int(Path(f"{file}.child").read_text())
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
    until(lambda: set(psutil.Process().children()) <= before)


def test_alarms_ring_since_functions_run_on_a_main_thread(file) -> None:
    assert scored(file, "alarmed").scores == [1.0] * 20


def test_async_calls_wait_beside_each_other(file) -> None:
    assert min(scored(file, "meet", groups=(1,) * 20).scores) >= 4
    assert scored(file, "counts", groups=(1,) * 4, concurrency=1).scores == [1.0] * 4


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_do_not_depend_on_the_number_of_workers(file, workers) -> None:
    groups = tuple(1 + place % 5 for place in range(60))
    names = ("number", "best_of_group", "share")
    rewards = [Reward(function=f"{file}:{name}") for name in names]
    found = score_all(rewards, batch(sum(groups)), groups, workers)
    assert found[0].scores == [float(row) for row in range(sum(groups))]
    assert found[1].scores == [float(place == size - 1) for size in groups for place in range(size)]
    assert found[2].scores == [float(size) for size in groups for _ in range(size)]


def test_the_whole_table_comes_at_once_to_who_asks_for_it(file) -> None:
    assert scored(file, "share", batch="all").scores == [20.0] * 20


def test_a_group_that_is_compared_stays_together_whatever_happens(file) -> None:
    found = scored(file, "raises", batch="group", on_error="none")
    assert [place for place, value in enumerate(found.scores) if value is None] == [4, 5, 6, 7]


def test_bad_output_names_the_row_of_the_table(file) -> None:
    with pytest.raises(UserError, match=r"'nan_at_seven' .* returned nan for row 7"):
        scored(file, "nan_at_seven", on_error="none")


@pytest.mark.parametrize("given", ["'0.5'", "b'0.5'", "bytearray(b'0.5')", "[0.5]"])
def test_what_only_looks_like_a_number_is_none(tmp_path, given) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"def mine(completions):\n    return [1.0, {given}]")
    with pytest.raises(UserError, match=r"'mine' .* returned .*0\.5.* for row 1, .* not a number or None"):
        score(Reward(function=f"{file}:mine", batch="all"), Batch(["a"] * 2, ["a"] * 2, None, {}))


def test_true_and_false_and_numbers_of_numpy_are_numbers(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np\ndef mine(completions):\n    return [True, False, np.float32(0.5), np.int64(2)]"
    )
    given = score(Reward(function=f"{file}:mine", batch="all"), Batch(["a"] * 4, ["a"] * 4, None, {}))
    assert given == [1.0, 0.0, 0.5, 2.0]


def test_an_async_function_and_an_import_that_raise_name_the_users_line(tmp_path) -> None:
    file = tmp_path / "mine.py"
    (file.parent / "beside.py").write_text("def helper():\n    return {}['key']\n")
    file.write_text("import beside\nasync def mine(completions):\n    return beside.helper()\n")
    batch = Batch(["a"], ["a"], None, {})
    with pytest.raises(UserError, match=r"'mine' .* raised KeyError: 'key' \(beside\.py, line 2\) for row 0"):
        score(Reward(function=f"{file}:mine"), batch)
    file.write_text("import beside\nbeside.helper()\ndef mine(completions):\n    return [1]\n")
    with pytest.raises(UserError, match=r"importing .*mine\.py failed with KeyError: 'key' \(beside\.py, line 2\)"):
        score(Reward(function=f"{file}:mine"), batch)
    file.write_text("def mine(completions)\n    return [1]\n")
    with pytest.raises(UserError, match=r"importing .* failed with SyntaxError: expected ':' \(mine\.py, line 1\)"):
        score(Reward(function=f"{file}:mine"), batch)


def test_a_missing_column_is_compared_with_the_datasets_columns_alone(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def mine(solution):\n    return [1.0]\n")
    for columns, said in (
        ({"question": ["a"]}, r"needs a column 'solution', which the dataset lacks; there are question$"),
        ({"solutions": ["a"]}, r"did you mean 'solutions'\?$"),
    ):
        with pytest.raises(UserError, match=said):
            score(Reward(function=f"{file}:mine"), Batch(["a"], ["a"], None, columns))


@pytest.mark.parametrize("name", ["tells", "tells_later"])
def test_a_function_can_say_why_a_row_has_no_score(file, name, caplog) -> None:
    with caplog.at_level("INFO", "rloo"):
        found = scored(file, name)
    assert [place for place, score in enumerate(found.scores) if score is None] == [5, 7, 9]
    assert {place: note for place, note in enumerate(found.notes) if note} == dict.fromkeys(
        (5, 7), f"{name} got nothing to read"
    )
    assert not any(found.errors), "9 does not apply, 5 and 7 did not fail the function"
    assert f"2 could not be scored, the first: {name} got nothing to read" in caplog.text


def test_a_function_has_the_threads_that_it_is_given_and_a_gpu_is_for_one_process(file) -> None:
    groups = (1,) * 200

    def seen(**keys) -> tuple[set[int], int]:
        scores = [score for score in scored(file, "threads_and_process", 4, groups, **keys).scores if score]
        return {int(score) for score in scores}, len(set(scores))

    assert seen(threads=4) == ({4}, 1)
    assert seen(threads=2)[0] == {2}
    assert seen(gpus=1) == ({1}, 1)


def test_one_function_alone_is_scored_from_python(file) -> None:
    assert score(Reward(function=f"{file}:length"), batch(3)) == [1.0, 1.0, 1.0]


def test_workers_die_with_a_parent_that_is_killed(file, tmp_path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys\nfrom rloo_pipeline.config import Reward\nfrom rloo_pipeline.scoring.scoring import Batch, score\n"
        "score(Reward(function=sys.argv[1]), Batch(['p'] * 2, ['7', '7'], [[1]] * 2, {}))\n"
    )
    for name in ("sleeps", "backtracks", "never_awaits"):
        command = [sys.executable, str(script), f"{file}:{name}"]
        parent = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
        until(lambda parent=parent: psutil.Process(parent.pid).children())
        workers = psutil.Process(parent.pid).children()
        time.sleep(0.5)  # so that they are at work, as a rule; they must die before that, too
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert not psutil.wait_procs(workers, timeout=300)[1]
