"""Another version of a library, or another signature, is one sentence and never a change that does nothing."""

import importlib.metadata

import pytest

from rloo_pipeline.errors import UserError
from rloo_pipeline.snakemake_ext import ancient_inputs, guard, slurm_executor


def test_the_installed_libraries_are_those_that_the_changes_were_made_for() -> None:
    import snakemake.api  # noqa: F401 - snakemake.dag cannot be imported before it
    from snakemake.dag import DAG

    for distribution in guard.MADE_FOR:
        guard.require(distribution)
    slurm_executor.check_plugin()
    ancient_inputs.find_all_jobs()
    assert DAG.bfs.__module__ == ancient_inputs.__name__
    changed = DAG.bfs
    ancient_inputs.find_all_jobs()
    assert DAG.bfs is changed, "once in a process"


def test_the_pinned_list_has_the_same_versions() -> None:
    from helpers import ROOT

    pinned = (ROOT / "requirements" / "controller.txt").read_text().split()
    assert {f"{name}=={version}" for name, version in guard.MADE_FOR.items()} <= set(pinned)


@pytest.mark.parametrize("distribution", guard.MADE_FOR)
def test_another_version_is_refused(distribution, monkeypatch) -> None:
    monkeypatch.setattr(guard, "version", lambda _: "99.0")
    with pytest.raises(
        UserError, match=rf"{distribution} 99\.0 is installed.*install {distribution}=={guard.MADE_FOR[distribution]}"
    ):
        guard.require(distribution)


def test_a_method_with_other_parameters_is_refused(monkeypatch) -> None:
    def run_jobs(self, jobs, more):
        """As a later version might have it."""

    monkeypatch.setattr(slurm_executor.plugin.Executor, "run_jobs", run_jobs)
    with pytest.raises(UserError, match=r"run_jobs takes \(self, jobs, more\) here and \(self, jobs\) in the version"):
        slurm_executor.check_plugin()


def test_a_method_that_is_gone_is_refused(monkeypatch) -> None:
    monkeypatch.delattr(slurm_executor.plugin.Executor, "_submit_job")
    with pytest.raises(UserError, match="_submit_job is gone"):
        slurm_executor.check_plugin()


def test_versions_are_asked_of_what_is_installed() -> None:
    assert guard.version is importlib.metadata.version
