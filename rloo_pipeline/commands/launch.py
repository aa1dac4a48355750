"""Starts a run from Python, through Snakemake's API in a child process (`python -m rloo_pipeline.commands.launch`).

Snakemake cannot run its event loop inside that of a notebook, and a notebook should not inherit the settings of the
engines. So Snakemake is a child process and every stage a child of that; the caller of `run` never holds a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_pipeline.errors import UserError

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
    """Starts or continues a run, prints the output of Snakemake, and returns when the run is finished.

    Args:
        config: the YAML file.
        cores: CPU cores for jobs that run at the same time.
        changes: keys to change, as `--config` does: `{"rounds": 20, "rollout": {"shards": 4}}`.
        folder: of the project, with the Snakefile and `results/`.
        dry_run: only print what would run.

    Returns:
        The finished run; None after a dry run.

    Raises:
        UserError: there is no Snakefile or configuration, or a stage failed.
    """
    from rloo_pipeline.config.loading import load
    from rloo_pipeline.report.runs import Run

    project, file = Path(folder).resolve(), Path(config).resolve()
    if not (project / "Snakefile").exists():
        raise UserError(f"{project}: no Snakefile; pass the folder of the project as `folder`")
    name = (changes or {}).get("run") or load(file).run
    call = {"config": str(file), "cores": cores, "changes": dict(changes or {}), "dry_run": dry_run}
    if _run_child(project, call):
        raise UserError(f"{file}: the run failed; see the output of Snakemake above and results/{name}/logs")
    return None if dry_run else Run(project / "results" / name)


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
    profiles/default.

    Returns:
        Whether the run succeeded.
    """
    from snakemake.api import SnakemakeApi
    from snakemake.settings.types import ConfigSettings, DAGSettings, OutputSettings, ResourceSettings

    with SnakemakeApi(OutputSettings(printshellcmds=True, dryrun=dry_run)) as api:
        try:
            workflow = api.workflow(
                resource_settings=ResourceSettings(cores=cores),
                config_settings=ConfigSettings(config=changes, configfiles=[config]),
                snakefile=Path("Snakefile"),
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
