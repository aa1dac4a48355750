"""Every test file is run by some command, and the end of a run says what was skipped and which command runs it."""

from _pytest.pathlib import fnmatch_ex
from helpers import ROOT
from skipped_tests import GSM8K, LONG, lines


def test_skipped_tests_are_counted_by_reason_and_one_command_installs_what_is_missing() -> None:
    sandbox = "no sandbox for the code of completions (bubblewrap is not installed; Apptainer is not installed)"
    assert lines({sandbox: 64, "chromium is not installed": 5, LONG: 9, GSM8K: 3}) == [
        f"64 skipped: {sandbox}",
        "5 skipped: chromium is not installed",
        "9 skipped: takes long",
        "3 skipped: GSM8K is not here",
        "to run them: apt-get install bubblewrap chromium",
        "to run them: GSM8K=FOLDER make test (a folder with train.jsonl and test.jsonl)",
        "to run them: make test-all",
    ]


def test_a_reason_that_no_package_removes_has_no_command() -> None:
    reason = "no user namespaces, so no small file system can be mounted"
    assert lines({reason: 1}) == [f"1 skipped: {reason}"]
    assert lines({}) == []


def test_of_the_folders_of_tests_pytest_passes_over_that_of_the_cluster_alone(pytestconfig) -> None:
    folders, patterns = {file.parent for file in ROOT.glob("tests/**/test_*.py")}, pytestconfig.getini("norecursedirs")
    left_out = {folder for folder in folders if any(fnmatch_ex(pattern, folder) for pattern in patterns)}
    assert left_out == {ROOT / "tests" / "cluster"}
