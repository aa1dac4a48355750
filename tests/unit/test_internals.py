"""The files, names and tests in tools/internals.csv exist, and the page has them."""

import ast
import functools
import re
import runpy

import pytest
from helpers import ROOT

from rloo_pipeline.runtime import guard

PAGE = runpy.run_path(str(ROOT / "tools" / "internals_page.py"))
ROWS = [list(row.values()) for row in PAGE["rows"]()]
TESTS = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))


def test_every_file_and_name_in_the_table_exists() -> None:
    assert len(ROWS) > 20, "rows are found"
    for row in ROWS:
        path, *names = re.findall("`([^`]+)`", row[0])
        text = (ROOT / "rloo_pipeline" / path).read_text()
        for name in names:
            assert re.search(rf"^(def|class|    def) {name}\b", text, re.MULTILINE), (path, name)


def test_the_page_has_these_rows() -> None:
    assert PAGE["PAGE"].read_text() == PAGE["page"](), "run `make reference`"


def test_every_guard_exists() -> None:
    package = ROOT / "rloo_pipeline"
    for row in ROWS:
        for name in re.findall("`([^`]+)`", row[3]):
            if name.startswith("test_"):
                assert f"def {name}(" in TESTS, name
            elif name.startswith("guard."):
                assert hasattr(guard, name.partition(".")[2]), name
            elif "/" in name:
                assert (ROOT / name).exists() or (package / name).exists(), name
            else:
                module, _, function = name.partition(".")
                [file] = package.rglob(f"{module}.py")
                assert f"def {function}(" in file.read_text(), name


ROOMS = {
    "vllm": {"rollout"},
    "deepspeed": {"training/deepspeed_internals"},
    "transformers.": {"transformers_internals"},
    "liger_kernel": {"training/faster_kernels.py"},
    "lm_eval": {"rollout/lm_eval_model.py", "stages/harness.py"},
    "snakemake": {
        "snakemake_ext",
        "before_run/sbatch_options.py",
        "before_run/slurm_checks.py",
        "cluster/profiles.py",
        "commands/launch.py",
        "runtime/guard.py",
    },
    "snakemake_executor_plugin_slurm": {"before_run/sbatch_options.py", "snakemake_ext"},
}
"""Where the modules of a library may be imported, so that a new release of it is the work of one room. Of transformers
these are the modules below the first, which have no stable names.
"""
UNCALLED = {"transformers": {"_weight_conversions", "all_tied_weights_keys"}}
"""Attributes of objects of a library that are no functions, so that used_internals.csv cannot list them."""


@functools.cache
def imported(text: str) -> set[str]:
    """Libraries that a source text imports, also inside functions and by name; not those that only types need."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    names = list[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names.append(
                node.args[0].value if isinstance(node.args[0], ast.Constant) else ast.unparse(node.args[0])[2:]
            )
    return {name.partition(".")[0] for name in names} | {f"{name.partition('.')[0]}." for name in names if "." in name}


@pytest.mark.parametrize("library", ROOMS)
def test_a_library_is_imported_in_its_room_alone(library) -> None:
    package = ROOT / "rloo_pipeline"
    files = [file.relative_to(package) for file in package.rglob("*.py") if library in imported(file.read_text())]
    assert files, "imports are found"
    outside = [str(file) for file in files if not {str(file), *map(str, file.parents)} & ROOMS[library]]
    assert outside == []


@pytest.mark.parametrize("library", ["deepspeed", "transformers", "vllm"])
def test_what_is_used_inside_a_library_is_named_in_its_room_alone(library) -> None:
    """That is where its guard is; words that other code has too, such as `load`, are left out."""
    package, rooms = ROOT / "rloo_pipeline", ROOMS.get(library) or ROOMS[f"{library}."]
    last = {row["name"].rpartition(".")[2] for row in guard.used(library)}
    names = {name for name in last if "_" in name or name != name.lower()} | UNCALLED.get(library, set())
    pattern = re.compile(rf"\b({'|'.join(names)})\b")
    named = {file.relative_to(package): pattern.findall(file.read_text()) for file in package.rglob("*.py")}
    assert {name for found in named.values() for name in found} == names
    outside = [str(file) for file, found in named.items() if found and not {str(file), *map(str, file.parents)} & rooms]
    assert outside == []


def test_an_import_outside_of_a_room_would_be_found() -> None:
    late = (
        'def f():\n    from vllm import LLM\n    import_module("deepspeed.zero")\n    import_module(f"lm_eval.{x}")\n'
    )
    assert imported(f"if TYPE_CHECKING:\n    import snakemake\n{late}") == {
        *("vllm", "deepspeed", "deepspeed.", "lm_eval", "lm_eval."),
    }
