"""Scoring in worker processes: a failing call affects no other row, and no score depends on the number of workers."""

import os
import signal
import subprocess
import sys
import time
from itertools import chain
from multiprocessing.connection import wait
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from helpers import ROOT, has_ended, score, score_all, wait_until

from rloo_pipeline.config import Reward
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime.output import standard_output_to
from rloo_pipeline.user_code import dispatch, process
from rloo_pipeline.user_code.dispatch import WorkerPools
from rloo_pipeline.user_code.messages import CallBatch, TimedCall
from rloo_pipeline.user_code.orphans import adopt_orphans, end_orphans, reap_group
from rloo_pipeline.user_code.score_batch import FunctionScores, RewardBatch
from rloo_pipeline.user_code.worker_process import WorkerProcess

FUNCTIONS = """
import asyncio, inspect, os, re, signal, time
from rloo_pipeline.rewards.calls import unscored

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

def tells_in_a_wrapper(**arguments):
    return tells_later(**arguments)

tells_in_a_wrapper.__signature__ = inspect.signature(tells_later)

def threads_and_process(completions):
    return [float(os.environ["OMP_NUM_THREADS"]) + os.getpid() / 1e9] * len(completions)

under_way = 0

async def meet(completions):
    # four calls wait for each other; the score is their number
    global under_way
    under_way += 1
    while under_way < 4:
        await asyncio.sleep(0.01)
    return [float(under_way)] * len(completions)

async def counts(completions):
    global under_way
    under_way += 1
    await asyncio.sleep(0.01)
    count, under_way = under_way, under_way - 1
    return [float(count)] * len(completions)

async def waits_for_ever(completions):
    if "7" in completions:
        await asyncio.sleep(1e6)
    return number(completions)

async def never_awaits(completions):
    await asyncio.sleep(0.01)
    if "7" in completions:
        time.sleep(1e6)
    return number(completions)

def refuses(completions):
    from rloo_pipeline.errors import UserError
    if "7" in completions:
        raise UserError("name another column")
    return number(completions)

def exits(completions):
    if "7" in completions:
        raise SystemExit("none of my business")
    return number(completions)

async def interrupts(completions):
    if "7" in completions:
        raise KeyboardInterrupt
    return number(completions)
"""
NUMBERS = [float(row) for row in range(20)]


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(FUNCTIONS)
    return path


def batch(rows: int = 20) -> RewardBatch:
    return RewardBatch(["p"] * rows, [str(row) for row in range(rows)], [[1]] * rows, {"answer": ["1"] * rows})


def scored(file: Path, name: str, workers: int = 2, groups=(4,) * 5, **keys) -> FunctionScores:
    reward = Reward.model_validate({"function": f"{file}:{name}", **keys})
    return score_all([reward], batch(sum(groups)), groups, workers)[0]


def without(row: int) -> list[float | None]:
    return [None if place == row else value for place, value in enumerate(NUMBERS)]


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("backtracks", {}, "took over 2 s"),
        ("waits_for_ever", {}, "took over 2 s"),
        ("never_awaits", {}, "took over 2 s"),
        ("crashes", {"on_error": "none"}, "died of SIGSEGV"),
        ("leaves", {"on_error": "none"}, "ended its process with exit code 3"),
        ("raises", {"on_error": "none"}, "raised ValueError: boom (mine.py, line 30)"),
        ("exits", {"on_error": "none"}, "raised SystemExit: none of my business (mine.py, line 119)"),
        ("interrupts", {"on_error": "none"}, "raised KeyboardInterrupt: (mine.py, line 124)"),
    ],
)
def test_a_failing_row_loses_only_its_own_score(file, name, keys, message) -> None:
    result = scored(file, name, timeout=2, **keys)
    assert result.scores == without(7)
    assert [place for place, error in enumerate(result.errors) if error] == [7]
    assert result.errors[7] == f"{name} {message}"


