"""The command line that `rloo run` becomes, and that a run from Python starts."""

import os
from argparse import Namespace
from pathlib import Path

import forks
import pytest
import yaml
from helpers import ROOT, mini

from rloo_pipeline.cli import during_run
from rloo_pipeline.commands import launch
from rloo_pipeline.commands.launch import command_line
from rloo_pipeline.config.loading import load, read_changes
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import installation
from rloo_pipeline.snakemake_ext import failures


def configuration() -> None:
    """The file that is run where none is named."""
    installation.DEFAULT_CONFIG.parent.mkdir()
    installation.DEFAULT_CONFIG.touch()


ALL = ("--cores", "all")


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], ["--cores", "all"]),
        (["a.yaml", "-n"], ["--cores", "all", "--configfile", "a.yaml", "-n"]),
        (["-c2", "--", "results/x/prompts"], ["-c2", "--", "results/x/prompts"]),
        (["a.yaml", "--profile", "mine"], ["--configfile", "a.yaml", "--profile", "mine"]),
        (["-n", "a.yaml", "x=1"], ["--cores", "all", "--configfile", "a.yaml", "--config", "x=1", "-n"]),
        (["-n", "--config", "x=1", "a.yaml"], ["--cores", "all", "--configfile", "a.yaml", "--config", "x=1", "-n"]),
        (["results/x/report.html"], ["--cores", "all", "--", "results/x/report.html"]),
        (["a.yaml", "results/x/a", "-n", "--", "b"], [*ALL, "--configfile", "a.yaml", "-n", "--", "results/x/a", "b"]),
        (["results/x/config.yaml", "-n"], ["--cores", "all", "--configfile", "results/x/config.yaml", "-n"]),
        (["-R", "x=1", "-c", "2", "y=1"], ["--config", "y=1", "-R", "x=1", "-c", "2"]),
        (["--config=x=1", "-n", "--", "y=1"], ["--cores", "all", "--config", "x=1", "-n", "--", "y=1"]),
    ],
)
def test_a_configuration_and_changes_may_stand_anywhere_and_all_cores_are_the_default(
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
    with pytest.raises(UserError, match=r"no such configuration file in this folder; .* `rloo init`"):
        load(installation.DEFAULT_CONFIG)
    configuration()
    assert command_line(["--profile=slurm"])[-1] == f"--profile={installation.root() / 'profiles' / 'slurm'}"
    assert command_line(["--profile", "slurm"])[-1] == str(installation.root() / "profiles" / "slurm")
    (tmp_path / "profiles" / "slurm").mkdir(parents=True)
    assert command_line(["--profile", "slurm"])[-1] == "profiles/slurm"


def test_an_unknown_option_gives_a_one_line_error_with_the_nearest(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    configuration()
    with pytest.raises(UserError, match=r"^--jobz: Snakemake has no such option; did you mean '--jobs'\?$"):
        command_line(["--jobz", "2"])
    with pytest.raises(UserError, match=r"^--slurm-qoz: Snakemake has no such option; did you mean '--slurm-qos'\?$"):
        command_line(["--slurm-qoz=x"])
    with pytest.raises(UserError, match=r"^--round: Snakemake has no such option; did you mean 'rounds'\?$"):
        command_line(["--round", "5"])
    with pytest.raises(UserError, match=r"^--rollout.shards: a key of the configuration; write it as --config rollout"):
        command_line(["--rollout.shards=4"])
    assert command_line(["--apptainer-args", "--nv --bind /x"])[-2:] == ["--apptainer-args", "--nv --bind /x"]
    assert command_line(["--dry", "--keep-going"])[-2:] == ["--dry", "--keep-going"], "argparse completes names"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("update.lora.r=4", "write a key of a section as --config 'update={lora: {r: 4}}'"),
        ("rounds", "--config rounds: write it as KEY=VALUE, such as rounds=20"),
    ],
)
def test_a_change_that_snakemake_would_refuse_with_a_traceback_gives_a_one_line_error(
    change, message, tmp_path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(mini()))
    for refuses in (
        lambda: command_line([str(file), "-n", "--config", "rounds=3", change]),
        lambda: load(file, [change]),
    ):
        with pytest.raises(UserError) as error:
            refuses()
        assert message in str(error.value)
    command_line([str(file), "--config", "rounds=3", "--", "results/mini/report.html"])


def test_a_key_as_an_option_is_told_how_to_write_it() -> None:
    with pytest.raises(UserError, match=r"^--rounds: a key of the configuration; write it as --config rounds=VALUE$"):
        command_line(["mine.yaml", "--rounds", "5"])


def test_a_run_from_python_is_that_command_so_that_it_too_goes_on_after_a_gate(tmp_path, monkeypatch) -> None:
    """early_stop.py repeats the command line of Snakemake. Changes keep their types."""
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(mini()))
    changes = {"rounds": 1, "warmstart": {"sft": None}}
    commands = []

    def run_child(argv: list[str], folder: Path, _: str) -> int:
        commands.append((argv, folder))
        return 0

    monkeypatch.setattr(launch, "_run_child", run_child)
    assert launch.run(file, 2, changes=changes, folder=tmp_path, dry_run=True) is None
    [(argv, folder)] = commands
    changed = argv[argv.index("--config") + 1 : argv.index("--config") + 3]
    assert read_changes(changed) == changes
    words = ["--snakefile", str(installation.root() / "Snakefile"), "--configfile", str(file), "--config", *changed]
    assert argv[1:] == ["-m", "snakemake", *words, "--cores", "2", "--dry-run"]
    assert folder == tmp_path


def test_a_configuration_beside_one_file_of_functions_is_enough(tmp_path, monkeypatch) -> None:
    """`rloo run my-run.yaml` in a folder with nothing else."""
    mine = mini(rewards=[{"function": "mine.py:right"}])
    own = {part: {"generator": "mine.py:rows"} for part in ("train", "eval")}
    keys = {"dataset": own, "evaluation": {}, "correct": {"reward": "right"}}
    (tmp_path / "my-run.yaml").write_text(yaml.safe_dump({**mine, **keys}))
    (tmp_path / "mine.py").write_text(
        "def rows(): return [{'prompt': '1+1', 'answer': '2'}]\n"
        "def right(completions, answer, **kwargs): return [0.0 for _ in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # for its plugins
    outcome = forks.run("snakemake", command_line(["my-run.yaml", "-n"])[3:], environment, tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    assert "rollout ×4" in outcome.stdout + outcome.stderr


def test_snakemake_gets_a_cache_that_it_can_write_to(monkeypatch) -> None:
    """It fails with a traceback else, as where HOME is read-only on a node."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    started = []
    monkeypatch.setattr(launch.os, "execve", lambda *call: started.append(call))
    launch.become_snakemake(["my-run.yaml"])
    [(_, command, environment)] = started
    assert command[1:3] == ["-m", "snakemake"]
    assert os.access(Path(environment["XDG_CACHE_HOME"]).parent, os.W_OK)
    assert environment[failures.COMMAND] == "rloo run my-run.yaml"


def test_why_asks_about_targets_too(monkeypatch) -> None:
    """`rloo why my-run.yaml -- FILE`: what follows `--` is a target."""
    started = []
    monkeypatch.setattr(launch.os, "execve", lambda *call: started.append(call))
    [why] = [command for command in during_run.COMMANDS if command.name == "why"]
    for words in (["my-run.yaml"], ["my-run.yaml", "--", "results/x/assets"]):
        why.run(Namespace(unparsed=words))
        command = started.pop()[1]
        assert [word for word in command if word == "--dry-run" or word in words[1:]] == ["--dry-run", *words[1:]]
