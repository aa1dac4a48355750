"""The files, names and tests in docs/internals.md exist."""

import re

from helpers import ROOT

from rloo_pipeline.runtime import guard

ROWS = [
    line.split(" | ") for line in (ROOT / "docs" / "internals.md").read_text().splitlines() if line.startswith("| `")
]
TESTS = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))


def test_every_file_and_name_in_the_table_exists() -> None:
    assert len(ROWS) > 20, "rows are found"
    for row in ROWS:
        path, *names = re.findall("`([^`]+)`", row[0])
        text = (ROOT / "rloo_pipeline" / path).read_text()
        for name in names:
            assert re.search(rf"^(def|class|    def) {name}\b", text, re.MULTILINE), (path, name)


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