@pytest.mark.parametrize("name", ["raises", "crashes"])
def test_an_error_names_the_function_and_the_failing_row(file, name) -> None:
    with pytest.raises(UserError, match=rf"'{name}' \(.*mine.py:{name}\) .* for row 7; fix the function.*on_error"):
        scored(file, name)


def test_an_error_names_rows_that_fail_only_together(file) -> None:
    with pytest.raises(
        UserError, match=r"boom \(mine.py, line 35\) for rows 4 to 7 together and for none of them alone"
    ):
        scored(file, "raises_together")


def test_a_late_row_follows_on_timeout(file) -> None:
    result = scored(file, "sleeps", timeout=2, on_timeout=-1.0)
    assert result.scores[6:9] == [6.0, -1.0, 8.0]
    assert "took over" in str(result.errors[7])
    assert result.seconds[7] >= 2
    with pytest.raises(UserError, match="for row 7; raise its timeout"):
        scored(file, "sleeps", timeout=2, on_timeout="fail")


def test_killing_a_call_kills_its_child_processes(file) -> None:
    before = set(psutil.Process().children())
    scored(file, "starts_a_child", groups=(1,), timeout=3)
    child = int(Path(f"{file}.child").read_text())
    wait_until(lambda: has_ended(child))
    wait_until(lambda: set(psutil.Process().children()) <= before)


def test_a_late_call_is_killed_where_proc_hides_processes_of_other_users(file, monkeypatch) -> None:
    """As with the mount option hidepid=1."""
    monkeypatch.setattr(psutil.Process, "children", Mock(side_effect=psutil.AccessDenied(1)))
    assert scored(file, "sleeps", timeout=2, on_timeout=-1.0).scores[6:9] == [6.0, -1.0, 8.0]


