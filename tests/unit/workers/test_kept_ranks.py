"""A worker and its ranks: requests, answers, and what happens if a rank fails, dies, or waits for one that did."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import rank_processes
from helpers import has_ended, wait_until

from rloo_pipeline.errors import IncompatibleEngine, UserError
from rloo_pipeline.runtime import ranks
from rloo_pipeline.workers import engine_cache, kept_ranks


def command(count: int, arguments: list[str]) -> list[str]:
    start = ["env", f"PYTHONPATH={os.pathsep.join(sys.path)}", sys.executable, rank_processes.__file__]
    return [*start, str(count), *arguments]


@pytest.fixture
def ask(monkeypatch, capfd):
    """Runs a stage on two ranks; returns the process of each, by the lines that they print."""
    monkeypatch.setattr(ranks, "torchrun_command", command)
    monkeypatch.setattr(engine_cache, "_pending", None)
    monkeypatch.setattr(engine_cache, "SHARE", 1e9)
    BEFORE.update(child.pid for child in psutil.Process().children(recursive=True))

    def processes(*words: str) -> dict[str, int]:
        capfd.readouterr()
        kept_ranks.run(2, words)
        said = re.findall(r"rank (\d) of (\d+): (.*)", capfd.readouterr().out)
        assert {line for *_, line in said} == {" ".join(words)}, "in the log of this process"
        return {number: int(process) for number, process, _ in said}

    yield processes
    kept_ranks.close()


BEFORE: set[int] = set()
"""Processes that other tests have started."""


def children() -> list[psutil.Process]:
    """Processes that these tests have started and that have not ended."""
    new = [child for child in psutil.Process().children(recursive=True) if child.pid not in BEFORE]
    return [child for child in new if not has_ended(child.pid)]


def test_ranks_that_keep_an_engine_run_the_next_stage_and_write_what_they_left(ask, tmp_path, capfd) -> None:
    first = ask("keep", str(tmp_path))
    assert first.keys() == {"0", "1"}
    assert engine_cache.target() == tmp_path
    engine_cache.write_pending()
    assert {file.name for file in tmp_path.iterdir()} == {"0", "1"}, "each its part"
    assert ask("keep", str(tmp_path / "missing")) == first
    engine_cache.write_pending()  # rank 1 fails, and rank 0 waits for it
    assert "was not written" in capfd.readouterr().out
    assert not children()
    second = ask("keep", str(tmp_path))
    assert not {*first.values()} & {*second.values()}
    with pytest.raises(IncompatibleEngine, match="another engine"):
        ask("other")
    assert not children()


def test_ranks_that_keep_nothing_end(ask) -> None:
    ask("keeps nothing")
    assert not children()
    assert engine_cache.target() is None


def test_the_error_of_a_rank_for_which_the_other_waits_is_the_stages(ask) -> None:
    with pytest.raises(UserError, match=r"^one of the 2 ranks failed: my.yaml: a key; drop it$"):
        ask("fail")
    assert not children()


def test_a_rank_that_dies_leaves_the_stage_to_its_own_process(ask, tmp_path) -> None:
    with pytest.raises(IncompatibleEngine):
        ask("die")
    assert not children()
    killed = ask("keep", str(tmp_path))["1"]
    psutil.Process(killed).kill()
    wait_until(lambda: psutil.Process(killed).status() == "zombie" if psutil.pid_exists(killed) else True)
    with pytest.raises(IncompatibleEngine):
        ask("keep", str(tmp_path))
    assert not children()


def test_ranks_that_do_not_start_leave_the_stage_to_its_own_process(monkeypatch) -> None:
    monkeypatch.setattr(ranks, "torchrun_command", lambda *_: ["false"])
    with pytest.raises(IncompatibleEngine, match="did not start"):
        kept_ranks.run(2, ["keep"])


def test_ranks_end_with_their_worker(tmp_path) -> None:
    code = (
        "import sys, time; sys.path[:] = sys.argv[1:]\n"
        "from test_kept_ranks import command, kept_ranks, ranks\n"
        f"ranks.torchrun_command = command; kept_ranks.run(2, ['keep', {str(tmp_path)!r}]); time.sleep(600)"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code, *sys.path, str(Path(__file__).parent)], stdout=subprocess.PIPE, env=environment
    ) as worker:
        line = b"".join(iter(lambda: worker.stdout.read(1), b"\n"))
        assert line.startswith(b"2 ranks started")
        processes = psutil.Process(worker.pid).children(recursive=True)
        assert len(processes) == 3
        worker.kill()
        wait_until(lambda: not any(process.is_running() and process.status() != "zombie" for process in processes))
