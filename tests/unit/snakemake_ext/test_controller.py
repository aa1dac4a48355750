"""Settings of a profile that would have no effect end the call with one sentence."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from helpers import mini

from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.config.run_set import read_runs
from rloo_pipeline.errors import UserError
from rloo_pipeline.snakemake_ext import controller as module
from rloo_pipeline.snakemake_ext import early_stop
from rloo_pipeline.snakemake_ext.controller import Controller


def controller(is_module: bool = False, executor: str = "local", **settings: Any) -> Controller:
    """One whose workflow has two rules."""
    controller = object.__new__(Controller)
    controller._main, controller._is_module, controller.several_nodes = True, is_module, False
    controller._workflow = SimpleNamespace(
        rules=[
            SimpleNamespace(name=name, input=[], params=[], resources={}, priority=0)
            for name in ("update", "update_transient")
        ],
        resource_settings=SimpleNamespace(**({"overwrite_resources": {}, "overwrite_threads": {}} | settings)),
        executor_plugin=SimpleNamespace(name=executor),
    )
    return controller


def test_resources_of_a_rule_that_is_not_here_are_refused() -> None:
    controller(overwrite_resources={"update": {"mem_mb": 1}}).rules_read()
    with pytest.raises(
        UserError, match=r"names no rule of this workflow: updat; its rules are update, update_transient"
    ):
        controller(overwrite_resources={"updat": {"mem_mb": 1}}).rules_read()
    with pytest.raises(UserError, match="updat"):
        controller(overwrite_threads={"updat": 3}).rules_read()


def test_a_rule_that_has_another_name_now_is_said_with_it() -> None:
    with pytest.raises(UserError, match=r"update_passing \(update_passing is now update_transient\)"):
        controller(overwrite_resources={"update_passing": {"mem_mb": 1}}).rules_read()


def test_a_module_does_not_know_the_other_rules() -> None:
    controller(is_module=True, overwrite_resources={"mine": {"mem_mb": 1}}).rules_read()


def test_the_plain_slurm_executor_is_refused_with_the_name_of_ours() -> None:
    with pytest.raises(UserError, match=r"write `executor: rloo-slurm`.*rloo-slurm-…"):
        controller(executor="slurm").start()


def test_jobs_on_other_machines_get_nothing_of_this_one(monkeypatch) -> None:
    """No controller to end with, no folder for temporary files, no workers."""
    monkeypatch.setattr(module.inputs, "require", lambda _: [])
    monkeypatch.setattr(module.manager, "start", lambda *_: pytest.fail("workers were started"))
    monkeypatch.setattr(module.scratch, "use", lambda _: pytest.fail("TMPDIR was set"))
    monkeypatch.delenv(module.controller_watch.VARIABLE, raising=False)
    slurm = controller(executor="rloo-slurm")
    slurm.runs, slurm._held, slurm._workflow.local_exec = module.RunSet({}), module.locks.Hold(False), False
    slurm._workflow.dag = SimpleNamespace(needrun_jobs=list)
    slurm.start()
    assert module.controller_watch.VARIABLE not in os.environ


def test_an_experiment_knows_the_rounds_that_were_planned_for_a_run_that_a_gate_ended(tmp_path) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(mini(rounds=5)))
    arms = {"plain": {}, "long": {"rounds": 7}}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump({"base": "base.yaml", "arms": arms, "seeds": [0, 1]}))
    write_json(tmp_path / "study" / "long" / "1" / early_stop.STOPPED, {"round": 3})
    study = controller()
    study._results, study._configured = tmp_path, read_runs(tmp_path / "study.yaml")
    study.runs = early_stop.shortened(study._configured, tmp_path)
    study._write_configs()
    written = {file: yaml.safe_load(file.read_text())["rounds"] for file in (tmp_path / "study").rglob("*.yaml")}
    assert [written[tmp_path / "study" / "long" / seed / "config.yaml"] for seed in "01"] == [7, 3]
    assert written[tmp_path / "study" / "experiment.yaml"] == {"plain": 5, "long": 7}