def test_a_call_that_is_killed_takes_children_in_sessions_of_their_own_along(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("""
import subprocess
def mine(completions):
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    open(__file__ + ".child", "w").write(str(child.pid))
    child.wait()
""")
    with WorkerPools([Reward(function=f"{file}:mine", timeout=4)], 1) as pools:
        pools.score(batch(1), [1], more=True)
        child = int(Path(f"{file}.child").read_text())
        wait_until(lambda: has_ended(child))  # before the stage ends, since it takes the time of other calls


def test_killing_a_call_leaves_what_other_calls_have_started(tmp_path, monkeypatch) -> None:
    """Also a process that loses its parent meanwhile."""
    file = tmp_path / "mine.py"
    file.write_text("""
import os, time
from contextlib import suppress
from pathlib import Path

def wait_for(name):
    while not Path(__file__).with_name(name).exists():
        time.sleep(0.01)

def hostile(completions):
    wait_for("begun")
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if number > 2:
                os.write(number, b"!" * 99)
    time.sleep(1e6)

def daemonizes(completions):
    Path(__file__).with_name("begun").touch()
    wait_for("killing")
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            wait_for("killed")
            os.write(writer, b"right")
        os._exit(0)
    os.wait()
    os.close(writer)
    Path(__file__).with_name("started").touch()
    return [float(os.read(reader, 5) == b"right")] * len(completions)
""")
    killpg, reap_group = os.killpg, process.reap_group

    def kill_later(group: int, number: int) -> None:
        (tmp_path / "killing").touch()
        wait_until((tmp_path / "started").exists)
        killpg(group, number)

    def reap(group: int) -> None:
        reap_group(group)
        (tmp_path / "killed").touch()

    monkeypatch.setattr(os, "killpg", kill_later)
    monkeypatch.setattr(process, "reap_group", reap)
    rewards = [Reward(function=f"{file}:{name}", timeout=300, on_error="none") for name in ("hostile", "daemonizes")]
    with WorkerPools(rewards, 2) as pools:
        assert [one.scores for one in pools.score(batch(1), [1])] == [[None], [1.0]]


@pytest.mark.parametrize(
    ("start", "ending"),
    [
        ("own_session", "os._exit(3)"),
        ("own_session_and_environment", "return [1.0] * len(completions)"),
        ("double_fork", "return [1.0] * len(completions)"),
        ("double_fork", "os._exit(3)"),
    ],
)
def test_nothing_that_a_function_starts_outlives_scoring(tmp_path, start, ending) -> None:
    file, duration = tmp_path / "mine.py", f"{3000 + os.getpid() / 1e7:.7f}"
    file.write_text(f"""
import os, subprocess, time
def own_session():
    subprocess.Popen(["/bin/sleep", "{duration}"], start_new_session=True)
def own_session_and_environment():
    subprocess.Popen(["/bin/sleep", "{duration}"], start_new_session=True, env={{}})
def double_fork():
    if os.fork() == 0:
        os.setsid()
        subprocess.Popen(["/bin/sleep", "{duration}"])
        os._exit(0)
    os.wait()
def mine(completions):
    {start}()
    time.sleep(0.2)
    {ending}
""")
    score(Reward(function=f"{file}:mine", on_error="none"), RewardBatch(["a"] * 2, ["a"] * 2, None, {}))
    assert [p.pid for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["/bin/sleep", duration]] == []


def test_processes_that_leave_their_worker_and_end_are_not_kept_as_zombies(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("""
import os
def mine(completions):
    if os.path.exists(__file__ + ".calm"):
        return [1.0] * len(completions)
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os._exit(0)
        os._exit(0)
    os.close(writer)
    os.read(reader, 1)  # until both have ended
    os.wait()
    return [1.0] * len(completions)
""")
    before = set(psutil.Process().children())
    with WorkerPools([Reward(function=f"{file}:mine")], 1) as pools:
        for _ in range(3):
            pools.score(batch(2), [1, 1], more=True)
        Path(f"{file}.calm").touch()
        worker = psutil.Process(pools.started[0][0].process.pid)

        def kept() -> set[psutil.Process]:
            pools.score(batch(2), [1, 1], more=True)  # one that is just ending is left to the next call
            return set(psutil.Process().children()) - before - {worker}

        wait_until(lambda: not kept())


STAYS = """
import os
from rloo_pipeline.runtime import devices

class Weights:
    moves = 0
    def leave_gpu(self):
        self.moves += 1

weights = Weights()
devices.hold_gpu(weights)

def model(completions):
    print("scored", flush=True)
    if "9" in completions:
        raise ValueError("boom")
    return [float(os.getpid()), float(weights.moves)]

def other(completions):
    return [float(os.getpid()), 0.0]
"""


def test_the_process_of_a_reward_model_waits_off_the_gpu_for_the_next_stage(tmp_path, monkeypatch) -> None:
    file, kept = tmp_path / "mine.py", list[WorkerProcess]()
    file.write_text(STAYS)
    monkeypatch.setattr(Reward, "is_model", property(lambda reward: reward.column == "model"))
    rewards = [Reward(function=f"{file}:{name}") for name in ("model", "other")]

    def stage(number: int, rows: tuple[str, ...] = ("0", "1")) -> list[list[float | None]]:
        log = os.open(tmp_path / f"{number}.log", os.O_CREAT | os.O_WRONLY)
        with standard_output_to(log), WorkerPools(rewards, 2, kept) as pools:
            scores = pools.score(RewardBatch(["p"] * 2, list(rows), [[1]] * 2, {}), [2], more=number == 1)
            if number == 1:
                pools.score(batch(0), [])  # an empty table ends the stage's calls, too
        return [one.scores for one in scores]

    processes = []
    for number, moves in ((1, 0), (2, 1), (3, 2)):
        [[of_model, moved], [of_other, _]] = stage(number)
        processes.append((of_model, of_other))
        assert moved == moves
        assert (tmp_path / f"{number}.log").read_text() == "scored\n", "each stage has the output of its own calls"
        assert [worker.process.pid for worker in kept] == [of_model]
        assert not psutil.pid_exists(int(of_other))
    assert len({of_model for of_model, _ in processes}) == 1
    assert len({of_other for _, of_other in processes}) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert stage(4)[0][1] == 0, "a process with other GPUs is another one"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert len(kept) == 2
    for worker in kept:
        worker.process.kill()
        worker.process.wait()
    assert stage(5)[0][1] == 0, "one that died meanwhile is replaced"
    with pytest.raises(UserError, match="raised ValueError: boom"):
        stage(6, ("9", "1"))
    wait_until(lambda: not any(worker.process.poll() is None for worker in kept))


@pytest.mark.parametrize("names", [["model"], ["model", "twin"]])
def test_no_stage_keeps_more_processes_than_the_last(tmp_path, monkeypatch, names) -> None:
    file, kept, counts = tmp_path / "mine.py", list[WorkerProcess](), []
    file.write_text("def model(completions):\n    return [1.0] * len(completions)\n")
    monkeypatch.setattr(Reward, "is_model", property(lambda _: True))
    for _ in range(3):
        with WorkerPools([Reward(function=f"{file}:model", name=name) for name in names], 3, kept) as pools:
            for worker in chain(*pools.started):
                if worker.signature is None:
                    wait([worker.file])
            pools.score(batch(), (4,) * 5)
        counts.append(len(kept))
    assert counts == [3] * 3
    for worker in kept:
        worker.kill()


def test_functions_run_on_the_main_thread_and_can_use_alarms(file) -> None:
    assert scored(file, "alarmed").scores == [1.0] * 20


def test_async_calls_run_concurrently(file) -> None:
    assert min(scored(file, "meet", groups=(1,) * 20).scores) >= 4
    assert scored(file, "counts", groups=(1,) * 4, concurrency=1).scores == [1.0] * 4


@pytest.mark.parametrize("workers", [1, 3])
def test_results_do_not_depend_on_the_number_of_workers(file, workers) -> None:
    groups = tuple(1 + place % 5 for place in range(60))
    names = ("number", "best_of_group", "share")
    rewards = [Reward(function=f"{file}:{name}") for name in names]
    results = score_all(rewards, batch(sum(groups)), groups, workers)
    assert results[0].scores == [float(row) for row in range(sum(groups))]
    assert results[1].scores == [float(place == size - 1) for size in groups for place in range(size)]
    assert results[2].scores == [float(size) for size in groups for _ in range(size)]


def test_batch_all_gets_the_whole_table_in_one_call(file) -> None:
    assert scored(file, "share", batch="all").scores == [20.0] * 20


def test_batch_group_never_splits_a_group(file) -> None:
    result = scored(file, "raises", batch="group", on_error="none")
    assert [place for place, value in enumerate(result.scores) if value is None] == [4, 5, 6, 7]


def test_bad_output_names_the_row_of_the_table(file) -> None:
    with pytest.raises(UserError, match=r"'nan_at_seven' .* returned nan for row 7"):
        scored(file, "nan_at_seven", on_error="none")


def test_an_error_that_every_row_would_have_names_the_rows_of_the_call(file) -> None:
    with pytest.raises(UserError, match=r"'refuses' .* cannot continue with rows 4 to 7: name another column$"):
        scored(file, "refuses")


@pytest.mark.parametrize("name", ["tells", "tells_later", "tells_in_a_wrapper"])
def test_a_function_can_say_why_a_row_has_no_score(file, name, caplog) -> None:
    with caplog.at_level("INFO", "rloo"):
        result = scored(file, name, workers=1)
    assert [place for place, score in enumerate(result.scores) if score is None] == [5, 7, 9]
    assert {place: note for place, note in enumerate(result.notes) if note} == dict.fromkeys(
        (5, 7), f"{name} got nothing to read"
    )
    assert not any(result.errors), "9 does not apply, 5 and 7 did not fail the function"
    assert f"2 could not be scored, the first: {name} got nothing to read" in caplog.text


def test_workers_get_their_threads_and_a_gpu_function_has_one_process(file) -> None:
    groups = (1,) * 200

    def threads_and_processes(**keys) -> tuple[set[int], int]:
        scores = [score for score in scored(file, "threads_and_process", 4, groups, **keys).scores if score]
        return {int(score) for score in scores}, len(set(scores))

    assert threads_and_processes(threads=4) == ({4}, 1)
    assert threads_and_processes(threads=2)[0] == {2}
    assert threads_and_processes(gpus=1) == ({1}, 1)


def test_a_call_of_the_batch_before_is_not_taken_for_one_of_this_batch(file) -> None:
    worker = WorkerProcess(Reward(function=f"{file}:number"))
    batch = CallBatch({1: TimedCall(range(2), 60.0)}, {"completions": ["0", "1"]}, {}, 1)
    try:
        wait_until(worker.messages)
        worker.assign(batch)
        wait_until(worker.messages)
        os.kill(worker.process.pid, signal.SIGSTOP)
        worker.assign(batch)
        assert worker.began() == {}
    finally:
        worker.kill()


def test_a_worker_that_dies_between_two_calls_fails_none_of_them(tmp_path) -> None:
    file, ringing = tmp_path / "mine.py", tmp_path / "ringing"
    file.write_text(f"""
import pathlib, signal
def ring(*_):
    raise TimeoutError
def mine(completions):
    if "0" in completions and not pathlib.Path("{ringing}").exists():
        pathlib.Path("{ringing}").touch()
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
    return [float(text) for text in completions]
""")
    with WorkerPools([Reward(function=f"{file}:mine")], 1) as pools:
        pools.score(batch(2), [1, 1], more=True)
        [worker] = pools.started[0]
        wait_until(lambda: worker.process.poll() is not None)
        [result] = pools.score(batch(2), [1, 1])
    assert result.scores == [0.0, 1.0]


def test_workers_that_do_not_exit_are_waited_for_together(tmp_path, monkeypatch) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1e6,)).start()\n"
        "def mine(completions):\n    return [1.0] * len(completions)\n"
    )
    monkeypatch.setattr(dispatch, "EXIT_SECONDS", 1.0)
    with WorkerPools([Reward(function=f"{file}:mine")], 8) as pools:
        for worker in pools.started[0]:
            wait([worker.file])
        pools.score(batch(1), [1])
        began = time.monotonic()
    assert time.monotonic() - began < 8


