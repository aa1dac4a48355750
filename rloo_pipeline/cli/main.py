"""The command `rloo`: parses the arguments, calls the command's function, and turns errors into one line."""

import argparse
import logging
import sys
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

from rloo_pipeline.artifacts import fence
from rloo_pipeline.cli import after_run, before_run, during_run, stages
from rloo_pipeline.cli.command import Command, RlooParser, call, option
from rloo_pipeline.cluster import nodes
from rloo_pipeline.errors import UserError, explain
from rloo_pipeline.report import origin
from rloo_pipeline.runtime import cost, environment, output, progress, ranks
from rloo_pipeline.workers import client


def _worker(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.cluster import node_ranks
    from rloo_pipeline.workers import kept_ranks, server

    if not arguments.rank:
        warm = arguments.socket, arguments.controller, arguments.preload, arguments.after
        server.serve(main, _import_engine, *warm)
    elif arguments.socket:
        kept_ranks.serve(partial(server.status_of, main), arguments.socket, arguments.controller)
    else:
        node_ranks.serve(partial(server.status_of, main))


def _import_engine(role: str) -> None:
    """Imports in advance what the first stage of a warm worker in this role needs."""
    if role == "sampler":
        from rloo_pipeline.rollout import vllm_internals

        vllm_internals.import_engine()
    else:
        from rloo_pipeline.training import engine

        engine.import_libraries()


WORKER = Command(  # without --log, since the stages that it runs have their own logs
    "worker",
    _worker,
    "Run stages for a Snakemake process on this machine, which starts its workers itself.",
    (
        option("--socket", type=Path, help="socket to listen on, in a private folder"),
        option("--controller", type=int, help="process id of that Snakemake process; the worker ends with it"),
        option(
            "--rank",
            action="store_true",
            help="serve as a rank of the worker with this socket and --controller; without them, requests come on "
            "standard input",
        ),
        option("--preload", type=int, metavar="THREADS", help="import the role's engine before its first stage"),
        option("--after", metavar="ROLE", help="with --preload, wait for the first stage of this role"),
    ),
)
STAGES = "stages, which Snakemake runs (the command of any job can be pasted into a shell)"


HOST = Command(
    "worker-host",
    lambda arguments: call("rloo_pipeline.cluster.node_workers:host", (), arguments, arguments.plan),
    "Start workers on a node of a SLURM job, for the Snakemake process that calls this.",
    (option("plan", help="what to start, in JSON"),),
)


CALL_MODEL = Command(
    client.CALL_MODEL,
    lambda arguments: call(
        "rloo_pipeline.workers.kept_models:answer", (), arguments, arguments.output, arguments.calls
    ),
    "Call a reward model that a worker keeps, for a stage that runs elsewhere.",
    (
        option("--output", type=Path, help="folder of the run"),
        option("--only", metavar="NAME", help="the reward, if it runs alone"),
        option("--calls", type=Path, help="the calls; their results replace them"),
    ),
)
GROUPS = {
    "before a run": before_run.COMMANDS,
    "during a run": during_run.COMMANDS,
    "after a run": after_run.COMMANDS,
    STAGES: (*stages.COMMANDS, WORKER, HOST, CALL_MODEL),
}
"""Headings in `rloo --help`, and the commands under each."""
WRITERS = ("rescore", *(command.name for command in stages.COMMANDS))
"""Commands whose files name the version that wrote them."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command.

    Args:
        argv: the command's arguments; by default those of this process.

    Raises:
        SystemExit: with status 1 after an error, which is printed on one line, or 2 after wrong arguments.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse(argv)
    arguments.argv = argv
    nodes.take_rank()
    try:
        environment.prepare(arguments.log)
        if argv[0] in WRITERS:
            origin.note_commit()  # for a command that Snakemake has not started
        arguments.command(arguments)
        fence.release(done=True)
        cost.end()
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, BrokenPipeError) and not output.has_reader():
            raise
        hint = ""
        if logging.getLogger().handlers:  # there is a log, and it could be opened
            logging.getLogger("traceback").error("traceback of the error:", exc_info=error)
            if arguments.log and not isinstance(error, UserError):
                hint = f" (the traceback is in {arguments.log})"
        ranks.tell_launcher(explain(error))
        progress.fail(f"rloo {argv[0]}: error: {explain(error)}{hint}")
        raise SystemExit(1) from None
    finally:
        fence.release()


@cache
def parser() -> RlooParser:
    """The parser for all commands. Cached, because a worker process parses one command after another."""
    return RlooParser(GROUPS)
