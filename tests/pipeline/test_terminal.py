"""What `snakemake` prints through the logger plugin that profiles/default asks for."""

import re

import forks
import pytest
import yaml
from helpers import Project, mini

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Project:
    return Project(tmp_path_factory.mktemp("terminal") / "project")


def printed(project: Project, *argv: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a call."""
    outcome = forks.run("snakemake", argv, project.environment, project.folder)
    return outcome.returncode, outcome.stdout, outcome.stderr


def test_a_dry_run_says_in_words_what_would_run(finished) -> None:
    outcome = finished.snakemake("-n", plain=False, report={"title": "Another"})
    assert outcome.returncode == 0, outcome.stderr
    assert "\n1 job would run:\n  report.title: A run through every stage → Another: 1 job (report)\n" in outcome.stdout
    assert re.search(r"^About 0:00:\d\d of work \(0\.\d\d hours\), judging by similar", outcome.stdout, re.MULTILINE)
    assert len(outcome.stdout) < 1000


def test_a_finished_run_needs_nothing(finished) -> None:
    outcome = finished.snakemake("--cores", "1", plain=False)
    assert "Nothing to be done" in outcome.stderr
    assert "Building DAG" not in outcome.stderr
    log = re.search(r"^Snakemake's log: (.*)$", outcome.stderr, re.MULTILINE)
    assert "Building DAG of jobs" in (finished.folder / log[1]).read_text()


WRONG = {
    "broken.yaml": ("run: mini\nrounds: [2\nseed: 1\n", "broken.yaml, line 3: not valid YAML: did not find"),
    "key.yaml": (yaml.safe_dump(mini() | {"round": 2}), "key.yaml: unknown key 'round'; did you mean 'rounds'"),
}
"""A file that Snakemake could not read, and one that it could."""


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_configuration_file_gives_a_one_line_error(name, project) -> None:
    text, sentence = WRONG[name]
    (project.folder / name).write_text(text)
    status, out, err = printed(project, "-n", "--configfile", name)
    assert status == 1
    line = [line for line in (out + err).splitlines() if not line.startswith("Using workflow specific profile")]
    assert len(line) == 1, line
    assert line[0].startswith("Error: ")
    assert sentence in line[0]


def test_errors_of_snakemake_come_out_in_full(project) -> None:
    project.configure()
    status, out, err = printed(project, "-n", "--configfile", "config/test.yaml", "--", "results/mini/nothing")
    assert status == 1
    assert "MissingRuleException" in out + err
    assert "No rule to produce results/mini/nothing" in out + err


def test_an_option_restores_snakemakes_own_output(project) -> None:
    project.configure()
    argv = ("-n", "--configfile", "config/test.yaml", "--", "results/mini/prompts")
    for option in ("--logger-rloo-plain", "--verbose"):
        out = printed(project, option, *argv)[1]
        assert "    output: results/mini/prompts" in out, option
        assert "would run" not in out
