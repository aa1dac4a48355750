"""Two ranks that stay between two updates write the bytes of ranks that start in each, also if one is killed."""

import threading

import forks
import psutil
import pytest
from helpers import Round, wait_until

from rloo_pipeline.artifacts import fence
from rloo_pipeline.errors import IncompatibleEngine
from rloo_pipeline.runtime import ranks
from rloo_pipeline.workers import engine_cache, kept_ranks

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not forks.use_forks, reason="two ranks need two GPUs")]

RANKS = "ranks"
"""Name of the threads that wait for forks."""
CHANGES = {"deepspeed": {"processes": 2, "zero_stage": 2}}


@pytest.fixture(scope="module")
def cold(tmp_path_factory, tiny_model) -> Round:
    """Two updates, each by ranks of its own."""
    run = Round(tmp_path_factory.mktemp("cold") / "run", tiny_model, **CHANGES)
    for number in (1, 2):
        run.write(number)
        for outcome in run.update_by_ranks(number):
            assert outcome.returncode == 0, outcome.stderr[-2000:]
    return run


@pytest.fixture
def warm(tmp_path, tiny_model, monkeypatch) -> Round:
    """A run whose ranks are forks of the tests' process, and not torchrun's children."""

    def start(count: int, arguments: list[str]) -> list[str]:
        threading.Thread(target=forks.run_ranks, args=("rloo_pipeline", arguments, count), name=RANKS).start()
        return ["sleep", "600"]

    monkeypatch.setattr(ranks, "torchrun_command", start)
    monkeypatch.setattr(engine_cache, "_pending", None)
    monkeypatch.setattr(engine_cache, "_wrote", 0.0)
    yield Round(tmp_path / "run", tiny_model, **CHANGES)
    kept_ranks.close()
    join()


def join() -> None:
    """Waits until the ranks have ended, before other commands become forks of the same process."""
    for thread in threading.enumerate():
        if thread.name == RANKS:
            thread.join()


def update(run: Round, number: int, monkeypatch) -> list[psutil.Process]:
    """Trains policy `number` on ranks of this process, and writes the state beside; returns the ranks."""
    token = run.run / "held"
    token.write_text("here")
    monkeypatch.setenv(fence.VARIABLE, f"here {token}")
    arguments = [str(argument) for argument in run.write(number).update_arguments(number)]
    kept_ranks.run(2, [argument for argument in arguments if not argument.startswith("--log=")])
    processes = kept_ranks._kept._processes[1:] if kept_ranks._kept else []
    token.unlink()
    return processes


def same_bytes(run: Round, other: Round) -> None:
    for pattern in ("policies/*/*", "trainer/00002/**/*", "rounds/*/*.*", "tensorboard/*"):
        files = {file.relative_to(run.run): file.read_bytes() for file in run.run.glob(pattern) if file.is_file()}
        assert files == {name: (other.run / name).read_bytes() for name in files} != {}


def test_two_ranks_that_stay_write_the_bytes_of_ranks_that_start_in_each_update(warm, cold, monkeypatch) -> None:
    first = update(warm, 1, monkeypatch)
    engine_cache.write_pending()
    assert (warm.run / "trainer" / "00001" / "manifest.json").exists()
    assert update(warm, 2, monkeypatch) == first
    same_bytes(warm, cold)


def test_ranks_that_have_lost_torchrun_are_ended(warm, monkeypatch) -> None:
    update(warm, 1, monkeypatch)
    kept_ranks._kept._torchrun.kill()
    with pytest.raises(IncompatibleEngine):
        update(warm, 2, monkeypatch)
    assert kept_ranks._kept is None


@pytest.mark.long
@pytest.mark.parametrize("during", [False, True])
def test_a_rank_killed_between_two_updates_or_in_one_changes_no_byte(warm, cold, monkeypatch, during) -> None:
    other, victim = update(warm, 1, monkeypatch)
    engine_cache.write_pending()
    train = warm.run / "rounds" / "00002" / "train.parquet"
    if during:
        spent = sum(other.cpu_times()[:2])
        victim.suspend()

        def kill() -> None:
            wait_until(lambda: sum(other.cpu_times()[:2]) > spent + 0.05)  # it trains, and waits for the other rank
            victim.kill()

        threading.Thread(target=kill).start()
    else:
        victim.kill()
    with pytest.raises(IncompatibleEngine):
        update(warm, 2, monkeypatch)
    join()
    assert not train.exists()
    for outcome in warm.update_by_ranks(2):
        assert outcome.returncode == 0, outcome.stderr[-2000:]
    same_bytes(warm, cold)
