"""Starts a run from Python, through Snakemake's API in a process of its own, `python -m rloo_pipeline.commands.launch`.

A notebook has an event loop, which Snakemake's own cannot run inside of, and should keep no setting of the engines. So
the controller is a child, and every stage a child of that: what calls `run` never holds a GPU.
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
    """Runs a configuration to its end, or goes on where it stopped, and prints what Snakemake says.

    Args:
        config: the YAML file.
        cores: jobs side by side.
        changes: keys to change, as `--config` does: `{"rounds": 20, "rollout": {"shards": 4}}`.
        folder: where the Snakefile is and `results/` comes to lie.
        dry_run: only say what would run.

    Returns:
        The finished run; None after a dry run.

    Raises:
        UserError: there is no Snakefile or configuration, or a stage failed: its last words are printed.
    """
    from rloo_pipeline.config.loading import load
    from rloo_pipeline.report.runs import Run

    place, file = Path(folder).resolve(), Path(config).resolve()
    if not (place / "Snakefile").exists():
        raise UserError(f"{place}: no Snakefile; name the folder of the project with `folder`")
    name = (changes or {}).get("run") or load(file).run
    asked = {"config": str(file), "cores": cores, "changes": dict(changes or {}), "dry_run": dry_run}
    command = [sys.executable, "-m", "rloo_pipeline.commands.launch", json.dumps(asked)]
    said = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=place, stdin=subprocess.DEVNULL, **said) as child:  # type: ignore[call-overload]
        try:
            for line in child.stdout:
                print(line, end="", flush=True)
        except KeyboardInterrupt:
            child.terminate()
            raise
    if child.returncode:
        raise UserError(
            f"{file}: the run did not end well; what Snakemake said of it is above, more is in results/{name}/logs"
        )
    return None if dry_run else Run(place / "results" / name)


def through_snakemake(config: Path, cores: int, changes: Mapping[str, Any], dry_run: bool) -> bool:
    """What `snakemake --cores CORES --configfile CONFIG` does in this folder, with the options of profiles/default.

    Returns:
        Whether all went well.
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
    asked = json.loads(sys.argv[1])
    done = through_snakemake(Path(asked["config"]), asked["cores"], asked["changes"], asked["dry_run"])
    raise SystemExit(0 if done else 1)
