"""What is made a step of a job of several nodes, and which GPUs it asks for; tests/cluster/test_spread.py runs them."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import executable
from snakemake.resources import Resources

from rloo_pipeline.cluster import containers, slurm
from rloo_pipeline.snakemake_ext import steps

RULES = {
    "score": {"runtime": 60},
    "rollout": {"runtime": 120, "gpu_stages": 1},
    "reference": {"runtime": 120, "gpu_stages": 1, "gres": "gpu:1"},
    "update": {"runtime": 240, "gpu_stages": 1},
    "warmstart": {"runtime": 240, "gpu_stages": 1, "mpi": "srun"},
    "gate": {},
}


@pytest.fixture
def shells(tmp_path, monkeypatch) -> dict[str, str | None]:
    """The shell of each rule, in a job of three nodes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    for name in containers.CACHES:  # torch, where a test before this one has imported it, sets one of them
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", "/node's disk/hf")
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    rules = [
        SimpleNamespace(name=name, shellcmd=f"rloo {name}", resources=Resources.from_mapping(requests))
        for name, requests in RULES.items()
    ]
    limits = Resources.from_mapping({"gpu_stages": 2})
    steps.spread(rules, limits)
    assert limits["gpu_stages"].value == 6
    return {rule.name: rule.resources["shell_exec"].raw if "shell_exec" in rule.resources else None for rule in rules}


def test_stages_ask_for_their_gpus_and_no_others(shells) -> None:
    assert shells["warmstart"] is None, "it calls srun by itself"
    assert "srun" not in Path(shells["gate"]).read_text(), "it is done in a moment"
    scripts = {name: Path(path).read_text() for name, path in shells.items() if path}
    assert "--gres=none" in scripts["score"]
    assert "--gres=gpu:1" in scripts["reference"]
    assert "--gres" not in scripts["rollout"], "all of a node's"
    assert ["--nodelist=node1" in scripts[name] for name in ("update", "rollout")] == [True, False], "of the trainer"


def test_on_one_machine_the_host_runs_stages_and_no_rules_of_the_user(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    rules = [
        SimpleNamespace(shellcmd=command, resources=Resources.from_mapping({}))
        for command in ("rloo score", "cat", None)
    ]
    steps.by_host(rules)
    assert ["shell_exec" in rule.resources for rule in rules] == [True, False, False]


def test_the_script_passes_for_a_shell(shells, tmp_path, monkeypatch) -> None:
    """Its name is what Snakemake knows a shell by, and all arguments go through."""
    executable(tmp_path, "srun", 'while [ "$1" != sh ]; do shift; done\nexec "$@"')
    executable(tmp_path, "mkdir", 'printf "%s\\n" "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert Path(shells["score"]).name == "bash"
    monkeypatch.setenv("SLURMD_NODENAME", "node2")
    for before, now in (("", ""), ("/tmp/a@b@node1", "/tmp/a@b@node2")):
        monkeypatch.setenv("RLOO_WORKERS", before)
        call = [shells["score"], "-c", 'echo "it\'s $RLOO_STEP$RLOO_WORKERS"']
        outcome = subprocess.run(call, capture_output=True, text=True)
        assert outcome.returncode == 0, outcome.stderr
        assert outcome.stdout.splitlines()[-2:] == ["/node's disk/hf", f"it's 1{now}"]


@pytest.mark.parametrize("variables", [{}, {"SLURM_JOB_NUM_NODES": "1"}, {"SLURM_STEP_ID": "0"}])
def test_one_node_and_steps_are_left_alone(variables, monkeypatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    if variables:
        for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", **variables}.items():
            monkeypatch.setenv(name, value)
    assert slurm.job_nodes() == 1


def test_updates_beside_rollouts_run_on_any_node(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    places = []
    for anywhere in (False, True):
        update = SimpleNamespace(shellcmd="rloo update", resources=Resources.from_mapping(RULES["update"]))
        steps.spread([update], Resources.from_mapping({}), anywhere)
        places.append("--nodelist=node1" in Path(update.resources["shell_exec"].raw).read_text())
    assert places == [True, False]


def test_without_a_limit_one_stage_has_all_gpus_of_its_node(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm, "job_nodes", lambda: 2)
    limits = Resources.from_mapping({})
    steps.spread([], limits)
    assert limits["gpu_stages"].value == 2
