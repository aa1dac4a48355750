"""The modules of the package import each other without cycles, counting imports inside functions."""

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import rloo_pipeline

PACKAGE = Path(rloo_pipeline.__file__).parent
UNIT = Path(__file__).parent
MODULES = {
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): file
    for file in PACKAGE.rglob("*.py")
}


@functools.cache
def imports(text: str) -> set[str]:
    """Modules of the package that a source text imports, also inside functions."""
    named = set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            named |= inside & MODULES.keys() or {node.module}
    return named & MODULES.keys()


def order(graph: dict[str, set[str]]) -> list[str]:
    """Modules, each after all that it imports."""
    return list(TopologicalSorter(graph).static_order())


def test_the_modules_of_the_package_import_without_a_cycle() -> None:
    graph = {name: imports(file.read_text()) - {name} for name, file in MODULES.items()}
    assert sum(map(len, graph.values())) > len(MODULES), "imports are found"
    modules = order(graph)
    assert modules.index("rloo_pipeline.config.run") < modules.index("rloo_pipeline.cli.main")


def test_no_module_imports_the_package_itself_which_is_above_all() -> None:
    assert [name for name, file in MODULES.items() if rloo_pipeline.__name__ in imports(file.read_text())] == []


def test_a_cycle_would_be_found() -> None:
    def import_line() -> str:
        return "def late():\n    from rloo_pipeline.artifacts import files\n"

    assert imports(import_line()) == {"rloo_pipeline.artifacts.files"}
    with pytest.raises(CycleError):
        order(
            {"rloo_pipeline.artifacts.files": {"rloo_pipeline.errors"}, "rloo_pipeline.errors": imports(import_line())}
        )


LAYERS = [
    *(
        "stages.table",
        "version",
        "errors",
        "frozen_functions",
        "import_string",
        "seeds",
        "runtime",
        "transformers_internals",
        "checks",
        "config",
        "artifacts",
    ),
    *("data", "algorithm", "user_code", "environments", "rewards", "demo"),
    *("workers", "training", "rollout", "judging", "trackers", "report"),
    *("cluster", "before_run", "snakemake_ext", "stages", "commands", "cli", "__main__"),
]
"""The packages, lowest layer first: a package imports only from those before it in this list. The table of stages is
data, for all of them.
"""


def layer_of(module: str) -> int:
    """Position of a module's package in `LAYERS`."""
    name = module.partition(".")[2]
    return LAYERS.index(name if name in LAYERS else name.split(".")[0])


def test_a_package_imports_only_from_packages_below_it() -> None:
    upwards = [
        f"{name} imports {other}"
        for name, file in MODULES.items()
        if name != rloo_pipeline.__name__
        for other in imports(file.read_text())
        if layer_of(other) > layer_of(name)
    ]
    assert upwards == []


def test_the_command_line_and_the_controller_import_nothing_that_stages_alone_have() -> None:
    """A login node may have the light controller, requirements/controller.txt."""
    texts = [(PACKAGE.parent / "requirements" / name).read_text() for name in ("stages.in", "controller.txt")]
    stages, controller = ({*re.findall(r"^[a-z][\w-]*", text, re.MULTILINE)} for text in texts)
    missing = {"torch", "vllm", *(name.replace("-", "_") for name in stages - controller)}
    assert "pyarrow" in missing
    commands = [name for name in MODULES if name.startswith("rloo_pipeline.cli.")]
    modules = ", ".join([*commands, "rloo_pipeline.snakemake_ext.controller"])
    code = f"import sys; sys.modules.update(dict.fromkeys({sorted(missing)})); import {modules}"
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr


def test_every_package_has_a_layer() -> None:
    packages = {name.split(".")[1] for name in MODULES if name != rloo_pipeline.__name__}
    assert packages == set(LAYERS) - {"stages.table"}


def test_unit_tests_have_the_folders_of_the_package() -> None:
    folders = {path.parent.relative_to(UNIT).as_posix() for path in UNIT.rglob("test_*.py")} - {"."}
    packages = {path.parent.relative_to(PACKAGE).as_posix() for path in MODULES.values()}
    assert folders <= packages


def test_no_two_modules_or_classes_share_a_name() -> None:
    names = [file.stem for file in MODULES.values() if file.stem != "__init__"]
    for file in MODULES.values():
        names += [node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)]
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_no_package_holds_more_than_a_sixth_of_the_code() -> None:
    lines = Counter[str]()
    for name, file in MODULES.items():
        lines[".".join(name.split(".")[:2])] += len(file.read_text().splitlines())
    [(largest, size)] = lines.most_common(1)
    assert size < lines.total() / 6, largest


@pytest.mark.parametrize("stage", ["rollout", "score", "reference", "update"])
def test_a_stage_of_a_round_fits_in_one_look(stage: str) -> None:
    assert len(MODULES[f"rloo_pipeline.stages.{stage}"].read_text().splitlines()) < 130
