"""The process that runs vLLM's engine: one of its own on GPUs, this one on CPUs.

In its own process the engine starts its next step while this process prepares requests and reads completions. By
default, vLLM sends each sampled token to this process, with three arrays for its log-prob, which takes most of the CPU
time. So our scheduler keeps the tokens of a request until it is finished: one output per completion. It still answers
after each step, so that the answers of tools are not kept waiting.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from importlib import import_module
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_pipeline.rollout import vllm_internals
from rloo_pipeline.rollout.vllm_internals import SWITCH, is_separate
from rloo_pipeline.runtime import devices, scratch
from rloo_pipeline.runtime.output import write_as_parent

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.engine import EngineCoreOutput

SEPARATE_ON_CPUS = False
"""Gives the engine a process of its own on CPUs too, without the replacements of `vllm_internals`; only for tests."""
_folder: Path | None = None
"""Folder of the sockets to the engine's process, and of LAST_WORDS."""
LAST_WORDS = "error"
"""File with the error that ended the engine's process, or that kept one of its workers from starting."""
LONGEST = 50
"""Longest path, in characters, for the folder of the sockets; Linux allows 107 for the path of a socket."""
SECONDS = 10.0
"""Longest wait for LAST_WORDS after vLLM has noticed that the process ends."""


scratch.hold()  # before a spawned process imports torch and vLLM, which it does before it calls `run`


