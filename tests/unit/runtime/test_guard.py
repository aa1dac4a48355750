"""Another version of a library, or another signature, is one sentence and never a change that does nothing."""

import csv
import importlib.metadata
import re
from types import ModuleType

import forks
import pytest
from helpers import ROOT

from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout import vllm_internals
from rloo_pipeline.runtime import guard
from rloo_pipeline.snakemake_ext import planning, slurm_executor
from rloo_pipeline.training.deepspeed_internals import deepspeed_config
from rloo_pipeline.transformers_internals import optional_parts


def test_the_installed_libraries_are_those_that_the_changes_were_made_for() -> None:
    import snakemake.api  # noqa: F401 - snakemake.dag cannot be imported before it
    from snakemake.dag import DAG

    for distribution in filter(guard.is_installed, guard.PINS):
        guard.require(distribution)
    planning.find_all_jobs()
    assert DAG.bfs.__module__ == planning.__name__
    changed = DAG.bfs
    planning.find_all_jobs()
    assert DAG.bfs is changed, "once in a process"


@pytest.mark.parametrize("distribution", guard.PINS)
def test_the_pinned_lists_have_the_same_versions(distribution) -> None:
    names = {distribution, guard.BUILDS.get(distribution)}
    for name in re.findall(r"\w+\.txt", guard.LISTS.get(distribution, guard.STAGES)):
        pinned = (ROOT / "requirements" / name).read_text().split()
        assert {f"{library}=={guard.PINS[distribution]}" for library in names} & set(pinned), name


@pytest.mark.parametrize("distribution", guard.PINS)
def test_another_version_is_refused(distribution, monkeypatch) -> None:
    monkeypatch.setattr(guard, "version", lambda _: "99.0")
    with pytest.raises(
        UserError,
        match=rf"{distribution} 99\.0 is installed.*install {distribution}=={guard.PINS[distribution]}",
    ):
        guard.require(distribution)


@pytest.mark.parametrize(
    ("module", "start"),
    [
        (vllm_internals, vllm_internals.import_vllm),
        (deepspeed_config, deepspeed_config.import_deepspeed),
        (optional_parts, optional_parts.prepare_transformers),
    ],
)
def test_engines_of_another_version_are_not_imported(module, start, monkeypatch) -> None:
    monkeypatch.setattr(guard, "version", lambda _: "99.0")
    monkeypatch.setattr(module, "import_module", None)
    with pytest.raises(UserError, match=r"99\.0 is installed"):
        start()


def patch_release(monkeypatch, **changed) -> None:
    """Makes the SLURM plugin a patch release of the pinned one in which some methods of its executor are others."""
    major, minor, _ = guard.PINS["snakemake-executor-plugin-slurm"].split(".")
    monkeypatch.setattr(guard, "version", lambda _: f"{major}.{minor}.99")
    for name, method in changed.items():
        monkeypatch.setattr(slurm_executor.plugin.Executor, name, method)
    guard.changes.cache_clear()


def test_a_patch_release_in_which_all_that_is_used_is_the_same_is_taken(monkeypatch) -> None:
    patch_release(monkeypatch)
    guard.require("snakemake-executor-plugin-slurm")


def test_a_patch_release_with_other_parameters_is_refused_by_their_name(monkeypatch) -> None:
    patch_release(monkeypatch, run_jobs=lambda self, jobs, more: None)
    with pytest.raises(
        UserError, match=r"\.99 is installed.*Executor\.run_jobs takes \(self, jobs, more\) instead of \(self, jobs\)"
    ):
        guard.require("snakemake-executor-plugin-slurm")


def test_a_patch_release_without_a_method_is_refused_by_its_name(monkeypatch) -> None:
    patch_release(monkeypatch)
    monkeypatch.delattr(slurm_executor.plugin.Executor, "_submit_job")
    with pytest.raises(UserError, match=r"where .*Executor\._submit_job does not exist, but rloo_pipeline uses"):
        guard.require("snakemake-executor-plugin-slurm")


def test_a_name_or_a_module_that_is_gone_is_a_change(tmp_path, monkeypatch) -> None:
    rows = ["pathlib,Path.absolute,(self)", "pathlib,Gone.name,()", "no_such_module,name,()"]
    lines = ["distribution,module,name,parameters", *(f"patchlib,{row}" for row in rows)]
    (tmp_path / "used.csv").write_text("\n".join(lines))
    monkeypatch.setattr(guard, "USED", tmp_path / "used.csv")
    expected = ("pathlib.Gone.name does not exist", "no_such_module cannot be imported")
    assert guard.changes("patchlib") == expected


def test_the_installed_libraries_have_all_that_is_used() -> None:
    assert forks.call(changes_of_all) == ()


def changes_of_all() -> tuple[str, ...]:
    """In a process of its own, since other tests replace some of it."""
    with guard.USED.open() as file:
        assert {row["distribution"] for row in csv.DictReader(file)} == guard.PINS.keys()
    return tuple(change for name in filter(guard.is_installed, guard.PINS) for change in guard.changes(name))


@pytest.fixture
def upgrade(monkeypatch) -> ModuleType:
    """tools/upgrade.py."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("upgrade")


@pytest.mark.parametrize(
    ("installed", "refused"), [("pinned", False), ("patch", False), ("99.0", True), ("without a method", True)]
)
def test_an_upgrade_is_told_whether_stages_take_the_newer_release(
    upgrade, monkeypatch, capsys, installed, refused
) -> None:
    patch_release(monkeypatch)
    plugin = guard.PINS["snakemake-executor-plugin-slurm"]
    monkeypatch.setattr(guard, "PINS", {"snakemake-executor-plugin-slurm": plugin})
    if installed in ("pinned", "99.0"):
        monkeypatch.setattr(guard, "version", lambda _: plugin if installed == "pinned" else installed)
    if installed == "without a method":
        monkeypatch.delattr(slurm_executor.plugin.Executor, "_submit_job")
    with pytest.raises(SystemExit) as end:
        upgrade.main()
    assert end.value.code == refused
    output = capsys.readouterr().out
    assert (f"; stages refuse it while {plugin} is pinned\n" in output) == refused
    assert ("docs/internals.md says how" in output) == refused


def test_an_upgrade_is_told_what_another_library_asks_for(upgrade, monkeypatch) -> None:
    asked = ["transformers<5.20,>=5.16", "torch==5.24.0+cpu", "deepspeed<1; python_version < '3'", "numpy<1"]
    monkeypatch.setattr(upgrade, "requires", lambda _: asked)
    monkeypatch.setattr(upgrade, "version", lambda _: "5.24.0")
    assert [*upgrade.unmet("vllm")] == ["asks for transformers<5.20,>=5.16, but 5.24.0 is installed"]


def test_versions_are_read_from_what_is_installed() -> None:
    assert guard.version is importlib.metadata.version
