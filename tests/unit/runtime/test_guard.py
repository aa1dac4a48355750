"""Another version of a library, or another signature, is one sentence and never a change that does nothing."""

import importlib.metadata
from types import SimpleNamespace

import pytest
from helpers import ROOT

from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import guard, import_shims
from rloo_pipeline.snakemake_ext import ancient_inputs, slurm_executor
from rloo_pipeline.training import deepspeed_config


def test_the_installed_libraries_are_those_that_the_changes_were_made_for() -> None:
    import snakemake.api  # noqa: F401 - snakemake.dag cannot be imported before it
    from snakemake.dag import DAG

    for distribution in guard.PINS:
        guard.require(distribution)
    slurm_executor.check_plugin()
    ancient_inputs.find_all_jobs()
    assert DAG.bfs.__module__ == ancient_inputs.__name__
    changed = DAG.bfs
    ancient_inputs.find_all_jobs()
    assert DAG.bfs is changed, "once in a process"


@pytest.mark.parametrize("distribution", guard.PINS)
def test_the_pinned_lists_have_the_same_versions(distribution) -> None:
    pin = guard.PINS[distribution]
    lists = ["controller.txt"] if pin.requirements == guard.CONTROLLER else ["cpu.txt", "cuda.txt"]
    for name in lists:
        pinned = (ROOT / "requirements" / name).read_text().split()
        assert {f"{library}=={pin.version}" for library in (distribution, pin.alternative)} & set(pinned), name


@pytest.mark.parametrize("distribution", guard.PINS)
def test_another_version_is_refused(distribution, monkeypatch) -> None:
    monkeypatch.setattr(guard, "version", lambda _: "99.0")
    with pytest.raises(
        UserError,
        match=rf"{distribution} 99\.0 is installed.*install {distribution}=={guard.PINS[distribution].version}",
    ):
        guard.require(distribution)


@pytest.mark.parametrize("start", [import_shims.import_vllm, import_shims.import_deepspeed])
def test_engines_of_another_version_are_not_imported(start, monkeypatch) -> None:
    monkeypatch.setattr(guard, "version", lambda _: "99.0")
    monkeypatch.setattr(import_shims, "import_module", None)
    with pytest.raises(UserError, match=r"99\.0 is installed"):
        start()


def test_a_method_with_other_parameters_is_refused(monkeypatch) -> None:
    def run_jobs(self, jobs, more):
        """As a later version might have it."""

    monkeypatch.setattr(slurm_executor.plugin.Executor, "run_jobs", run_jobs)
    with pytest.raises(UserError, match=r"run_jobs takes \(self, jobs, more\), and .* written for \(self, jobs\)"):
        slurm_executor.check_plugin()


def test_a_method_that_is_gone_is_refused(monkeypatch) -> None:
    monkeypatch.delattr(slurm_executor.plugin.Executor, "_submit_job")
    with pytest.raises(UserError, match="_submit_job does not exist"):
        slurm_executor.check_plugin()


def test_a_function_of_a_module_is_named_with_it() -> None:
    with pytest.raises(UserError, match=r"^rloo_pipeline\.runtime\.guard\.missing does not exist"):
        guard.require_callable(guard, "missing", "()")


@pytest.mark.parametrize("name", deepspeed_config.REPLACED)
def test_an_engine_without_what_is_replaced_is_refused(name) -> None:
    class Engine(SimpleNamespace):
        """As a later DeepSpeed might have it."""

    def method(signature: str) -> object:
        return eval(f"lambda {signature.strip('()')}: None")

    for other, signature in deepspeed_config.REPLACED.items():
        if other != name:
            setattr(Engine, other, method(signature))
    with pytest.raises(UserError, match=rf"Engine\.{name} does not exist"):
        deepspeed_config.adjust(Engine(), 1.0, 1, True)


def test_versions_are_read_from_what_is_installed() -> None:
    assert guard.version is importlib.metadata.version
