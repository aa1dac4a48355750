"""Starts a run. `rloo run` replaces its process by `snakemake`; from Python, `run` does the same in a child process.

Snakemake cannot run its event loop inside a notebook's, and a notebook should not inherit the engines' settings. So
Snakemake is a child process, and every stage is a child of Snakemake; the caller of `run` never holds a GPU.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rloo_pipeline.config import Config
from rloo_pipeline.config.loading import is_yaml_name, load, read_changes
from rloo_pipeline.config.run_set import RESULTS
from rloo_pipeline.errors import UserError, did_you_mean
from rloo_pipeline.runtime import caches, installation
from rloo_pipeline.snakemake_ext import failures

if TYPE_CHECKING:
    from rloo_pipeline.report.runs import Run

FILES = ("--configfile", "--configfiles")
CHANGES = ("--config", "-C")
USUAL = ("--cores", "--jobs", "--profile", "--dry-run", "--configfile", "--configfiles", "--config")
"""Options that are not looked up in Snakemake's parser, since importing it takes a second."""


def run(
    config: str | Path,
    cores: int = 1,
    *,
    changes: Mapping[str, Any] | None = None,
    folder: str | Path = ".",
    dry_run: bool = False,
) -> Run | None:
    """Starts or continues a run, prints what `rloo run` prints, and returns when the run is finished.

    Args:
        config: the YAML file; a relative path is looked up in `folder`.
        cores: number of CPU cores that concurrent jobs may use.
        changes: keys to change, as with `--config`: `{"rounds": 20, "rollout": {"shards": 4}}`.
        folder: the project's folder, with `results/` and the project's own Snakefile, if any.
        dry_run: only print what would run.

    Returns:
        The finished run; None after a dry run.

    Raises:
        UserError: the configuration does not exist, or a stage failed.
    """
    from rloo_pipeline.report.runs import Run

    project = Path(folder).resolve()
    file = project / config
    name = (changes or {}).get("run") or load(file).run
    changed = [f"{key}={json.dumps(value)}" for key, value in (changes or {}).items()]
    options = [str(file), *changed, "--cores", str(cores), *(["--dry-run"] if dry_run else [])]
    failed = _run_child(command_line(options, project), project, f"rloo_pipeline.run({str(config)!r}, …)")
    if failed:
        raise UserError(f"{file}: the run failed; see the lines above and results/{name}/logs")
    return None if dry_run else Run(project / "results" / name)


def command_line(arguments: Sequence[str], folder: Path = Path()) -> list[str]:
    """Builds Snakemake's command line for `rloo run [CONFIG] [OPTION …]` in a folder, by default the current one.

    Adds the package's Snakefile if the folder has none, replaces a profile's name by its folder, and uses all cores
    unless an option sets their number.

    Raises:
        UserError: no configuration is named and the folder has none; a change is not KEY=VALUE; a configuration key is
            written as an option; or Snakemake has no such option.
    """
    files, changes, options = _sort(arguments)
    read_changes(changes)
    snakefile = installation.snakefile_option(folder)
    if snakefile and not files and not (folder / installation.DEFAULT_CONFIG).exists():
        raise UserError(f"{installation.DEFAULT_CONFIG}: no such configuration file{installation.NO_PROJECT}")
    for index, (before, word) in enumerate(pairwise(["", *options])):
        if before == "--profile":
            options[index] = installation.profile(word)
        elif word.startswith("--profile="):
            options[index] = f"--profile={installation.profile(word.removeprefix('--profile='))}"
    says_cores = any(re.match(r"--cores|--jobs|--profile|-[cj]\d*$", word) for word in options)
    cores = [] if says_cores else ["--cores", "all"]
    configuration = ["--configfile", *files] if files else []
    configuration += ["--config", *changes] if changes else []
    return [sys.executable, "-m", "snakemake", *snakefile, *cores, *configuration, *options]


