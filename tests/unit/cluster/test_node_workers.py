"""Workers on the nodes of a SLURM job: where stages find them, and when they end. tests/cluster runs a whole job."""

import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml
from helpers import executable, has_ended, mini, wait_until

from rloo_pipeline.cluster import node_workers, step_client
from rloo_pipeline.runtime import devices, scratch
from rloo_pipeline.workers import client

SRUN = """
echo srun "$@" >>"$STEPS"
for word; do case "$word" in --nodelist=*) export SLURMD_NODENAME="${word#*=}" ;; esac; done
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""
"""Runs a step on this machine, as the node that it names."""
PROGRAM = [sys.executable, "-m", "rloo_pipeline"]


@pytest.fixture
def job(tmp_path, monkeypatch) -> Path:
    """The first node of a job of two, whose steps run here; returns its TMPDIR."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    executable(tmp_path, "srun", SRUN)
    executable(tmp_path, "scontrol", "echo node1; echo node2")
    os.environ |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]"}
    os.environ["STEPS"] = str(tmp_path / "steps")
    os.environ |= {"SLURM_CPUS_PER_TASK": "1", "SLURMD_NODENAME": "node1", "PYTHONPATH": os.pathsep.join(sys.path)}
    monkeypatch.setattr(node_workers.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(mini(workers="always")))
    return tmp_path


@pytest.fixture
def steps(job) -> dict[str, psutil.Process]:
    """The hosts of the job's nodes, by node, and in them a worker that scores."""
    node_workers.start(job / "config.yaml", job / "logs", {"score"}, 1, set(), PROGRAM, 1)
    yield {name: psutil.Process(step.pid) for name, step in node_workers._steps.items()}
    node_workers.end()


def shell(command: str, *options: str) -> subprocess.Popen[str]:
    """Starts a command as Snakemake does, by a shell that `steps` writes."""
    srun = ["srun", "--cpus-per-task=1", "--gres=none", *options]
    program = [sys.executable, "-IS", step_client.__file__, *srun, "sh", "-c", 'exec "$@"', "sh", "bash"]
    return subprocess.Popen([*program, "-c", command], stderr=subprocess.PIPE, text=True, env=dict(os.environ))


def test_a_host_on_this_machine_runs_stages_until_it_dies(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy() | {"PYTHONPATH": os.pathsep.join(sys.path)})
    node_workers.start_here(tmp_path / "logs", ["env", "OF_HOST=1", *PROGRAM])
    host = psutil.Process(node_workers._steps[os.environ.get("SLURMD_NODENAME", "")].pid)
    by_host = [sys.executable, "-IS", step_client.__file__, "bash", "-c", 'echo "[$OF_HOST]" >&2; exit 3']
    for of_host in ("[1]\n", "[]\n"):
        ended = subprocess.run(by_host, capture_output=True, text=True, env=dict(os.environ), timeout=60, check=False)
        assert (ended.returncode, ended.stderr) == (3, of_host)
        host.kill()
        wait_until(lambda: has_ended(host.pid))
    node_workers.end()


def started(job: Path) -> int:
    """Number of steps that were started."""
    return len((job / "steps").read_text().splitlines())


def test_hosts_run_stages_on_nodes_with_room_and_no_step_is_started(steps, job) -> None:
    say = 'echo "$SLURMD_NODENAME $RLOO_STEP ${RLOO_WORKERS#*@}" >&2'
    three = [
        shell(f"{say}; echo x >>{job}/begun; until [ -e {job}/go ]; do sleep 0.02; done; exit 3") for _ in range(3)
    ]
    wait_until(lambda: (job / "begun").exists() and (job / "begun").read_text() == "x\nx\n")
    (job / "go").touch()
    said = [process.communicate()[1] for process in three]
    assert [process.returncode for process in three] == [3, 3, 3]
    assert {*said} == {"node1 1 node1\n", "node2 1 node2\n"}
    scored = shell("set -euo pipefail;  rloo score --help", "--nodelist=node2")
    assert "Score one shard" in scored.communicate()[1]
    by_shell = shell(f"{shlex.join(PROGRAM)} score --help", "--nodelist=node1")
    assert "Score one shard" in by_shell.communicate()[1]
    assert (job / "logs" / "node2" / "scorer-0.log").read_text() == "rloo score --help: 0\n", "by the node's worker"
    assert started(job) == 2, "the hosts"


