"""The command line that `rloo run` becomes."""

import pytest

from rloo_pipeline.commands.launch import command_line
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import installation


def configuration() -> None:
    """The file that is run where none is named."""
    installation.DEFAULT_CONFIG.parent.mkdir()
    installation.DEFAULT_CONFIG.touch()


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], ["--cores", "all"]),
        (["a.yaml", "-n"], ["--cores", "all", "--configfile", "a.yaml", "-n"]),
        (["-c2", "--", "results/x/prompts"], ["-c2", "--", "results/x/prompts"]),
        (["a.yaml", "--profile", "mine"], ["--configfile", "a.yaml", "--profile", "mine"]),
    ],
)
def test_a_configuration_may_come_first_and_all_cores_are_the_default(
    arguments, options, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    configuration()
    assert command_line(arguments)[3:] == ["--snakefile", str(installation.root() / "Snakefile"), *options]
    (tmp_path / "Snakefile").touch()
    assert command_line(arguments)[3:] == options


def test_a_profile_is_that_of_the_folder_or_of_the_package(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no such configuration file in this folder; .* `rloo init`"):
        command_line(["-n"])
    configuration()
    assert command_line(["--profile", "slurm"])[-1] == str(installation.root() / "profiles" / "slurm")
    (tmp_path / "profiles" / "slurm").mkdir(parents=True)
    assert command_line(["--profile", "slurm"])[-1] == "profiles/slurm"