def _sort(words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Sorts arguments into configuration files, KEY=VALUE changes, and Snakemake's options with their values and
    targets. Files and changes may be in any position: `my.yaml -n`, `-n my.yaml`, `-n rounds=5`.

    Raises:
        UserError: a configuration key is written as an option, such as --rounds; or Snakemake has no such option.
    """
    files, changes, others, targets = list[str](), list[str](), list[str](), list[str]()
    options = words[: words.index("--")] if "--" in words else words
    option, number = "--configfile", 0  # the last option before the word, and the number of values it has so far
    for word in options:
        if not word.startswith("-"):
            kind = _option_of(word, option, number)
            is_target = kind in FILES and Path(word).parts[:1] == (RESULTS,) and not is_yaml_name(word)
            (targets if is_target else files if kind in FILES else changes if kind in CHANGES else others).append(word)
            number += 1
            continue
        option, _, value = word.partition("=")
        number = int(bool(value))
        key = option.lstrip("-").replace("-", "_")
        if option.startswith("--") and key.partition(".")[0] in Config.model_fields:
            raise UserError(f"{option}: a key of the configuration; write it as --config {key}=VALUE")
        is_value = " " in option  # for argparse, too, as in --apptainer-args "--nv --bind /scratch"
        known = is_value or option in USUAL or not option.startswith("--")
        if not known and not any(one.startswith(option) for one in _all_options()):
            nearest = did_you_mean(key, Config.model_fields, 0.8) or did_you_mean(option, _all_options())
            raise UserError(f"{option}: Snakemake has no such option{nearest}")
        if option in FILES + CHANGES:
            (files if option in FILES else changes).extend([value] if value else [])
        else:
            others.append(word)
    return files, changes, [*others, *(["--", *targets] if targets else []), *words[len(options) + bool(targets) :]]


def _option_of(word: str, option: str, number: int) -> str:
    """The option that a word belongs to, if it follows `option` and `number` of its values."""
    is_change, is_file = re.match(r"[A-Za-z_][\w.-]*=", word), is_yaml_name(word)
    if option in FILES + CHANGES:
        return "--configfile" if is_file else "--config" if is_change else option
    if not (is_file or is_change) or _takes_another_value(option, number):
        return option
    return "--configfile" if is_file else "--config"


def _takes_another_value(option: str, number: int) -> bool:
    """True if a Snakemake option that already has `number` values accepts another one."""
    action = _all_options().get(option)
    return action is not None and (number == 0 if action.nargs is None else action.nargs != 0)


@cache
def _all_options() -> Mapping[str, Any]:
    """Snakemake's options, those of its plugins among them, and argparse's actions for them."""
    from snakemake.cli import get_argument_parser

    return get_argument_parser()._option_string_actions  # type: ignore[no-any-return]


def become_snakemake(arguments: Sequence[str]) -> NoReturn:
    """Replaces this process by Snakemake.

    Args:
        arguments: those of `rloo run`.
    """
    command = command_line(arguments)
    typed = shlex.join(["rloo", "run", *arguments])
    sys.stdout.flush()
    os.execve(command[0], command, caches.for_snakemake() | {failures.COMMAND: typed})


def _run_child(argv: Sequence[str], project: Path, typed: str) -> int:
    """Runs Snakemake in a child process and prints its output as it arrives. Returns its exit status.

    Args:
        argv: its command line.
        project: its working folder.
        typed: the call that continues the run, for messages.
    """
    pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environment = caches.for_snakemake() | {failures.COMMAND: typed}
    with subprocess.Popen(argv, cwd=project, env=environment, text=True, **pipes) as child:
        try:
            _print_output(child)
        except KeyboardInterrupt:
            child.terminate()
            _print_output(child)  # how it ends; a second interrupt does not wait for that
            raise
    return int(child.returncode)


def _print_output(child: subprocess.Popen[str]) -> None:
    for line in child.stdout or ():
        print(line, end="", flush=True)
