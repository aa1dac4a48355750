"""Several vLLM engines of one job, each in a process with GPUs of its own (`vllm.data_parallel_size`).

Which engine samples a completion makes no difference, except for rounding on GPUs. So groups are dealt out by the
lengths expected from earlier rounds: the longest first, each to the engine with the fewest tokens so far (Graham 1969,
"Bounds on multiprocessing timing anomalies").
"""

import atexit
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.errors import IncompatibleEngine, UserError
from rloo_pipeline.rollout import engine_process
from rloo_pipeline.rollout.engine_arguments import EngineSettings
from rloo_pipeline.rollout.requests import Completion, Request, SingleTurnRequests
from rloo_pipeline.rollout.sampler import Sampler
from rloo_pipeline.runtime import devices, progress
from rloo_pipeline.runtime.output import write_as_parent
from rloo_pipeline.runtime.progress import announcing, counting
from rloo_pipeline.workers import engine_cache


class ParallelSampler:
    """Like `Sampler`, but for single-turn completions, on several engines."""

    def __init__(self, policy: Policy, engine: EngineSettings, max_model_len: int, seed: int, count: int) -> None:
        """Starts `count` engines at once, each with the policy; the other arguments are the same as for `Sampler`.

        Raises:
            UserError: this job has too few GPUs; or see `Sampler`.
        """
        self.policy, self.digest = policy, policy.digest
        self.engine_seconds = [0.0] * count
        """Wall seconds that each engine took in the last call of `sample`."""
        context = multiprocessing.get_context("spawn")  # a fork could not use CUDA if this process already does
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        atexit.register(self.close)  # runs before multiprocessing waits for its processes
        for gpus in _gpus(count, engine.tensor_parallel_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, gpus, engine_cache.is_enabled()))
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        with announcing(f"starting {count} vLLM engines"):
            self._call("start", policy, engine, max_model_len, seed)
        devices.hold_gpu(self)

    def sample(self, requests: Sequence[Request], label: str) -> list[Completion]:
        """Samples one completion per request, in their order; `label` is the label of the progress lines."""
        parts = dict(zip(self._connections, deal(requests, len(self._connections)), strict=True))
        for connection, part in parts.items():
            _send(connection, "sample", [requests[index] for index in part])
        done: dict[int, Completion] = {}
        working: list[Any] = [*parts]
        with counting(label, len(requests)) as counter:
            while working:
                ready: Any
                for ready in wait(working):
                    answer = _receive(ready)
                    if isinstance(answer, float):
                        self.engine_seconds[self._connections.index(ready)] = answer
                        working.remove(ready)
                    else:
                        index, completion = answer
                        done[parts[ready][index]] = completion
                        counter.advance()
        return [done[index] for index in range(len(requests))]

    @property
    def seconds(self) -> float:
        """Wall seconds of the last call of `sample`."""
        return max(self.engine_seconds)

    def swap(self, policy: Policy, max_model_len: int) -> None:
        """Loads another policy into all engines; see `Sampler.swap`."""
        with announcing(f"loading {policy} into {len(self._connections)} vLLM engines"):
            self._call("swap", policy, max_model_len)
        self.policy, self.digest = policy, policy.digest

    def leave_gpu(self) -> None:
        """Takes all engines off their GPUs; see `Sampler.leave_gpu`."""
        self._call("leave_gpu")

    def close(self) -> None:
        """Ends the engines, even while they sample: vLLM's processes end with their parent."""
        while self._processes:
            process = self._processes.pop()
            process.kill()
            process.join()
            self._connections.pop().close()

    def _call(self, name: str, *arguments: Any) -> None:
        """Calls a method of all engines at once."""
        for connection in self._connections:
            _send(connection, name, *arguments)
        for connection in self._connections:
            _receive(connection)


def deal(requests: Sequence[Request], count: int) -> list[list[int]]:
    """Deals the requests to `count` engines; returns their indices. Neighbours with the same prompt stay together."""
    groups = [list(group) for _, group in groupby(range(len(requests)), lambda index: id(requests[index].prompt_ids))]
    known = [length for request in requests if (length := request.expected) is not None]
    usual = sum(known) / len(known) if known else 1.0

    def tokens(group: list[int]) -> float:
        lengths = (requests[index].expected for index in group)
        return sum(usual if length is None else length for length in lengths)

    dealt: list[list[int]] = [[] for _ in range(count)]
    loads = [0.0] * count
    for group in sorted(groups, key=tokens, reverse=True):
        engine = loads.index(min(loads))
        dealt[engine] += group
        loads[engine] += tokens(group)
    return dealt


def _gpus(count: int, parallel: int) -> Iterator[list[str]]:
    """The GPUs of each engine; without GPUs, empty lists."""
    visible = devices.visible_gpus() if devices.has_gpu() else []
    if visible and len(visible) < count * parallel:
        raise UserError(
            f"vllm.data_parallel_size: {count} engines need {parallel} GPUs each, but this job has {len(visible)} in "
            "all; ask for more (gres in the profile), or lower it"
        )
    return (visible[engine * parallel : (engine + 1) * parallel] for engine in range(count))


KILLED = "an engine's process was killed, probably because memory ran out"


def _send(connection: Connection, name: str, *arguments: Any) -> None:
    """Sends a call to an engine's process."""
    try:
        connection.send((name, *arguments))
    except OSError:
        raise RuntimeError(KILLED) from None


def _receive(connection: Connection) -> Any:
    """An engine's answer; raises its error."""
    try:
        answer = connection.recv()
    except (EOFError, OSError):  # OSError: the process has died with a request unread
        raise RuntimeError(KILLED) from None
    if isinstance(answer, BaseException):
        raise answer
    return answer


class _Sent(SingleTurnRequests):
    """Requests whose completions are sent back as soon as they are sampled."""

    def __init__(self, requests: Sequence[Request], connection: Connection) -> None:
        super().__init__(requests)
        self._connection = connection

    def take(self, index: int, completion: Completion) -> bool:
        """Sends the completion."""
        self._connection.send((index, completion))
        return True


def _serve(connection: Connection, gpus: list[str], warm: bool) -> None:
    """Runs an engine for the process at the other end of the connection, and ends with it."""
    engine_process.end_with_parent()
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    os.environ[progress.STYLE] = "lines"  # the first process shows the bar
    if warm:
        engine_cache.enable()
    sampler: Sampler | None = None
    while True:
        try:
            name, *arguments = connection.recv()
        except EOFError:
            break
        try:
            answer = None
            write_as_parent()
            if sampler is None:
                sampler = Sampler(*arguments)
            elif name == "sample":
                sampler.play(_Sent(arguments[0], connection), "completions")
                answer = sampler.seconds
            else:
                getattr(sampler, name)(*arguments)
            connection.send(answer)
        except (UserError, IncompatibleEngine) as error:
            connection.send(error)
        except Exception as error:  # not every error can be sent
            connection.send(RuntimeError(f"{type(error).__name__}: {error}"))
    os._exit(0)  # vLLM's threads would wait
