"""Workers on the nodes of a SLURM job: where stages find them, and when they end. tests/cluster runs a whole job."""

import os
import stat
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from helpers import executable, mini, wait_until

from rloo_pipeline.cluster import node_workers
from rloo_pipeline.workers import client

SRUN = """
for word; do case "$word" in --nodelist=*) export SLURMD_NODENAME="${word#*=}" ;; esac; done
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""
"""Runs a step on this machine, as the node that it names."""


@pytest.fixture
def job(tmp_path, monkeypatch) -> Path:
    """The first node of a job of two, whose steps run here; returns its TMPDIR."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    executable(tmp_path, "srun", SRUN)
    executable(tmp_path, "scontrol", "echo node1; echo node2")
    os.environ |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]"}
    os.environ |= {"SLURM_CPUS_PER_TASK": "1", "SLURMD_NODENAME": "node1", "PYTHONPATH": os.pathsep.join(sys.path)}
    monkeypatch.setattr(node_workers.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(mini(workers="always")))
    return tmp_path


def test_a_stage_finds_the_workers_of_its_node_and_they_end_with_snakemake(job) -> None:
    stages, program = {"score", "update"}, [sys.executable, "-m", "rloo_pipeline"]
    node_workers.start(job / "config.yaml", job / "logs", stages, 1, set(), program)
    steps = [psutil.Process(step.pid) for step in node_workers._steps]
    first = Path(os.environ[client.FOLDER])
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    folders = {node: Path(str(first).replace("node1", node)) for node in ("node1", "node2")}
    sockets = {node: {file.name for file in folder.glob("*.sock")} for node, folder in folders.items()}
    assert sockets == {"node1": {"scorer-0.sock", "trainer-0.sock"}, "node2": {"scorer-0.sock"}}, "updates run on one"
    for node, folder in folders.items():
        os.environ[client.FOLDER] = str(folder)
        assert client.run_stage(["score", "--help"]) == 0
        assert (job / "logs" / node / "scorer-0.log").read_text() == "rloo score --help: 0\n"
    workers = [child for step in steps for child in step.children(recursive=True)]
    assert len(workers) == 3
    for step in node_workers._steps:  # as when Snakemake is killed
        step.stdin.close()
    wait_until(lambda: not any(worker.is_running() and worker.status() != "zombie" for worker in workers))
    wait_until(lambda: not any(folder.exists() for folder in folders.values()))
    node_workers.end()
