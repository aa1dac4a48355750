"""Manages policies on the nodes' own disks (`exchange`): the folder there, and the recovery of policies that were lost.

The folder is removed when the controller ends; before that, the controller copies policies that are still needed into
the run's folder. After a kill, the next controller recovers a policy before the first job: it takes it from the trainer
state of its round or, if the state is older, has the rounds since then trained again. Snakemake does not notice, since
a policy's folder stays with its modification times.
"""

import atexit
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts import files, manifest, node_files
from rloo_pipeline.artifacts.model_files import POLICIES, STATE_POLICY, STATES, policy_folder
from rloo_pipeline.before_run import exchange, model_inputs, node_checks
from rloo_pipeline.before_run.memory import RunMemory
from rloo_pipeline.cluster import slurm
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import scratch
from rloo_pipeline.runtime.progress import announcing
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall


def refuse_jobs(call: SnakemakeCall) -> None:
    """Refuses `exchange` on nodes' own disks if stages run as SLURM jobs, where it cannot work.

    Raises:
        UserError: a run uses nodes' own disks, or needs a policy from them.
    """
    if call.workflow.local_exec:
        return
    for config in call.runs.configs.values():
        exchange.refuse(config, 1, as_jobs=True)
    for policy in lost(call.workflow.dag.needrun_jobs()):
        if not node_files.fill(policy):
            raise UserError(
                f"{policy}: its weights were on a node's own disk; continue with `rloo submit` or `rloo run`"
            )


def prepare(call: SnakemakeCall, program: Sequence[str]) -> None:
    """Recovers lost policies before the first job, and creates this node's folder. `program` is as for `restore`."""
    # other nodes of a killed update may have written while its folder was being removed
    for run in call.runs.by_folder:
        files.remove_temporary(call.run_folder(run) / POLICIES, "*")
    restore(lost(call.workflow.dag.needrun_jobs()), call.runs.first.deepspeed.nodes, program)
    if not call.workflow.storage_settings.notemp:
        configs = {call.run_folder(run): config for run, config in call.runs.configs.items()}
        start(configs, slurm.job_nodes() if call.several_nodes else 1)


def lost(jobs: Iterable[Any]) -> list[Path]:
    """The policies that jobs read but do not make, and whose weights are only on nodes."""
    jobs = list(jobs)
    made = {str(file) for job in jobs for file in job.output}
    read = {Path(file) for file in {str(file) for job in jobs for file in job.input} - made}
    return sorted(
        path
        for path in read
        if path.parent.name == POLICIES and path != policy_folder(path.parents[1], 0) and node_files.links(path)
    )


def restore(policies: Iterable[Path], nodes: int, program: Sequence[str]) -> None:
    """Recovers the weights of policies into the run's folder.

    Args:
        policies: folders of the policies, in order.
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
        # outside the image, which has no srun
        command = [*(program if nodes == 1 else (sys.executable, "-m", "rloo_pipeline"))]
        with announcing(f"training {folder} again, whose weights were lost with a node's own disk"):
            outcome = subprocess.run([*command, "restore-policy", "--output", str(folder), f"--log={log}"], check=False)
        if outcome.returncode:
            raise UserError(f"{folder}: its weights were on a node's own disk and could not be made again, see {log}")


def _in_state(policy: Path, state: Path) -> list[Path]:
    """The folder in a trainer state with a policy's weights, if it has them."""
    if not (state / manifest.MANIFEST).exists():
        return []
    written, held = (manifest.read_manifest(folder).digests for folder in (policy, state))
    names = [link.name for link in node_files.links(policy)]
    return [state / STATE_POLICY] if all(held.get(f"{STATE_POLICY}/{name}") == written[name] for name in names) else []


def start(configs: dict[Path, Config], nodes: int) -> None:
    """Creates this node's folder for the policies of runs that use it, and sets RLOO_EXCHANGE.

    Args:
        configs: configurations of the runs, by folder.
        nodes: number of nodes of this job.

    Raises:
        UserError: the folder cannot be used here, or has too little space.
    """
    asking = {run: config for run, config in configs.items() if config.node_folder}
    tops = set(filter(None, (config.node_folder for config in asking.values())))
    for top in tops:
        scratch.remove_abandoned(top)  # frees the space that policies of killed runs take
    for run, config in asking.items():
        exchange.refuse(config, nodes, as_jobs=False)
        found = node_checks.node_folder(config, _policy_bytes(run, config), len(asking))
        if not found.ok:
            raise UserError(found.sentence)
    if len(tops) > 1:
        raise UserError("exchange: the runs of an experiment name several folders; name one")
    for top in tops:
        store = Path(tempfile.mkdtemp(prefix="rloo-exchange-", dir=top))
        scratch.claim(store)
        os.environ[scratch.EXCHANGE] = str(store)
        atexit.register(_end, os.getpid(), list(asking))


def _policy_bytes(run: Path, config: Config) -> float:
    """Bytes of a policy's weights, from policy 0 or the model's config.json; 0 if neither is here yet."""
    if weights := [file.stat().st_size for file in policy_folder(run, 0).glob("*.safetensors")]:
        return sum(weights)
    try:
        return RunMemory(config, model_inputs.shape(config)).policy
    except UserError:
        return 0


def _end(owner: int, runs: Iterable[Path]) -> None:
    """Copies policies that runs still need from this node into their folders, before the node's folder is removed."""
    if os.environ.pop(scratch.EXCHANGE, None) and os.getpid() == owner:
        for policy in _linked(runs):
            with announcing(f"copying {policy} from this node"):
                if not node_files.fill(policy):
                    # Snakemake's logger has already ended
                    print(
                        f"{policy}: its weights are no longer on this node; the next start restores it", file=sys.stderr
                    )


def _linked(runs: Iterable[Path]) -> Iterator[Path]:
    for run in runs:
        yield from (policy for policy in sorted((run / POLICIES).glob("[0-9]*")) if node_files.links(policy))