def test_a_stage_that_is_killed_ends_on_its_node_and_leaves_its_place(steps, job) -> None:
    killed = shell(f"echo $$ >{job}/new; mv {job}/new {job}/process; sleep 600", "--nodelist=node1")
    wait_until((job / "process").exists)
    process = int((job / "process").read_text())
    killed.kill()
    wait_until(lambda: has_ended(process))
    assert shell("exit 4", "--nodelist=node1").wait() == 4
    (worker,) = (child for child in steps["node1"].children(recursive=True) if "worker" in child.cmdline())
    worker.suspend()
    by_worker = shell("set -euo pipefail;  rloo score --help", "--nodelist=node1")
    wait_until(lambda: (job / "logs/node1/scorer-0.log").exists() and worker.net_connections("unix"))
    by_worker.kill()
    worker.resume()
    assert shell("exit 4", "--nodelist=node1").wait() == 4


def test_a_host_that_is_killed_fails_no_stage(steps, job) -> None:
    """A stage for its node becomes a step; others run on the node that has a host, where they take the places."""
    mark, done = job / "mark", job / "done"
    command = f"[ -e {mark} ] || {{ touch {mark}; sleep 600; }}; echo $SLURMD_NODENAME >{done}"
    stage = shell(command, "--nodelist=node1")
    wait_until(mark.exists)
    steps["node1"].kill()
    assert stage.wait() == 0
    assert done.read_text() == "node1\n"
    assert started(job) == 3
    assert "node2" in shell("echo $SLURMD_NODENAME >&2").communicate()[1]
    assert started(job) == 3


def test_a_stage_whose_host_is_killed_waits_for_a_place_on_another_node(steps, job) -> None:
    command = f"echo $SLURMD_NODENAME >>{job}/begun; until [ -e {job}/go ]; do sleep 0.02; done"
    both = [shell(command), shell(command)]
    wait_until(lambda: (job / "begun").exists() and len((job / "begun").read_text().split()) == 2)
    steps["node1"].kill()
    wait_until(lambda: not steps["node1"].is_running() or has_ended(steps["node1"].pid))
    later = shell("exit 4")
    (job / "go").touch()
    assert [process.wait() for process in (*both, later)] == [0, 0, 4]
    assert sorted((job / "begun").read_text().split()) == ["node1", "node2", "node2"]
    assert started(job) == 2, "the hosts"


def test_a_stage_ends_as_its_command_does_whatever_it_leaves_running(steps, job) -> None:
    """As a step of SLURM does: a signal is 128 + n, and neither output that stays open nor what a host cannot do, such
    as making a folder for temporary files, keeps the stage waiting.
    """
    assert shell("kill -9 $$").wait() == 137
    assert shell(f"sleep 600 & echo $! >{job}/left; exit 3").wait(300) == 3
    wait_until(lambda: has_ended(int((job / "left").read_text())))
    assert shell(f"setsid sleep 600 & echo $! >{job}/left; exit 3").wait(300) == 3
    os.kill(int((job / "left").read_text()), 9)
    os.environ["TMPDIR"] = f"{job}/config.yaml/folder"
    refused = shell("exit 4")
    assert "config.yaml/folder" in refused.communicate(timeout=300)[1]
    assert refused.returncode == 1
    del os.environ["TMPDIR"]
    prints = "print('x' * 17_000_000)"
    long_line = shell(f"{sys.executable} -c {shlex.quote(prints)}; echo the error; exit 3")
    assert long_line.communicate(timeout=300)[1].endswith("x\nthe error\n"), "no line is too long"
    assert long_line.returncode == 3
    unreadable = shell("set -euo pipefail;  rloo score --output it's")
    assert "No closing quotation" in unreadable.communicate(timeout=300)[1]
    assert unreadable.returncode == 1
    os.environ["TMPDIR"] = f"{job}/config.yaml/folder"
    two_commands = shell("set -euo pipefail;  rloo score --help\n exit 5")
    assert two_commands.wait(300) == 1, "the folder again: a shell runs it, and no worker"


