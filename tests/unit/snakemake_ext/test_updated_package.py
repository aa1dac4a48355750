"""Finished training does not run again only because this package was updated."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from helpers import mini
from snakemake.jobs import Reason
from snakemake.persistence import ParamsChange
from snakemake.settings.enums import RerunTrigger

from rloo_pipeline.config import Config
from rloo_pipeline.config.run_set import RunSet
from rloo_pipeline.errors import UserError
from rloo_pipeline.snakemake_ext import updated_package
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall

OTHER_KEY = ParamsChange(only_old={repr({"seed": 1})}, only_new={repr({"seed": 2})})
OTHER_CODE = ParamsChange(only_old={repr("abc")}, only_new={repr("abd")})


class Job(NamedTuple):
    """A job as far as the step reads it."""

    rule: Any
    output: tuple[str, ...]

    def __hash__(self) -> int:
        return hash(self.output)


@pytest.fixture
def refuse(tmp_path) -> Callable[..., None]:
    """Takes the step in a call that runs these stages, each for a reason; those that have run before have outputs."""

    def step(
        stages: dict[str, dict[str, Any]], *, edited: bool = False, keys: bool = True, finished: bool = True
    ) -> None:
        reasons, jobs = dict[str, Reason](), list[Job]()
        for stage, reason in stages.items():
            output = tmp_path / stage
            if finished:
                output.touch()
            program = "own" if stage == "own" else "rloo"
            rule = SimpleNamespace(name=stage, shellcmd=f"{program} {stage} --output {{output}}")
            jobs.append(Job(rule, (str(output),)))
            why = Reason()
            for name, value in reason.items():
                setattr(why, name, value)
            reasons[str(output)] = why
        # each stage needs the one before it
        depending = {job: {behind: [SimpleNamespace(is_ancient=False)]} for job, behind in pairwise(jobs)} | {
            jobs[-1]: {}
        }
        dag = SimpleNamespace(needrun_jobs=lambda: jobs, reason=lambda job: reasons[job.output[0]], depending=depending)
        triggers = RerunTrigger.all() if keys else {RerunTrigger.MTIME, RerunTrigger.INPUT}
        call = object.__new__(SnakemakeCall)
        call.workflow, call.results = SimpleNamespace(dag=dag, rerun_triggers=triggers), Path(tmp_path)
        call.runs = RunSet({"mini": Config(**mini())})
        call.functions = SimpleNamespace(edited=["own.py"] if edited else [], keeps=False)
        updated_package.refuse_retraining(call)

    return step


def test_training_again_for_code_is_refused(refuse) -> None:
    with pytest.raises(UserError) as error:
        refuse({"prompts": {"params_changed": OTHER_CODE}, "update": {"_updated_input_run": {"x"}}, "report": {}})
    said = str(error.value)
    assert "/prompts was made, so 3 finished jobs would run again, training among them (prompts, update" in said
    assert (
        "this version, add --rerun-triggers mtime input to this and later calls, or accept it with `rloo adopt`" in said
    )
    assert "to make all of it again, add --forcerun prompts; or" in said


@pytest.mark.parametrize(
    "allowed",
    [
        {"stages": {"report": {"params_changed": OTHER_CODE}}},
        {"stages": {"update": {"params_changed": OTHER_CODE, "forced": True}}},
        {"stages": {"update": {"_missing_output": {"x"}}}},
        {"stages": {"update": {"params_changed": OTHER_CODE}}, "finished": False},
        {"stages": {"update": {"params_changed": OTHER_CODE}}, "edited": True},
        {"stages": {"update": {"input_changed": {"x"}}}},
        {"stages": {"update": {"params_changed": OTHER_KEY}, "report": {"params_changed": OTHER_CODE}}},
        {"stages": {"prompts": {"forced": True}, "update": {"params_changed": OTHER_CODE}}},
        {"stages": {"prompts": {"_updated_input": {"x"}}, "update": {"params_changed": OTHER_CODE}}},
        {"stages": {"own": {"code_changed": True}, "update": {}}},
        {"stages": {"rollout": {"input_changed": {"x"}}, "update": {}}, "keys": False},
    ],
)
def test_what_the_user_asked_for_or_costs_no_training_runs(refuse, allowed) -> None:
    refuse(**allowed)


def test_training_that_another_version_gave_other_inputs_is_accepted_by_adopt(refuse) -> None:
    """What keeps the finished files elsewhere would train it again."""
    with pytest.raises(UserError, match="with this version, accept it with `rloo adopt` and repeat the command; to"):
        refuse({"update": {"input_changed": {"x"}}}, keys=False)
