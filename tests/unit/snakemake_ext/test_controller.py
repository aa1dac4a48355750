"""What a Snakemake process refuses, in one sentence, and what its jobs get from it."""

import copy
import errno
import logging
import os
import signal
import sys
import traceback
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml
from helpers import mini
from snakemake.exceptions import LockException, ProtectedOutputException, WorkflowError, format_exception_to_string
from snakemake.io import IOFile
from snakemake.jobs import Reason
from snakemake.settings.enums import RerunTrigger
from snakemake.settings.types import ConfigSettings, SharedFSUsage
from snakemake.spawn_jobs import SpawnedJobArgsFactory

from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.cluster import containers
from rloo_pipeline.config import Config
from rloo_pipeline.config.run_set import RunSet, read_runs, runs_of
from rloo_pipeline.errors import UserError, no_space_left
from rloo_pipeline.judging.diagnosis import STOPPED
from rloo_pipeline.judging.run_files import is_finished
from rloo_pipeline.runtime import devices
from rloo_pipeline.snakemake_ext import (
    call_checks,
    early_stop,
    locks,
    lost_metadata,
    planning,
    run_folders,
    steps,
)
from rloo_pipeline.snakemake_ext import controller as controllers
from rloo_pipeline.snakemake_ext.controller import Controller
from rloo_pipeline.snakemake_ext.snakemake_call import shortened


def controller(is_module: bool = False, executor: str = "local", **settings: Any) -> Controller:
    """One whose workflow has two rules."""
    controller = object.__new__(Controller)
    controller.waits, controller.planned = ExitStack(), False
    controller.main, controller.is_module, controller.several_nodes, controller.in_image = True, is_module, False, False
    controller.alone, controller.owner, controller.stopped = True, "", set()
    controller.workflow = SimpleNamespace(
        rules=[
            SimpleNamespace(name=name, input=[], params=[], resources={}, priority=0)
            for name in ("update", "update_transient")
        ],
        resource_settings=SimpleNamespace(
            **({"overwrite_resources": {}, "overwrite_threads": {}, "nodes": 1} | settings)
        ),
        executor_plugin=SimpleNamespace(name=executor),
        workflow_settings=SimpleNamespace(cache=None),
        rerun_triggers=RerunTrigger.all(),
        global_resources={},
    )
    return controller


def test_resources_of_a_rule_that_is_not_here_are_refused() -> None:
    controller(overwrite_resources={"update": {"mem_mb": 1}}).rules_read()
    with pytest.raises(
        UserError, match=r"names a rule that this workflow does not have: updat; its rules are update, update_transient"
    ):
        controller(overwrite_resources={"updat": {"mem_mb": 1}}).rules_read()
    with pytest.raises(UserError, match="updat"):
        controller(overwrite_threads={"updat": 3}).rules_read()


def test_a_module_does_not_know_the_other_rules() -> None:
    controller(is_module=True, overwrite_resources={"mine": {"mem_mb": 1}}).rules_read()


def test_rules_that_are_named_for_the_cache_are_refused_where_the_hub_decides_what_they_make() -> None:
    named = controller()
    named.workflow.workflow_settings.cache = ["warmstart"]
    named.runs = RunSet({"mini": Config(**mini())})
    named.rules_read()
    named.runs = RunSet({"mini": Config(**mini(model={"build": None, "name_or_path": "org/model"}))})
    with pytest.raises(UserError, match=r"--cache: .*give model.revision and the revision of each dataset as commits"):
        named.rules_read()


def test_the_plain_slurm_executor_is_refused_with_the_name_of_ours() -> None:
    with pytest.raises(UserError, match=r"write `executor: rloo-slurm`.*rloo-slurm-…"):
        controller(executor="slurm").start()