def test_a_host_that_listens_late_runs_stages(job, monkeypatch) -> None:
    monkeypatch.setattr(node_workers, "PATIENCE", 0.0)
    node_workers.start(job / "config.yaml", job / "logs", {"score"}, 1, set(), PROGRAM, 1)
    assert [shell("exit 4", f"--nodelist={node}").wait(300) for node in ("node1", "node2")] == [4, 4]
    assert started(job) == 2, "the hosts"
    node_workers.end()


def test_stages_on_a_node_leave_room_for_ranks_that_stay_on_its_gpus(job, monkeypatch) -> None:
    ranks = {"nodes": 2, "processes": 2}
    (job / "config.yaml").write_text(yaml.safe_dump(mini(workers="always", deepspeed=ranks)))
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    node_workers.start(job / "config.yaml", job / "logs", {"score"}, 1, set(), PROGRAM, 1)
    assert shell(f"echo ${devices.WARM} >&2", "--nodelist=node2").communicate()[1] == "trainer\n"
    node_workers.end()


def test_a_command_in_another_image_is_a_step() -> None:
    command = "set -euo pipefail;  rloo score --held-out 'a b'"
    call = f"  apptainer  exec --home '/p'  images/own.sif bash -c {shlex.quote(command)}"
    assert step_client.inner(call, "images/own.sif") == command
    assert step_client.inner(call, "images/other.sif") is None
    assert step_client.inner("rloo score", "images/own.sif") is None
    assert step_client.inner("rloo score", None) == "rloo score"
    assert step_client.inner("cat a  # the user's own", "images/own.sif") is None


@contextmanager
def asking_stage(folder: Path) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    """A stage's shell that has begun to ask a router, and the router's end of their connection."""
    with socket.socket(socket.AF_UNIX) as router:
        router.bind(str(folder / "router"))
        router.listen()
        stage = subprocess.Popen(
            [sys.executable, "-IS", step_client.__file__, "bash", "-c", "true"],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {step_client.ROUTER: str(folder / "router")},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
        )
        connection, _ = router.accept()
        with connection:
            connection.recv(1)
            yield stage, connection


def test_ctrl_c_ends_a_stages_shell_without_a_traceback(tmp_path) -> None:
    with asking_stage(tmp_path) as (stage, _):
        stage.send_signal(signal.SIGINT)
        assert stage.communicate(timeout=60)[1] == ""
    assert stage.returncode == -signal.SIGINT


def test_a_stage_whose_router_is_gone_ends_without_a_traceback(tmp_path) -> None:
    with asking_stage(tmp_path) as (stage, connection):
        connection.close()  # with the rest of the request unread, which resets the connection
        assert stage.communicate(timeout=60)[1] == ""
    assert stage.returncode == 1


def test_the_next_controller_removes_the_folder_of_a_killed_ones_router(tmp_path) -> None:
    code = (
        "import os; from rloo_pipeline.cluster import node_workers; "
        "node_workers._start_router(1, 1); os.kill(os.getpid(), 9)"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False)
    assert list(tmp_path.glob("rloo-router-*"))
    scratch.remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_stage_finds_the_workers_of_its_node_and_they_end_with_snakemake(job) -> None:
    node_workers.start(job / "config.yaml", job / "logs", {"score", "update"}, 1, set(), PROGRAM, 1)
    steps = [psutil.Process(step.pid) for step in node_workers._steps.values()]
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
    for step in node_workers._steps.values():  # as when Snakemake is killed
        step.stdin.close()
    wait_until(lambda: not any(worker.is_running() and worker.status() != "zombie" for worker in workers))
    wait_until(lambda: not any(folder.exists() for folder in folders.values()))
    node_workers.end()
