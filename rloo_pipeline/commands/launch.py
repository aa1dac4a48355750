"""Starts a run: `rloo run`, which becomes `snakemake`; and from Python, through Snakemake's API in a child process
(`python -m rloo_pipeline.commands.launch`).

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
from collections.abc import Mapping, Sequence
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
    call = {"config": str(file), "cores": cores, "changes": dict(changes or {}), "dry_run": dry_run}
    if _run_child(project, call):
        raise UserError(f"{file}: the run failed; see the lines above and results/{name}/logs")
    return None if dry_run else Run(project / "results" / name)


def command_line(arguments: Sequence[str]) -> list[str]:
    """The command line of Snakemake for `rloo run [CONFIG] [OPTION …]` in this folder.

    Adds the Snakefile where the folder has none, the folder of a profile for its name, and all cores where no option
    says how many.

    Raises:
        UserError: no configuration is named, and the folder has none.
    """
    options, snakefile = list(arguments), installation.snakefile_option(Path())
    if options and not options[0].startswith("-"):
        options.insert(0, "--configfile")
    names_config = any(word.startswith("--configfile") for word in options)
    if snakefile and not names_config and not installation.DEFAULT_CONFIG.exists():
        raise UserError(
            f"{installation.DEFAULT_CONFIG}: no such configuration file in this folder; name one, as in `rloo run "
            "my-run.yaml`, or make a project with `rloo init`"
        )
    for index, word in enumerate(options[1:], 1):
        if options[index - 1] == "--profile":
            options[index] = installation.profile(word)
    says_cores = any(re.match(r"--cores|--jobs|--profile|-[cj]\d*$", word) for word in options)
    cores = [] if says_cores else ["--cores", "all"]
    return [sys.executable, "-m", "snakemake", *snakefile, *cores, *options]


def become_snakemake(arguments: Sequence[str]) -> NoReturn:
    """Replaces this process by Snakemake.

    Args:
        arguments: of `rloo run`.
    """
    command = command_line(arguments)
    os.environ[failures.COMMAND] = shlex.join(["rloo", "run", *arguments])
    sys.stdout.flush()
    os.execv(command[0], command)


def _run_child(project: Path, call: Mapping[str, Any]) -> int:
    """Calls `run_snakemake` in a child process and prints its output as it comes. Returns its exit status."""
    argv = [sys.executable, "-m", "rloo_pipeline.commands.launch", json.dumps(call)]
    pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(argv, cwd=project, text=True, **pipes) as child:
        try:
            for line in child.stdout or ():
                print(line, end="", flush=True)
        except KeyboardInterrupt:
            child.terminate()
            raise
    return int(child.returncode)


def run_snakemake(config: Path, cores: int, changes: Mapping[str, Any], dry_run: bool) -> bool:
    """Does what `snakemake --cores CORES --configfile CONFIG` does in this folder, with the options of
    profiles/default, to which the logger belongs.

    Returns:
        Whether the run succeeded.
    """
    from snakemake.api import SnakemakeApi
    from snakemake.settings.types import ConfigSettings, DAGSettings, OutputSettings, ResourceSettings

    from rloo_pipeline.snakemake_ext.logger import LogHandlerSettings

    plain = os.environ.get("SNAKEMAKE_LOGGER_RLOO_PLAIN", "").lower() == "true"
    logger = {"rloo": LogHandlerSettings(plain=plain)}
    with SnakemakeApi(OutputSettings(printshellcmds=True, dryrun=dry_run, log_handler_settings=logger)) as api:
        try:
            workflow = api.workflow(
                resource_settings=ResourceSettings(cores=cores),
                config_settings=ConfigSettings(config=changes, configfiles=[config]),
                snakefile=installation.snakefile(Path()),
            )
            dag = workflow.dag(dag_settings=DAGSettings(force_incomplete=True))
            dag.execute_workflow(executor="dryrun" if dry_run else "local")
        except Exception as error:
            api.print_exception(error)
            return False
    return True


if __name__ == "__main__":
    call = json.loads(sys.argv[1])
    succeeded = run_snakemake(Path(call["config"]), call["cores"], call["changes"], call["dry_run"])
    raise SystemExit(0 if succeeded else 1)
