"""Errors of ranks that do not meet; tests/cluster/test_nodes.py has ranks that do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import executable, mini

from rloo_pipeline.cluster import nodes
from rloo_pipeline.config.loading import validate
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime.environment import prepare_jobs


@pytest.mark.parametrize(("rank", "missing"), [(0, "no sign of rank 1"), (1, "rank 0 did not say where it listens")])
def test_the_error_of_a_lone_rank_names_the_missing_ranks_and_the_nodes(tmp_path, monkeypatch, rank, missing) -> None:
    rendezvous = tmp_path / "meeting"
    rendezvous.touch()
    variables = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "SLURM_JOB_NODELIST": "gpu[3-4]"}
    for name, value in {**variables, "RLOO_MEETING": rendezvous, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)  # an engine of another test may have made it
    with pytest.raises(UserError) as raised:
        nodes.join(patience=2)
    assert missing in str(raised.value)
    assert "gpu[3-4]" in str(raised.value)


def test_several_nodes_need_a_slurm_job(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(UserError, match="rloo submit --nodes 2"):
        nodes.launch(nodes.RankLayout(2, 2, 1), tmp_path / "policy", ["update"])


@pytest.mark.parametrize("end", ["Killed", "Exited with exit code 137"])  # the latter as Apptainer reports it
def test_a_rank_that_a_signal_killed_is_named_and_not_one_that_lost_its_connection(tmp_path, monkeypatch, end) -> None:
    lines = ["gpu3: task 0: Exited with exit code 1", f"gpu4: task 1: {end}", "gpu3: task 0: Killed"]
    printed = "\n".join(f"echo srun: error: {line} >&2" for line in lines)
    executable(tmp_path, "srun", f'printf "the connection was closed" >"$RLOO_FAILED"\n{printed}\nexit 143')
    monkeypatch.setattr(os, "environ", {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"})
    with pytest.raises(UserError, match=rf"^one of the 2 ranks on 2 nodes failed: rank 1 on gpu4: {end}; if memory"):
        nodes.launch(nodes.RankLayout(2, 2, 1), tmp_path / "policy", ["update"])
    assert [file.name for file in tmp_path.iterdir()] == ["srun"]


def test_an_interrupted_stage_does_not_leave_its_ranks_running(tmp_path, monkeypatch) -> None:
    executable(tmp_path, "srun", f"trap '' INT; echo $$ >{tmp_path}/pid; echo started >&2; exec sleep 600")
    monkeypatch.setattr(os, "environ", {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"})

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            nodes.launch(nodes.RankLayout(2, 2, 1), tmp_path / "policy", ["update"])
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize("variable", ["SLURM_EXPORT_ENV", "SRUN_EXPORT_ENV"])
@pytest.mark.parametrize("export", ["NONE", "HOME,PATH"])
def test_ranks_have_the_variables_of_their_stage_in_a_job_that_was_submitted_with_few(
    tmp_path, monkeypatch, variable, export
) -> None:
    """srun passes on what SLURM_EXPORT_ENV says, which sbatch sets to its own --export, or else SRUN_EXPORT_ENV."""
    says = "${SRUN_EXPORT_ENV:-$SLURM_EXPORT_ENV}"
    passes = f'case {says} in ""|ALL*) ;; *) unset RLOO_MEETING RLOO_STEP;; esac'
    executable(tmp_path, "srun", f'{passes}; echo "${{RLOO_MEETING:+ranks}} $RLOO_STEP" >>{tmp_path}/had')
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", variable: export}
    monkeypatch.setattr(os, "environ", {**os.environ, **environment, "RLOO_STEP": "1"})
    nodes.launch(nodes.RankLayout(2, 2, 1), tmp_path / "policy", ["update"])
    prepare_jobs()
    subprocess.run(["srun"], env=os.environ, check=True)
    assert (tmp_path / "had").read_text().splitlines() == ["ranks 1", " 1"]


def test_ranks_see_all_gpus_of_their_node_in_a_job_that_was_submitted_with_some_for_each_task(
    tmp_path, monkeypatch
) -> None:
    """SLURM 23.11 and later pass a binding on as SLURM_TRES_BIND. srun ends if it finds SLURM_NTASKS_PER_GPU beside the
    number of ranks per node.
    """
    per_task = {"SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_GPU"}
    for name in per_task | {"SLURM_JOB_ID", "SLURM_GPU_BIND", "SLURM_TRES_BIND"}:
        monkeypatch.setenv(name, "1")
    step = nodes.prepare(nodes.RankLayout(2, 8, 1), tmp_path / "policy", ["update"])
    step.remove_files()
    assert step.environment.keys() & (per_task | {"SLURM_GPU_BIND", "SLURM_TRES_BIND"}) == set()
    assert step.environment["SLURM_JOB_ID"] == "1"


def test_the_number_of_nodes_reruns_nothing_and_must_divide_the_processes() -> None:
    spread = mini(deepspeed={"processes": 4, "nodes": 2})
    together = mini(deepspeed={"processes": 4})
    assert validate(spread, "a").params("update") == validate(together, "b").params("update")
    with pytest.raises(UserError, match=r"processes \(4\) is not a multiple of nodes \(3\)"):
        validate(mini(deepspeed={"processes": 4, "nodes": 3}), "c")


def test_a_process_outside_the_image_starts_rloo_in_it_if_stages_run_there(monkeypatch) -> None:
    monkeypatch.delenv(nodes.IMAGE, raising=False)
    assert nodes.program() == [sys.executable, "-m", "rloo_pipeline"]
    monkeypatch.setenv(nodes.IMAGE, "images/a.sif")
    here = str(Path.cwd())
    assert nodes.program(["--nv"]) == ["apptainer", "exec", "--home", here, "--nv", "images/a.sif", "rloo"]
