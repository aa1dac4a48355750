"""The lines at the end of a test run about skipped tests and the commands that run them."""

from collections.abc import Mapping

LONG = "takes long"
ENVIRONMENTS = "build/environments is not there"
GSM8K = "GSM8K is not here"
EVERY_FAMILY = "every family of models takes half an hour"
EVERY_KIND = "every kind of model takes ten minutes"
PACKAGES = {f"{name} is not installed": name for name in ("bubblewrap", "chromium", "g++")}
"""Debian packages, by the reason for which a test is skipped without them."""
COMMANDS = {
    GSM8K: "GSM8K=FOLDER make test (a folder with train.jsonl and test.jsonl)",
    EVERY_FAMILY: "EVERY_FAMILY=1 make test PYTEST_ARGS=tests/families/test_every_family.py",
    EVERY_KIND: "EVERY_KIND=1 make test PYTEST_ARGS=tests/stages/test_model_kinds.py",
    ENVIRONMENTS: "make environments, then make test PYTEST_ARGS=tests/unit/environments",
    LONG: "make test-all",
}


def lines(skipped: Mapping[str, int]) -> list[str]:
    """The lines for the numbers of skipped tests by reason."""
    lines = [f"{count} skipped: {reason}" for reason, count in skipped.items()]
    missing = [package for text, package in PACKAGES.items() if any(text in reason for reason in skipped)]
    commands = [f"apt-get install {' '.join(missing)}"] if missing else []
    commands += [command for text, command in COMMANDS.items() if any(text in reason for reason in skipped)]
    return lines + [f"to run them: {command}" for command in commands]