def test_a_child_that_has_exited_is_an_orphan_too() -> None:
    others = adopt_orphans()
    child = os.fork()
    if child == 0:
        os.setsid()
        os._exit(0)
    wait_until(lambda: psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
    end_orphans(others)
    with pytest.raises(ChildProcessError):
        os.waitpid(child, os.WNOHANG)


def test_a_process_that_must_not_be_killed_is_not_waited_for(monkeypatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    with subprocess.Popen(["sleep", "20"], start_new_session=True) as process:
        monkeypatch.setattr(os, "killpg", refuse)
        reap_group(process.pid)
        assert process.poll() is None
        process.kill()


def test_workers_die_with_a_parent_that_is_killed(file, tmp_path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys\nfrom rloo_pipeline.config import Reward\n"
        "from rloo_pipeline.user_code.dispatch import WorkerPools\n"
        "from rloo_pipeline.user_code.score_batch import RewardBatch\n"
        "batch = RewardBatch(['p'] * 2, ['7', '7'], [[1]] * 2, {})\n"
        "with WorkerPools([Reward(function=sys.argv[1])], 1) as pools:\n    pools.score(batch, [1, 1])\n"
    )
    command = [sys.executable, str(script), f"{file}:backtracks"]
    parent = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
    wait_until(lambda: psutil.Process(parent.pid).children())
    workers = psutil.Process(parent.pid).children()
    time.sleep(0.5)  # so that they usually run by then; they must also die if they do not
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert not psutil.wait_procs(workers, timeout=300)[1]