@pytest.fixture
def starting(monkeypatch, tmp_path) -> Controller:
    """One that submits the jobs of a run to SLURM, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(call_checks.inputs, "require", lambda _: [])
    Path("mine.yaml").write_text(yaml.safe_dump(mini()))
    slurm = controller(executor="rloo-slurm")
    slurm.functions = SimpleNamespace(
        kept=lambda _: None, ask=lambda _: None, settle=lambda _: None, keeps=False, notice=lambda: None
    )
    slurm.results, slurm.workflow.local_exec = Path("results"), False
    slurm.workflow.dag, slurm.workflow.scheduler = SimpleNamespace(jobs=[], needrun_jobs=list), SimpleNamespace()
    slurm.workflow.dag.reason = lambda _: Reason()
    slurm.workflow.persistence = SimpleNamespace(_read_record=lambda _: None)
    slurm.workflow.storage_settings = SimpleNamespace(shared_fs_usage=SharedFSUsage.all())
    read(slurm, "mine.yaml")
    return slurm


def read(slurm: Controller, file: str) -> None:
    """Gives a controller the configuration in a file, as Snakemake does."""
    slurm.runs = slurm.configured = read_runs(Path(file))
    slurm.workflow.config_settings = settings = ConfigSettings(configfiles=[Path(file)])
    slurm.workflow.config = copy.deepcopy(settings.overwrite_config)


def test_rounds_of_another_configuration_are_refused_before_anything_is_written(monkeypatch, starting) -> None:
    monkeypatch.setattr(lost_metadata, "kept", lambda *_: "metrics.json was made with another beta")
    with pytest.raises(UserError, match=r"metrics.json was made with another beta"):
        starting.start()
    assert not Path("results").exists()


def test_a_run_whose_report_will_be_made_again_is_not_finished_from_the_start(starting) -> None:
    """Also while its first job waits in the queue, when nothing of it is newer than the summary."""
    run, config = Path("results/mini"), starting.runs.first
    run_files = [f"rounds/{number:05d}/metrics.json" for number in range(1, config.rounds + 1)]
    for file in (*run_files, *(f"evaluation/{name}/summary.json" for name in config.evaluated), "summary.json"):
        write_json(run / file, {})
    starting.start()
    assert is_finished(run, config), "no job of this call makes the summary"
    summary = SimpleNamespace(input=[], output=[str(run / "summary.json")])
    starting.workflow.dag.needrun_jobs = lambda: [summary]
    file_of_a_colleague = (run / "summary.json").stat().st_ino
    starting.start()
    assert not is_finished(run, config)
    assert (run / "summary.json").stat().st_ino != file_of_a_colleague, "only its owner could set its time"


def test_a_finished_run_does_not_run_again_only_because_a_copy_has_lost_its_times(starting) -> None:
    summary = Path("results/mini/summary.json")
    reason = Reason()
    reason._updated_input = {"results/mini/prompts"}
    starting.workflow.dag.needrun_jobs = lambda: [SimpleNamespace(input=[], output=["results/mini/policies/00001"])]
    starting.workflow.dag.reason = lambda _: reason
    record = SimpleNamespace(endtime=None)
    starting.workflow.persistence._read_record = {str(summary): record}.get
    starting.start()  # it is not finished: a kill may have left files of two attempts
    write_json(summary, {})
    with pytest.raises(
        UserError, match=r"mini is finished, but results/mini/prompts is newer .* so 1 job .*rloo adopt"
    ):
        starting.start()
    record.endtime = summary.stat().st_mtime - 600
    with pytest.raises(UserError, match="mini is finished, but"):
        starting.start()
    record.endtime = summary.stat().st_mtime
    starting.start()  # not a copy: a target or `--until` may have remade a part
    record.endtime = None
    reason._updated_input_run = {"results/mini/prompts"}
    starting.start()  # made in this call
    reason._updated_input, reason._updated_input_run = {"data.jsonl"}, set()
    starting.start()
    reason._updated_input, reason.forced = {"results/mini/prompts"}, True
    starting.start()
    reason.forced = False
    os.utime(summary, (1, 1))
    starting.start()  # a call had begun to make files of it again


def test_ranks_on_several_nodes_are_refused_before_the_first_job_of_a_single_machine(monkeypatch, starting) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    starting.runs = RunSet({"mini": Config(**mini(deepspeed={"processes": 2, "nodes": 2}))})
    call_checks.refuse_executor(starting)
    starting.workflow.local_exec = True
    call_checks.refuse_executor(starting)
    update = SimpleNamespace(rule=SimpleNamespace(resources={"mpi": "srun"}))
    starting.workflow.dag.needrun_jobs = lambda: [update]
    with pytest.raises(UserError, match=r"deepspeed.nodes is 2, but this is not a SLURM job: .*rloo submit --nodes 2"):
        starting.start()
    starting.workflow.executor_plugin.name = "touch"  # of rloo adopt
    call_checks.refuse_executor(starting)
    starting.workflow.executor_plugin.name = "local"
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    call_checks.refuse_executor(starting)


@pytest.mark.parametrize("nodes", [None, 4], ids=["on this machine", "as SLURM jobs"])
def test_a_folder_to_bind_must_exist_where_the_image_runs(monkeypatch, starting, nodes) -> None:
    """A login node may lack what compute nodes have."""
    monkeypatch.setattr(containers, "require", lambda _: None)
    monkeypatch.setattr(containers, "prepare", lambda *_, **__: None)
    monkeypatch.setattr(os, "environ", os.environ | {"APPTAINER_BIND": "", "APPTAINER_BINDPATH": "/no/such"})
    starting.workflow.resource_settings.nodes, starting.in_image, starting.image = nodes, True, "a.sif"
    starting.workflow.deployment_settings = SimpleNamespace(apptainer_args="--nv")
    with pytest.raises(UserError, match=r"^APPTAINER_BINDPATH names /no/such") if nodes is None else nullcontext():
        call_checks.require_packages(starting)


def test_apptainer_arguments_that_empty_the_environment_are_refused(monkeypatch, starting) -> None:
    monkeypatch.setattr(containers, "require", lambda _: None)
    starting.in_image, starting.image = True, "a.sif"
    starting.workflow.deployment_settings = SimpleNamespace(apptainer_args="--nv --cleanenv")
    with pytest.raises(UserError, match=r"^--apptainer-args has --cleanenv, .*; take it out$"):
        call_checks.require_packages(starting)


@pytest.mark.parametrize("store", ["mlruns", "file:///mlruns", "FILE:///mlruns"])
def test_a_folder_for_mlflow_is_refused_before_stages_in_an_image_would(monkeypatch, starting, store) -> None:
    starting.runs, starting.in_image = RunSet({"mini": Config(**mini(report_to="mlflow"))}), True
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    with pytest.raises(UserError, match="MLFLOW_TRACKING_URI: MLflow cannot keep a run's metrics in a folder"):
        call_checks.require_packages(starting)


@pytest.mark.parametrize("nodes", [None, 4], ids=["on this machine", "as SLURM jobs"])
def test_a_run_on_cpus_beside_gpus_says_so(monkeypatch, starting, nodes) -> None:
    said = list[str]()
    monkeypatch.setattr(call_checks, "logger", SimpleNamespace(warning=said.append))
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setattr(devices, "packages_are_for_gpus", lambda: False)
    starting.workflow.resource_settings.nodes, starting.in_image = nodes, False
    call_checks.require_inputs(starting)
    told = ["for the GPUs of this machine, run `make setup ACCELERATOR=cuda`" in note for note in said]
    assert told == ([True] if nodes is None else [])


def test_a_dry_run_says_what_a_run_would_refuse_and_takes_no_lock(monkeypatch, starting) -> None:
    """Its option says so: while the Snakefile is read, Snakemake has no executor that would."""
    said = list[str]()
    for name in ("scratch", "gc", "sys"):
        monkeypatch.setattr(planning, name, MagicMock())
    for name in ("find_all_jobs", "prepare_jobs"):
        monkeypatch.setattr(planning, name, lambda: None)
    for part in (call_checks, controllers):
        monkeypatch.setattr(part, "logger", SimpleNamespace(warning=said.append))
    monkeypatch.setattr(locks, "hold", lambda *_: pytest.fail("the lock was taken"))
    workflow, run = starting.workflow, Path("results/mini")
    workflow.output_settings, workflow.dryrun = SimpleNamespace(dryrun=True), False
    workflow.logger_manager, workflow.snakemake_tmp_dir = SimpleNamespace(get_log_handlers=list), Path("tmp")
    starting.in_image = False
    (run / "evaluation" / "final").mkdir(parents=True)
    write_json(run / "summary.json", {"rounds": starting.runs.first.rounds + 1})
    starting.runs = RunSet({"mini": Config(**mini(container={"image": "a.sif"}))})
    starting.prepare()
    assert ["--sdm apptainer" in sentence for sentence in said] == [True, False]
    assert ["evaluation and report of round" in sentence for sentence in said] == [False, True]


def test_only_a_finished_run_lacks_a_policy(starting) -> None:
    """Who takes the workflow as a module, or says --until, may want no evaluation."""
    run, config = Path("results/mini"), starting.runs.first
    starting.workflow.dag_settings = SimpleNamespace(targets=set())
    for number in range(1, config.rounds + 1):
        write_json(run / f"rounds/{number:05d}/metrics.json", {})
    assert lost_metadata.missing(starting) is None
    for file in (*(f"evaluation/{name}/summary.json" for name in config.evaluated), "summary.json"):
        write_json(run / file, {})
    assert "policies/00000 is missing" in str(lost_metadata.missing(starting))


def test_a_table_that_was_deleted_is_named_unless_only_a_part_was_asked_for(starting) -> None:
    here, gone = (f"results/mini/rounds/00001/scores/{shard:03d}.parquet" for shard in range(2))
    write_json(Path(here), {})
    outputs, before = [here, gone, "results/mini/policies/00001"], ["results/mini/rounds/00001/rollouts/001.parquet"]
    rules = (SimpleNamespace(shellcmd=f"{program} score --output {{output}}") for program in ("rloo", "of-a-user"))
    jobs = [SimpleNamespace(rule=rule, output=[*outputs], input=before) for rule in rules]
    jobs[1].output.append("temporary.parquet")
    starting.workflow.dag = SimpleNamespace(jobs=jobs)
    for targets, named in (({here}, False), (set(), True)):
        starting.workflow.dag_settings = SimpleNamespace(targets=targets)
        assert (f"1 table of finished jobs, such as {gone}" in str(lost_metadata.missing_tables(starting))) == named
    Path(here).rename(gone)
    jobs[0].output.remove(here)
    assert lost_metadata.missing_tables(starting) is None


@pytest.mark.parametrize(
    ("deleted", "trains"),
    [
        (["rounds/00002/train.parquet"], True),
        (["rounds/00002/rollouts/000.parquet"], False),
        (["rounds/00002/rollouts/000.parquet", "policies/00001"], True),
        (["rounds/00002/pass_rates.parquet", "policies/00001"], False),
        (["rounds/00002/pass_rates.parquet", "rounds/00002/rollouts/000.parquet", "policies/00001"], True),
    ],
)
def test_a_deleted_table_for_which_rounds_would_be_trained_again_is_named_with_that(starting, deleted, trains) -> None:
    run = Path("results/mini")
    made = {
        "update": (["assets"], ["policies/00001", "rounds/00001/train.parquet"]),
        "rollout": (["policies/00001"], ["rounds/00002/rollouts/000.parquet"]),
        "pass-rates": (["rounds/00002/rollouts/000.parquet"], ["rounds/00002/pass_rates.parquet"]),
        "update --last": (["rounds/00002/rollouts/000.parquet"], ["policies/00002", "rounds/00002/train.parquet"]),
    }
    jobs = [
        SimpleNamespace(
            rule=SimpleNamespace(shellcmd=f"rloo {stage} --output {{output}}"),
            input=[str(run / file) for file in needed],
            output=[str(run / file) for file in files],
        )
        for stage, (needed, files) in made.items()
    ]
    starting.workflow.dag = SimpleNamespace(jobs=jobs)
    starting.workflow.dag_settings = SimpleNamespace(targets=set())
    for file in {file for files in made.values() for file in files[1]} - {*deleted}:
        write_json(run / file, {})
    said = str(lost_metadata.missing_tables(starting))
    assert f"such as {run / deleted[0]}" in said
    assert ("one, which trains rounds again, with all before them" in said) == trains


def test_the_question_about_edited_functions_comes_before_a_stop_that_one_answer_would_keep(starting) -> None:
    """With `functions: keep`, nothing is trained again, so stopped.json may stay."""
    starting.stopped = {"mini"}
    last = f"results/mini/rounds/{starting.runs.first.rounds:05d}/metrics.json"
    starting.workflow.dag.needrun_jobs = lambda: [SimpleNamespace(output=[last])]
    starting.functions.ask = MagicMock(side_effect=UserError("rewards.py: edited"))
    starting.functions.settle = lambda _: pytest.fail("the new functions were copied")
    with pytest.raises(UserError, match=r"rewards\.py: edited"):
        starting.start()
    starting.functions.ask.side_effect = None
    with pytest.raises(UserError, match=r"delete results/mini/stopped\.json"):
        starting.start()


def test_jobs_on_other_machines_get_nothing_of_this_one(monkeypatch, starting) -> None:
    """No controller to end with, no folder for temporary files, no workers."""
    monkeypatch.setattr(steps.manager, "start", lambda *_: pytest.fail("workers were started"))
    monkeypatch.setattr(steps.scratch, "use", lambda _: pytest.fail("TMPDIR was set"))
    monkeypatch.delenv(steps.controller_watch.VARIABLE, raising=False)
    starting.start()
    assert steps.controller_watch.VARIABLE not in os.environ


def test_an_experiment_knows_the_rounds_that_were_planned_for_a_run_that_a_gate_ended(tmp_path) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(mini(rounds=5)))
    arms = {"plain": {}, "long": {"rounds": 7}}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump({"base": "base.yaml", "arms": arms, "seeds": [0, 1]}))
    write_json(tmp_path / "study" / "long" / "1" / STOPPED, {"round": 3})
    study = controller()
    study.results, study.configured = tmp_path, read_runs(tmp_path / "study.yaml")
    study.runs = shortened(study.configured, tmp_path)
    run_folders.write_configs(study)
    written = {file: yaml.safe_load(file.read_text())["rounds"] for file in (tmp_path / "study").rglob("*.yaml")}
    assert [written[tmp_path / "study" / "long" / seed / "config.yaml"] for seed in "01"] == [7, 3]
    assert written[tmp_path / "study" / "experiment.yaml"] == {"plain": 5, "long": 7}


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_an_experiment_is_refused_where_links_cannot_be_made(tmp_path, monkeypatch, code) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(mini()))
    (tmp_path / "study.yaml").write_text(yaml.safe_dump({"base": "base.yaml", "arms": {"plain": {}}, "seeds": [0, 1]}))
    refused = OSError(code, os.strerror(code), "target", None, "link")
    monkeypatch.setattr(Path, "symlink_to", MagicMock(side_effect=refused))
    with pytest.raises(UserError, match=rf"^{tmp_path}/study/plain/0/.*: this file system has no symbolic links \("):
        run_folders.write_experiment(read_runs(tmp_path / "study.yaml"), tmp_path)


def test_a_call_beside_a_living_one_is_refused_also_where_snakemakes_lock_was_cleared(starting) -> None:
    """Its stages would read the configuration that the other one has written."""
    starting.alone, starting.owner = False, "here process 1 is at work on it"
    own, others = Path("own.lock"), Path("others.lock")
    own.touch()
    others.touch()
    noop = object()
    persistence = SimpleNamespace(_lockfile={"output": str(own)}, noop=noop, unlock=None)
    starting.workflow.persistence = persistence
    with pytest.raises(UserError, match="here process 1 is at work"):
        starting.start()
    assert not Path("results").exists()
    assert (own.exists(), others.exists()) == (False, True)
    assert persistence.unlock is noop, "Snakemake removes the markers of all processes when it ends"


def test_a_file_of_a_job_that_cannot_be_written_is_named_with_what_helps(starting) -> None:
    files = [IOFile(f"results/{name}", rule=None) for name in ("a b.json", "c.json")]
    rule = SimpleNamespace(name="report", snakefile="workflow/rules/evaluate.smk", lineno=1)
    error = ProtectedOutputException(SimpleNamespace(rule=rule, output=files, wildcards=None), files)
    said = logging.makeLogRecord({"msg": format_exception_to_string(error)})
    assert starting.on_message(said)
    assert said.msg.startswith("Error: results/a b.json: you cannot write to it, or its file system is read-only; ")


def test_a_full_disk_on_which_snakemake_cannot_lock_is_one_sentence_and_other_tracebacks_stay(starting) -> None:
    full = errno.ENOSPC, "No space left on device"
    for error, place in (
        (OSError(*full), Path.cwd()),
        (OSError(*full, "/home/me/.cache/a file"), Path("/home/me/.cache")),
        (OSError(*full, "/home/o'neil/a", None, "/home/b"), Path("/home/o'neil")),
        (OSError("not that"), None),
    ):
        try:
            raise error
        except OSError:
            text = traceback.format_exc()
        said = logging.makeLogRecord({"msg": text})
        assert starting.on_message(said)
        assert said.msg == (f"Error: {no_space_left(place)}" if place else text)


def test_a_file_system_that_turns_read_only_is_one_sentence(starting) -> None:
    """Snakemake cannot remove its lock while it handles another error."""
    try:
        try:
            raise WorkflowError("Error recording metadata for finished job")
        except WorkflowError:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/here/.snakemake/locks/0.input.lock")  # noqa: B904
    except OSError:
        said = logging.makeLogRecord({"msg": traceback.format_exc()})
    assert starting.on_message(said)
    assert said.msg.startswith("Error: /here/.snakemake/locks: Read-only file system; run again once it can be written")
    assert "\n" not in said.msg


@pytest.mark.parametrize(
    "error", [UserError("model.safetensors: truncated"), OSError(errno.EACCES, "", "model.safetensors")]
)
def test_a_file_that_cannot_be_read_when_nothing_is_left_to_do_is_one_sentence(starting, monkeypatch, error) -> None:
    monkeypatch.setattr(lost_metadata, "kept", MagicMock(side_effect=error))
    with pytest.raises(WorkflowError, match=r"^model\.safetensors: "):
        starting.on_message(logging.makeLogRecord({"msg": "Nothing to be done (all requested files are present)."}))


def test_what_snakemake_says_before_and_instead_of_a_dag(starting) -> None:
    """It asks to make incomplete files again without a profile, and never advises to unlock a living run."""
    starting.alone, starting.owner = False, "here process 1 is at work on it"
    starting.workflow.dag_settings = SimpleNamespace(force_incomplete=False)
    starting.workflow.persistence = SimpleNamespace(_io_read=None)
    called = list[str]()
    starting.workflow._onstart = starting.workflow._onerror = called.append
    said = [logging.makeLogRecord({"msg": text}) for text in ("Building DAG of jobs...", str(LockException()))]
    starting.start, starting.fail = lambda: called.append("our start"), lambda: called.append("our end")
    assert all(map(starting.on_message, said))
    starting.workflow._onstart("the Snakefile's start")
    starting.workflow._onerror("the Snakefile's end")
    assert called == ["our start", "the Snakefile's start", "our end", "the Snakefile's end"]
    assert starting.workflow.dag_settings.force_incomplete
    assert said[1].msg == "Error: here process 1 is at work on it"


def described(runs: RunSet) -> tuple[Any, ...]:
    """All of the runs but the path of their base, and what to do with edited functions, which jobs keep."""
    configs, shared = (
        {run: config.model_copy(update={"functions": "keep"}) for run, config in some.items()}
        for some in (runs.configs, runs.shared)
    )
    return runs.name, configs, runs.homes, shared


EXPERIMENT = {"experiment": "study", "seeds": [1, 2], "arms": {"b": {"update.learning_rate": 1e-6}, "a": {}}}


@pytest.mark.parametrize("base", [None, "mine.yaml", "sub/mine.yaml", "{folder}/mine.yaml"])
def test_a_job_that_starts_after_the_user_has_edited_the_configuration_has_the_one_of_its_run(
    starting, tmp_path, base
) -> None:
    """Of an experiment both files: its own and its base."""
    (tmp_path / "sub").mkdir()
    for file in ("mine.yaml", "sub/mine.yaml"):
        (tmp_path / file).write_text(yaml.safe_dump(mini(update={"learning_rate": 1e-6})))
    if base:
        (tmp_path / "study.yaml").write_text(yaml.safe_dump(EXPERIMENT | {"base": base.format(folder=tmp_path)}))
    read(starting, "study.yaml" if base else "mine.yaml")
    before = described(starting.runs)
    starting.start()
    for file in tmp_path.glob("**/*.yaml"):
        if file.relative_to(tmp_path).parts[0] not in (".snakemake", "results"):
            file.write_text("run: half-sav")
    workflow = starting.workflow
    [frozen] = workflow.overwrite_configfiles = workflow.config_settings.configfiles
    assert str(frozen) in SpawnedJobArgsFactory(workflow).get_configfiles_arg()
    assert not workflow.config_settings.config_args
    assert {config.functions for config in read_runs(frozen).by_folder.values()} == {"keep"}
    assert described(read_runs(frozen)) == before
    assert described(runs_of(ConfigSettings(configfiles=[frozen]).overwrite_config, frozen, "")) == before


def test_an_interrupt_while_snakemake_plans_is_one_line(monkeypatch, capsys) -> None:
    others = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, *_: others.append(kind))
    early_stop.prepare_interrupt(SimpleNamespace(main=True))
    for error in (KeyboardInterrupt(), ValueError()):
        sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err.startswith("Interrupted; the same command continues from here")
    assert others == [ValueError]


def test_only_the_first_interrupt_is_raised() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        early_stop.only_first_interrupt()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        handler = signal.getsignal(signal.SIGINT)
        early_stop.only_first_interrupt()
        assert signal.getsignal(signal.SIGINT) is handler, "the handler of someone else stays"
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_dry_run_of_someone_who_may_only_read_is_refused_in_one_sentence(tmp_path, monkeypatch) -> None:
    """Snakemake ends with a traceback."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.access", lambda path, _: str(path) != ".snakemake")
    monkeypatch.setattr(call_checks, "require_inputs", lambda _: None)
    monkeypatch.setattr(early_stop, "longer_runs", lambda _: [])
    call = SimpleNamespace(dry_run=True, functions=SimpleNamespace(notice=lambda: None))
    call_checks.warn_in_dry_run(call)
    (tmp_path / ".snakemake").mkdir()
    with pytest.raises(UserError, match="this user cannot write there"):
        call_checks.warn_in_dry_run(call)


def test_tables_of_shards_that_a_run_no_longer_has_are_removed_where_the_others_are_made_again(starting) -> None:
    first, second = (Path("results/mini/rounds") / name / "rollouts" for name in ("00001", "00002"))
    for folder in (first, second):
        folder.mkdir(parents=True)
        for shard in range(4):
            (folder / f"{shard:03d}.parquet").touch()
    job = SimpleNamespace(output=[first / "001.parquet"])
    starting.workflow.dag.needrun_jobs = lambda: [job]
    run_folders.remove_lost_shards(starting)
    assert sorted(file.name for file in first.iterdir()) == ["000.parquet", "001.parquet"]
    assert len(list(second.iterdir())) == 4
