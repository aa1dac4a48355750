"""Starts a run: `rloo run`, which becomes `snakemake`, and the same from Python, in a child process.

Snakemake cannot run its event loop inside that of a notebook, and a notebook should not inherit the settings of the
engines. So Snakemake is a child process and every stage a child of that; the caller of `run` never holds a GPU.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import installation
from rloo_pipeline.snakemake_ext import failures

if TYPE_CHECKING:
    from rloo_pipeline.report.runs import Run


def run(
    config: str | Path,
    cores: int = 1,
    *,
    changes: Mapping[str, Any] | None = None,
    folder: str | Path = ".",
    dry_run: bool = False,
) -> Run | None:
    """Starts or continues a run, prints the lines of `rloo run`, and returns when the run is finished.

    Args:
        config: the YAML file.
        cores: CPU cores for jobs that run at the same time.
        changes: keys to change, as `--config` does: `{"rounds": 20, "rollout": {"shards": 4}}`.
        folder: of the project, with `results/` and, if it has one of its own, its Snakefile.
        dry_run: only print what would run.

    Returns:
        The finished run; None after a dry run.

    Raises:
        UserError: there is no such configuration, or a stage failed.
    """
    from rloo_pipeline.config.loading import load
    from rloo_pipeline.report.runs import Run

    project, file = Path(folder).resolve(), Path(config).resolve()
    name = (changes or {}).get("run") or load(file).run
    with tempfile.NamedTemporaryFile("w", suffix=".json") as changed:  # --config would make text of numbers in sections
        json.dump(dict(changes or {}), changed)
        changed.flush()
        files = [str(file), *([changed.name] if changes else [])]
        options = [*files, "--cores", str(cores), *(["--dry-run"] if dry_run else [])]
        failed = _run_child(command_line(options, project), project, f"rloo_pipeline.run({str(config)!r}, …)")
    if failed:
        raise UserError(f"{file}: the run failed; see the lines above and results/{name}/logs")
    return None if dry_run else Run(project / "results" / name)


def command_line(arguments: Sequence[str], folder: Path = Path()) -> list[str]:
    """The command line of Snakemake for `rloo run [CONFIG] [OPTION …]` in a folder, by default this one.

    Adds the Snakefile where the folder has none, the folder of a profile for its name, and all cores where no option
    says how many.

    Raises:
        UserError: no configuration is named, and the folder has none; or `--config` has no KEY=VALUE.
    """
    options, snakefile = list(arguments), installation.snakefile_option(folder)
    if options and not options[0].startswith("-"):
        options.insert(0, "--configfile")
    names_config = any(word.startswith("--configfile") for word in options)
    if snakefile and not names_config and not (folder / installation.DEFAULT_CONFIG).exists():
        raise UserError(f"{installation.DEFAULT_CONFIG}: no such configuration file{installation.NO_PROJECT}")
    for index, (before, word) in enumerate(pairwise(["", *options])):
        if before == "--profile":
            options[index] = installation.profile(word)
        elif word.startswith("--profile="):
            options[index] = f"--profile={installation.profile(word.removeprefix('--profile='))}"
    _refuse_bad_changes(options)
    says_cores = any(re.match(r"--cores|--jobs|--profile|-[cj]\d*$", word) for word in options)
    cores = [] if says_cores else ["--cores", "all"]
    return [sys.executable, "-m", "snakemake", *snakefile, *cores, *options]


def _refuse_bad_changes(options: Sequence[str]) -> None:
    """Checks what follows `--config`, of which Snakemake ends with a traceback."""
    changes = False
    for word in options:
        if word.startswith("-"):
            changes = word in ("--config", "-C")
        elif changes:
            from rloo_pipeline.config.loading import split_change

            split_change(word)


def become_snakemake(arguments: Sequence[str]) -> NoReturn:
    """Replaces this process by Snakemake.

    Args:
        arguments: of `rloo run`.
    """
    command = command_line(arguments)
    os.environ[failures.COMMAND] = shlex.join(["rloo", "run", *arguments])
    sys.stdout.flush()
    os.execv(command[0], command)


def _run_child(argv: Sequence[str], project: Path, typed: str) -> int:
    """Runs Snakemake in a child process and prints its output as it comes. Returns its exit status.

    Args:
        argv: its command line.
        project: its working folder.
        typed: the call that continues the run, for its messages.
    """
    pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environment = os.environ | {failures.COMMAND: typed}
    with subprocess.Popen(argv, cwd=project, env=environment, text=True, **pipes) as child:
        try:
            for line in child.stdout or ():
                print(line, end="", flush=True)
        except KeyboardInterrupt:
            child.terminate()
            raise
    return int(child.returncode)
