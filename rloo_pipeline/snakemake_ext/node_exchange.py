"""Policies on the nodes' own disks (`exchange`): the controller's folder there, and policies that a run needs from it.

The folder ends with the controller. At its end the controller copies the policies that are still needed into the run's
folder. After a kill, the next one takes a policy from the trainer state of its round or, where that is older, has its
rounds trained again, before the first job. Snakemake sees none of this: a policy's folder stays, with its times.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts import files, manifest, node_files
from rloo_pipeline.artifacts.model_files import POLICIES, STATE_POLICY, STATES
from rloo_pipeline.before_run import exchange, model_inputs, places
from rloo_pipeline.before_run.memory import RunMemory
from rloo_pipeline.cluster import slurm
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import scratch
from rloo_pipeline.runtime.progress import announcing
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall


def refuse_jobs(call: SnakemakeCall) -> None:
    """Refuses to run stages as SLURM jobs, where the nodes' own disks are of no use."""
    if not call.workflow.local_exec:
        on_nodes = lost(call.workflow.dag.needrun_jobs())
        refuse(call.runs.configs.values(), (policy for policy in on_nodes if not node_files.fill(policy)))


def prepare(call: SnakemakeCall, program: Sequence[str]) -> None:
    """Brings lost policies back before the first job, and makes this node's folder; `program` as for `restore`."""
    for run in call.runs.by_folder:  # a killed update's other nodes may have written while its folder was removed
        files.remove_temporary(call.run_folder(run) / POLICIES, "*")
    restore(lost(call.workflow.dag.needrun_jobs()), call.runs.first.deepspeed.nodes, program)
    if not call.workflow.storage_settings.notemp:
        configs = {call.run_folder(run): config for run, config in call.runs.configs.items()}
        start(configs, slurm.job_nodes() if call.several_nodes else 1)


def lost(jobs: Iterable[Any]) -> list[Path]:
    """The policies that jobs read, that none of them makes, and whose weights are only on nodes."""
    jobs = list(jobs)
    made = {str(file) for job in jobs for file in job.output}
    read = {Path(file) for file in {str(file) for job in jobs for file in job.input} - made}
    return sorted(path for path in read if path.parent.name == POLICIES and int(path.name) and node_files.links(path))


def restore(policies: Iterable[Path], nodes: int, program: Sequence[str]) -> None:
    """Brings the weights of policies back into the run's folder.

    Args:
        policies: their folders, in order.
        nodes: number of nodes of an update.
        program: command that runs `rloo`, for example in an image.

    Raises:
        UserError: training their rounds again failed.
    """
    for folder in policies:
        run = folder.parent.parent
        if node_files.fill(folder, *_in_state(folder, run / STATES / folder.name)):
            continue
        log = run / "logs" / "restore" / f"{folder.name}.log"
        command = [*(program if nodes == 1 else (sys.executable, "-m", "rloo_pipeline"))]  # srun is not in the image
        with announcing(f"training {folder} again, whose weights were lost with a node's own disk"):
            outcome = subprocess.run([*command, "restore-policy", "--output", str(folder), f"--log={log}"], check=False)
        if outcome.returncode:
            raise UserError(f"{folder}: its weights were on a node's own disk and could not be made again, see {log}")


def _in_state(policy: Path, state: Path) -> list[Path]:
    """The folder in a trainer state that has a policy's weights, if they are there."""
    if not (state / manifest.MANIFEST).exists():
        return []
    written, held = (manifest.read_manifest(folder).digests for folder in (policy, state))
    names = [link.name for link in node_files.links(policy)]
    return [state / STATE_POLICY] if all(held.get(f"{STATE_POLICY}/{name}") == written[name] for name in names) else []


def refuse(configs: Iterable[Config], policies: Iterable[Path]) -> None:
    """Refuses to run stages as SLURM jobs, where the nodes' own disks are of no use.

    Raises:
        UserError: a run asks for them, or needs a policy from them.
    """
    for config in configs:
        exchange.refuse(config, 1, as_jobs=True)
    for folder in policies:
        raise UserError(f"{folder}: its weights were on a node's own disk; continue with `rloo submit` or `rloo run`")


def start(configs: dict[Path, Config], nodes: int) -> None:
    """Makes the folder on this node for the policies of runs that ask for it, and sets RLOO_EXCHANGE.

    Args:
        configs: the configurations of the runs, by their folders.
        nodes: number of nodes of this job.

    Raises:
        UserError: it cannot be used here, or has no room.
    """
    asking = {run: config for run, config in configs.items() if config.node_folder}
    tops = set(filter(None, (config.node_folder for config in asking.values())))
    for top in tops:
        scratch.remove_abandoned(top)  # policies of a killed run would take the room
    for run, config in asking.items():
        exchange.refuse(config, nodes, as_jobs=False)
        found = places.node_folder(config, _bytes(run, config), len(asking))
        if not found.ok:
            raise UserError(found.sentence)
    if len(tops) > 1:
        raise UserError("exchange: the runs of an experiment name several folders; name one")
    for top in tops:
        store = Path(tempfile.mkdtemp(prefix="rloo-exchange-", dir=top))
        scratch.claim(store)
        os.environ[scratch.EXCHANGE] = str(store)
        atexit.register(_end, os.getpid(), list(asking))


def _bytes(run: Path, config: Config) -> float:
    """Bytes of a policy's weights, by policy 0 or the model's config.json; 0 if neither is here yet."""
    if weights := [file.stat().st_size for file in (run / POLICIES / f"{0:05d}").glob("*.safetensors")]:
        return sum(weights)
    try:
        return RunMemory(config, model_inputs.shape(config)).policy
    except UserError:
        return 0


def _end(owner: int, runs: Iterable[Path]) -> None:
    """Copies policies that runs still have on this node into their folders, before the node's folder is removed."""
    if os.environ.pop(scratch.EXCHANGE, None) and os.getpid() == owner:
        for policy in _linked(runs):
            with announcing(f"copying {policy} from this node"):
                if not node_files.fill(policy):
                    # Snakemake's logger has ended by now
                    print(
                        f"{policy}: its weights are no longer on this node; the next start restores it", file=sys.stderr
                    )


def _linked(runs: Iterable[Path]) -> Iterator[Path]:
    for run in runs:
        yield from (policy for policy in sorted((run / POLICIES).glob("[0-9]*")) if node_files.links(policy))