def prepare() -> dict[str, Any]:
    """Sets the environment variables of an engine, before it starts; returns its settings.

    On GPUs the user's value of SWITCH wins. The sockets are in a folder that only the user can enter, since
    anyone who can write to them can run code: weights are reloaded by functions that are sent to the engine.
    """
    global _folder
    if devices.device_type() == "cuda":
        os.environ.setdefault(SWITCH, "1")
    else:
        os.environ[SWITCH] = str(int(SEPARATE_ON_CPUS))
    if _folder is not None:
        (_folder / LAST_WORDS).unlink(missing_ok=True)
    if is_separate() and _folder is None:
        top = tempfile.gettempdir()
        _folder = Path(tempfile.mkdtemp(prefix="rloo-", dir=top if len(top) < LONGEST else "/tmp"))
        scratch.claim(_folder)
        # a forked process would hold the sockets of `gpu_claims`, and could not use CUDA if this one already does
        os.environ |= {"VLLM_RPC_BASE_PATH": str(_folder), "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        os.environ |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        process: Any = import_module("vllm.v1.engine.core").EngineCoreProc
        process.run_engine_core = staticmethod(Spawned(run))
    _accept_scheduler()
    return {"scheduler_cls": f"{__name__}.{scheduler.__name__}"}


class Spawned:
    """A function that vLLM calls in a process of its own, with vLLM imported as in this one: else the arguments that
    are sent to the process would import it, and all that `import_vllm` hides from it.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *arguments: Any, **options: Any) -> None:
        """Calls the function."""
        self._function(*arguments, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        """Sends the import with the function, which is read before the arguments."""
        return _after_imports, (self._function,)


def _after_imports(function: Callable[..., None]) -> Callable[..., None]:
    vllm_internals.import_vllm()
    return function


def run(*arguments: Any, **options: Any) -> None:
    """Runs vLLM's engine process so that it ends with its parent and writes an error that ends it to LAST_WORDS."""
    end_with_parent()
    process: Any = import_module("vllm.v1.engine.core").EngineCoreProc
    _accept_scheduler()
    _worker_class().worker_main = staticmethod(Spawned(run_worker))
    process.follow_output = _follow_output
    with _last_words():
        process.run_engine_core(*arguments, **options)


def run_worker(*arguments: Any, **options: Any) -> None:
    """Runs one of the vLLM workers that share an engine, and records the error if it does not start.

    vLLM itself tells the engine only that a worker did not start, not why.
    """
    worker = _worker_class()
    start = worker.__init__

    def start_or_tell(self: Any, *sizes: Any, **names: Any) -> None:
        with _last_words():
            start(self, *sizes, **names)

    worker.__init__ = start_or_tell
    worker.worker_main(*arguments, **options)


def _worker_class() -> Any:
    return import_module("vllm.v1.executor.multiproc_executor").WorkerProc


@contextmanager
def _last_words() -> Iterator[None]:
    """Writes an error that ends the block to LAST_WORDS, unless an earlier one is there, which is the cause."""
    try:
        yield
    except Exception as error:
        with suppress(FileExistsError), Path(os.environ["VLLM_RPC_BASE_PATH"], LAST_WORDS).open("x") as file:
            file.write(f"{type(error).__name__}: {error}")
        raise


def end_calls_with_engine(llm: LLM) -> None:
    """Makes calls of an engine raise an error if its process is killed; vLLM would wait forever for the answers."""
    if not is_separate():
        return
    core: Any = llm.llm_engine.engine_core
    resources, calls = core.resources, core.utility_results  # `core` itself would never be collected
    processes = [process.sentinel for process in resources.engine_manager.processes]
    dead: Any = import_module("vllm.v1.engine.exceptions").EngineDeadError

    def wait() -> None:
        connection.wait(processes)
        while not resources.engine_dead:  # then vLLM refuses further calls
            time.sleep(0.05)
        for call in [*calls.values()]:
            call.set_exception(dead())

    threading.Thread(target=wait, daemon=True).start()


def follow_output(llm: LLM) -> None:
    """Makes the processes of an engine write where this process writes now: into the log of the stage that they serve
    next, not of the one that started them.
    """
    if is_separate():
        core: Any = llm.llm_engine.engine_core
        core.call_utility("follow_output")


def _follow_output(core: Any) -> None:
    """The method of vLLM's engine process that `follow_output` calls."""
    write_as_parent()
    core.collective_rpc(_worker_follows_output)  # a worker may be this process, too


def _worker_follows_output(_: Any) -> None:
    write_as_parent()


def _accept_scheduler() -> None:
    """Keeps vLLM from warning about the scheduler in this process."""
    logging.getLogger("vllm.config.scheduler").setLevel(logging.ERROR)


@contextmanager
def errors_told() -> Iterator[None]:
    """Runs a block that uses an engine. If an error ended the engine's process, raises one with that error's message.

    Raises:
        RuntimeError: the engine's process has ended with an error.
    """
    try:
        yield
    except Exception as error:
        if _folder is None:
            raise
        file, until = _folder / LAST_WORDS, time.monotonic() + SECONDS
        while type(error).__name__ == "EngineDeadError" and not file.exists() and time.monotonic() < until:
            time.sleep(0.05)
        if not file.exists():
            raise
        raise RuntimeError(f"vLLM's engine failed: {file.read_text()}") from error


@contextmanager
def frozen() -> Iterator[None]:
    """Runs a block in which the garbage collector ignores all existing objects: scanning them took half the CPU time.

    If the engine is in this process, vLLM does this itself.
    """
    if not is_separate():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def scheduler(*arguments: Any, vllm_config: Any, **options: Any) -> Any:
    """Creates vLLM's scheduler, changed to output whole completions. Called in the engine's process."""
    plain = copy(vllm_config.scheduler_config)
    plain.scheduler_cls = None
    kind: Any = plain.get_scheduler_cls()

    class WholeCompletions(kind):  # type: ignore[misc]  # a class that vLLM chooses
        """Returns the outputs of a request when it is finished."""

        kept: dict[str, KeptTokens]

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            """As vLLM's, but withholds outputs of unfinished requests whose tokens nobody reads one by one."""
            of_clients = super().update_from_output(scheduler_output, model_runner_output)
            for outputs in of_clients.values():
                outputs.outputs = [each for each in outputs.outputs if self._is_whole(each)]
            return of_clients

        def _is_whole(self, output: EngineCoreOutput) -> bool:
            kept = self.kept.get(output.request_id)
            if output.finish_reason is not None:
                if kept is not None:
                    del self.kept[output.request_id]
                    kept.add(output)
                    kept.join(output)
                return True
            if kept is None:
                params = self.requests[output.request_id].sampling_params
                if params is None or params.detokenize or params.logprobs != 0 or params.prompt_logprobs is not None:
                    return True
                kept = self.kept[output.request_id] = KeptTokens(output)
            kept.add(output)
            return False

    made = WholeCompletions(*arguments, vllm_config=vllm_config, **options)
    made.kept = {}
    return made


class KeptTokens:
    """The outputs of an unfinished request."""

    __slots__ = ("experts", "ids", "logps", "prefill")

    def __init__(self, first: EngineCoreOutput) -> None:
        """Keeps the fields that only the first output has."""
        self.ids: list[int] = []
        self.logps: list[float] = []
        self.experts: list[Any] = []
        self.prefill = first.prefill_stats

    def add(self, output: EngineCoreOutput) -> None:
        """Appends the tokens of an output with their log-probs and experts."""
        self.ids += output.new_token_ids
        if output.new_logprobs is not None:
            self.logps += output.new_logprobs.logprobs[:, 0].tolist()
        if output.routed_experts is not None:  # a part of an array of the whole step, in pinned memory
            self.experts.append(output.routed_experts.copy())

    def join(self, last: EngineCoreOutput) -> None:
        """Merges everything kept so far into the last output."""
        import numpy as np
        from vllm.v1.outputs import LogprobsLists

        ids, logps = np.array(self.ids, np.int32)[:, None], np.array(self.logps, np.float32)[:, None]
        last.new_token_ids = self.ids
        last.new_logprobs = LogprobsLists(ids, logps, np.zeros(len(ids), np.int32))
        last.prefill_stats = self.prefill
        if self.experts:
            last.routed_experts = np.concatenate(self.experts)


def end_with_parent() -> None:
    """Kills this process when its parent ends or replaces itself for any reason; vLLM does not."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
