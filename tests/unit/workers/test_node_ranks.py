"""A worker and its ranks on several nodes; tests/cluster/test_nodes.py has them on a real SLURM."""

import os
import re
import sys
from pathlib import Path

import psutil
import pytest
import srun_ranks
from helpers import executable, has_ended, wait_until

from rloo_pipeline.cluster import node_ranks, nodes
from rloo_pipeline.errors import IncompatibleEngine, UserError
from rloo_pipeline.workers import engine_cache, kept_ranks


@pytest.fixture
def ask(tmp_path, monkeypatch, capfd):
    """Runs a stage on two ranks of two nodes; returns the process of each, by the lines that they print."""
    call = f'exec {sys.executable} {srun_ranks.__file__} "$@"'
    executable(tmp_path / "bin", "srun", f"export PYTHONPATH={os.pathsep.join(sys.path)}\n{call}")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv(nodes.IMAGE, raising=False)
    monkeypatch.setattr(engine_cache, "_pending", None)
    monkeypatch.setattr(engine_cache, "SHARE", 1e9)

    def processes(*words: str) -> dict[str, int]:
        capfd.readouterr()
        output = tmp_path / "policies" / "00001"
        kept_ranks.run(2, words, lambda: node_ranks.NodeRanks(nodes.RankLayout(2, 2, 1), output))
        said = re.findall(r"rank (\d) of (\d+): (.*)", capfd.readouterr().out)
        assert {line for *_, line in said} == {" ".join(words)}, "in the log of this process"
        return {number: int(process) for number, process, _ in said}

    yield processes
    kept_ranks.close()
    assert not [*(tmp_path / "policies").iterdir()], "the files through which ranks meet and report"


def test_ranks_on_several_nodes_stay_and_write_what_they_left(ask, tmp_path) -> None:
    first = ask("keep", str(tmp_path / "state"))
    assert first.keys() == {"0", "1"}
    (tmp_path / "state").mkdir()
    engine_cache.write_pending()
    assert {file.name for file in (tmp_path / "state").iterdir()} == {"0", "1"}, "each its part"
    assert ask("keep", str(tmp_path / "state")) == first
    kept_ranks.close()
    wait_until(lambda: all(map(has_ended, first.values())))


def test_the_error_of_a_rank_on_another_node_is_the_stages(ask) -> None:
    with pytest.raises(UserError, match=r"^one of the 2 ranks failed: my.yaml: a key; drop it$"):
        ask("fail")
    with pytest.raises(IncompatibleEngine, match="another engine"):
        ask("other")


@pytest.mark.parametrize("during", [False, True])
def test_a_rank_that_dies_ends_the_others_and_leaves_the_stage_to_its_own_process(ask, tmp_path, during) -> None:
    if not during:
        first = ask("keep", str(tmp_path))
        psutil.Process(first["1"]).kill()
    with pytest.raises(IncompatibleEngine):
        ask("die" if during else "keep", str(tmp_path))
    if not during:
        wait_until(lambda: all(map(has_ended, first.values())))


def test_ranks_end_with_the_srun_of_their_worker(ask, tmp_path) -> None:
    first = ask("keep", str(tmp_path))
    kept_ranks._kept._srun.kill()
    wait_until(lambda: all(map(has_ended, first.values())))
    with pytest.raises(IncompatibleEngine):
        ask("keep", str(tmp_path))


def test_without_srun_a_stage_runs_in_its_own_process(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(IncompatibleEngine, match="did not start"):
        node_ranks.NodeRanks(nodes.RankLayout(2, 2, 1), Path(tmp_path / "policy"))
