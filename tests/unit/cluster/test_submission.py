"""`rloo submit`, `status` and `cancel` without SLURM; tests/cluster/test_submit.py has them with it."""

import importlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import MINI, ROOT, executable, has_ended, wait_until

from rloo_pipeline.artifacts import files
from rloo_pipeline.before_run import slurm_checks
from rloo_pipeline.cli import main
from rloo_pipeline.cluster import allocation, slurm, submission
from rloo_pipeline.config.loading import load
from rloo_pipeline.snakemake_ext import failures


@pytest.fixture
def project(tmp_path) -> Path:
    (tmp_path / "Snakefile").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("submit", "--time=60"), "rloo submit: error: no srun on the PATH"),
        (("submit", "--time=60", "--sbatch=Partition gpu"), "write it as KEY=VALUE"),
        (("submit", "--time=60", "--sbatch=array=1-3"), "--sbatch array=1-3: leave it out; a run is one job"),
        (("submit", "--time=60", "--config", "mine.yaml"), "mine.yaml: --config takes KEY=VALUE; name a file before"),
        (("status", "mini"), "nothing was submitted from here; submit it with `rloo submit`"),
        (("cancel", "mini"), "nothing was submitted from here; submit it with `rloo submit`"),
    ],
)
def test_each_error_is_one_line(project, argv, message) -> None:
    config = (str(MINI),) if argv[0] == "submit" else ()
    outcome = subprocess.run(
        [sys.executable, "-m", "rloo_pipeline", argv[0], *config, *argv[1:]],
        cwd=project,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "HOME": str(project)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 1
    assert message in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_a_submitted_run_has_the_name_and_the_keys_that_its_arguments_give_it_then(project, monkeypatch) -> None:
    """The job reads a copy of the configuration, which the user may edit for the next run meanwhile."""
    monkeypatch.chdir(project)
    monkeypatch.setenv(failures.COMMAND, "")
    submitted = []
    monkeypatch.setattr(submission, "submit", lambda run, plan, _: submitted.append((run, plan)) or "7")
    options = ("--sdm=apptainer", "--config", "update={learning_rate: 1.0e-6}", "--retries=0")
    shutil.copyfile(MINI, "mine.yaml")
    main.main(["submit", "mine.yaml", "--time=60", "--config", "run=other", "--", *options])
    Path("mine.yaml").write_text("run: [")
    [(run, plan)] = submitted
    assert failures.go_on().endswith(": rloo submit mine.yaml --time=60 --config run=other -- " + shlex.join(options))
    assert (run, plan.folder) == ("other", project / "results" / "other" / submission.FOLDER)
    assert plan.snakemake_args[-2:] == ["--sdm=apptainer", "--retries=0"]
    copy = Path(plan.snakemake_args[plan.snakemake_args.index("--configfile") + 1])
    asked, copied = load(MINI, ["run=other", "update={learning_rate: 1.0e-6}", "functions=keep"]), load(copy)
    assert copied.model_dump() == asked.model_dump()


def test_the_reason_for_which_slurm_refuses_a_job_is_in_the_error(project, monkeypatch, capsys) -> None:
    executable(project, "sbatch", "echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")
    executable(project, "srun", "exit 0")
    monkeypatch.chdir(project)
    monkeypatch.setenv(failures.COMMAND, "")
    monkeypatch.setenv("PATH", str(project))
    with pytest.raises(SystemExit):
        main.main(["submit", str(MINI), "--time=60", "--sbatch=partition=gpu"])
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line == ("rloo submit: error: SLURM refuses the job: sbatch: error: invalid partition specified: gpu")


LIMITED = """cat <<END
PartitionName=short Default=YES State=UP MaxTime=01:00:00
PartitionName=long State=UP MaxTime=2-00:00:00
END
"""


@pytest.mark.parametrize(
    ("time", "others", "refused"),
    [
        ("60", [], ""),
        ("61", [], "short allows 60"),
        ("60:30", [], "short allows 60"),
        ("61", ["partition=long"], ""),
        ("61", ["partition=short,long"], ""),
        ("2-00:00:01", ["partition=short,long"], "short or long allows 2880"),
        ("61", ["partition=another"], ""),
        ("61", ["partition=short,another"], ""),
        ("61", ["partition"], ""),
        ("61", ["time-min=30"], ""),
        ("UNLIMITED", [], "short allows 60"),
        ("infinite", ["partition=long"], "long allows 2880"),
        ("-1", [], "short allows 60"),
        ("0", [], "short allows 60"),
        ("0:30", [], ""),
        ("60", ["time=2-0", "partition=short"], "short allows 60"),
        ("61", ["qos=overtime"], ""),
        ("later", [], ""),
    ],
)
def test_a_job_that_would_wait_for_ever_is_refused(project, monkeypatch, capsys, time, others, refused) -> None:
    """sbatch takes it, unless the site sets EnforcePartLimits. scontrol does not show partitions that are hidden."""
    for name in submission.DEFAULTS:
        monkeypatch.delenv(f"SBATCH_{name.upper()}", raising=False)
    executable(project, "scontrol", LIMITED)
    executable(project, "sbatch", "echo 'asked' >&2; exit 1")
    executable(project, "srun", "exit 0")
    monkeypatch.chdir(project)
    monkeypatch.setenv(failures.COMMAND, "")
    monkeypatch.setenv("PATH", f"{project}:/bin")
    with pytest.raises(SystemExit):
        main.main(["submit", str(MINI), f"--time={time}", *(f"--sbatch={one}" for one in others)])
    said = capsys.readouterr().err.splitlines()[-1]
    assert (f": partition {refused} minutes, so sbatch would take the job and" in said) == bool(refused)
    assert ("SLURM refuses the job: asked" in said) == (not refused)


def test_variables_of_the_cluster_and_defaults_for_sbatch_apply(project, monkeypatch, capsys) -> None:
    show = """while read -r line; do case $line in *account=*|*partition=*) echo "$line";; esac; done < "$1" """
    executable(project, "sbatch", f"{{ {show}; echo conf=$SLURM_CONF env=$SBATCH_PARTITION; }} >&2; exit 1")
    executable(project, "srun", "exit 0")
    monkeypatch.chdir(project)
    monkeypatch.setenv(failures.COMMAND, "")
    monkeypatch.setenv("PATH", str(project))
    for name, value in (("SLURM_CONF", "/c"), ("SBATCH_ACCOUNT", "ours"), ("SBATCH_PARTITION", "cpu")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main.main(["submit", str(MINI), "--time=60", "--sbatch=partition=gpu"])
    said = capsys.readouterr().err.splitlines()[-1].partition("the job: ")[2]
    assert said == "#SBATCH --account=ours #SBATCH --partition=gpu conf=/c env="


@pytest.mark.parametrize(("state", "waits"), [("RUNNING", True), ("PREEMPTED", False), ("COMPLETED", False)])
def test_a_job_that_has_ended_is_not_in_the_queue(tmp_path, monkeypatch, state, waits) -> None:
    """squeue shows it for some minutes. A job whose partition cancels preempted ones stays as PREEMPTED."""
    for name, line in (("squeue", f"7|{state}|None|1:00"), ("scontrol", "JobId=7 Restarts=0")):
        executable(tmp_path, name, f"echo '{line}'")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (slurm.job("7") is not None) == waits


def test_slurms_commands_do_not_see_what_the_users_shell_sets_for_them(tmp_path, monkeypatch) -> None:
    """SQUEUE_STATES would hide a job, and scancel would wait for an answer; some jobs are only seen with
    SQUEUE_ALL or SQUEUE_FEDERATION.
    """
    importlib.import_module("snakemake_executor_plugin_slurm")  # calls scontrol itself when it is imported
    profile = tmp_path / "profile.v9+.yaml"
    profile.write_text("executor: rloo-slurm\n")
    kept = ("SQUEUE_ALL", "SQUEUE_FEDERATION")
    commands = ("squeue", "scancel", "sacct", "sinfo", "scontrol")
    for name in commands:
        executable(
            tmp_path, name, f'env | grep "^S[A-Z]*_[A-Z]*=of" >>{tmp_path}/seen; echo {name} >>{tmp_path}/called'
        )
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("SQUEUE_STATES", "SCANCEL_INTERACTIVE", "SACCT_FORMAT", "SINFO_PARTITION", *kept):
        monkeypatch.setenv(name, "of the user")
    slurm.ending("7")
    slurm.cancel("7")
    list(slurm_checks.findings(tmp_path, ROOT / "workflow" / "rules", load(MINI)))
    assert {*(tmp_path / "called").read_text().split()} == {*commands}
    assert {*(tmp_path / "seen").read_text().splitlines()} == {f"{name}=of the user" for name in kept}


@pytest.mark.parametrize(
    ("squeue", "sacct", "said"),
    [
        ("echo CANCELLED", "false", "7 was cancelled; `rloo submit` continues the run"),
        ("false", "echo 'CANCELLED by 1000'", "7 was cancelled; `rloo submit` continues the run"),
        ("false", "echo NODE_FAIL", "7 ended as NODE_FAIL; `rloo submit` continues the run"),
        ("false", "echo disabled >&2; false", "7 has ended, and SLURM no longer knows how; `rloo submit` continues"),
    ],
)
def test_the_status_of_a_job_without_an_outcome_says_how_it_ended(tmp_path, monkeypatch, squeue, sacct, said) -> None:
    """While squeue shows the job, from there; later from sacct, if the cluster has it."""
    gone = "{ echo 'slurm_load_jobs error: Invalid job id specified' >&2; false; }"
    executable(tmp_path, "squeue", f"case $* in *%A*) {gone};; *) {squeue} || {gone};; esac")
    executable(tmp_path, "sacct", sacct)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    files.write_json(tmp_path / submission.FOLDER / submission.RECORD, {"job": "7", "controller": False, "log": "x"})
    assert next(submission.status(tmp_path)).split(": job ")[1].startswith(said)


def test_a_run_in_one_job_goes_on_while_the_disk_with_its_log_is_full() -> None:
    """A reader that ended would leave Snakemake waiting at a full pipe, and no finished stage would be counted."""
    code = (
        "import os, sys; from rloo_pipeline.cluster.allocation import _pass_on, _say\n"
        "_say('allocation 1')\n"
        "read, write = os.pipe()\n"
        "os.write(write, b'1 of 2 jobs done: score\\n2 of 2 jobs done: update\\n')\n"
        "os.close(write)\n"
        "_pass_on(os.fdopen(read), finished := [])\n"
        "print(*finished, file=sys.stderr)"
    )
    with open("/dev/full", "w") as full:
        outcome = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert outcome.stderr.startswith("False True\n")


def test_a_job_is_put_back_into_the_queue_when_slurms_controller_answers_again(tmp_path, monkeypatch, capsys) -> None:
    """A run whose job ends while it is restarted would stop there."""
    calls = tmp_path / "calls"
    third = f'echo "$*" >>{calls}; [ $(wc -l <{calls}) = 3 ]'
    executable(tmp_path, "scontrol", f"{third} || {{ echo no answer >&2; exit 1; }}")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(allocation.time, "sleep", lambda _: None)
    allocation._ask(slurm.requeue, "7")
    assert calls.read_text().splitlines() == ["requeue 7"] * 3
    assert "`scontrol requeue 7`: no answer; asking again" in capsys.readouterr().out


SUBMITTED = """
import sys
from pathlib import Path
from rloo_pipeline.cluster import allocation

folder = Path(sys.argv[1])
sys.executable = str(folder / "snakemake")
allocation.work(allocation.Plan([], folder, folder, False, None))
"""


@pytest.mark.parametrize(
    "end", ["kill -TERM $PPID; sleep 0.5; exit 1", "kill -TERM $PPID; exec sleep 600", "exec sleep 600"]
)
def test_a_job_that_slurm_has_ended_leaves_no_process_where_only_its_shell_was_killed(
    tmp_path, monkeypatch, end
) -> None:
    """Without cgroups, SLURM loses sight of it, also while Snakemake waits for its stages; the job may start again."""
    executable(tmp_path, "squeue", "exit 0")
    executable(
        tmp_path,
        "snakemake",
        f"echo $PPID >{tmp_path}/new; mv {tmp_path}/new {tmp_path}/number; {end}",
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "job.py").write_text(SUBMITTED)
    shell = subprocess.Popen(["sh", "-c", f"{sys.executable} {tmp_path}/job.py {tmp_path}; true"])
    wait_until((tmp_path / "number").exists)
    number = int((tmp_path / "number").read_text())
    shell.kill()
    shell.wait()
    wait_until(lambda: has_ended(number), seconds=60)
    assert not list(tmp_path.rglob("outcome.json")), "the job may be at work again"
