"""What a worker keeps from one stage to the next: an engine with its weights, under a key that says which.

A stage that runs by itself keeps nothing: there `keep` forgets at once, and whoever asks makes the thing anew. A kept
thing is only ever an equal of what the files would give, never the only copy of anything.

A stage may also say what other workers will be asked about next (`announce`): they do ahead what they can of it, some
of it a step at a time (`meanwhile`), and have it ready for a stage that asks for just that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rloo_pipeline import runtime

Tell = Callable[[str, Mapping[str, str], int | None, Sequence[int]], object]
"""Passes on what is announced."""
Own = Callable[[int], Sequence[int]]
"""Of so many shards, those about which this worker is asked first."""

_things: dict[str, tuple[object, Any]] = {}
_waiting: list[Callable[[], object]] = []
_steps: list[Callable[[], bool]] = []
_tell: Tell | None = None
_own: Own = range
_on = False


class Unfit(BaseException):
    """What this worker keeps is not what the stage needs, and a process holds one engine in its life: the stage is for
    another process. No error of the stage, hence no Exception.
    """


def start(tell: Tell | None, own: Own = range) -> None:
    """From now on this process is a worker, which passes on by `tell` what is announced, and has its `own` shards; one
    alone has all.
    """
    global _on, _tell, _own
    _on, _tell, _own = True, tell, own


def is_on() -> bool:
    """Whether this process is a worker."""
    return _on


def leave_gpu() -> bool:
    """Has what is kept leave the GPU to the next stage; whether it is still kept. What cannot leave is thrown away, and
    all else with it.
    """
    try:
        runtime.free_gpu()
    except (Unfit, Exception) as why:
        import gc

        print(f"does not leave the GPU: {why}; this worker starts anew", flush=True)

        import torch

        _things.clear()
        gc.collect()
        torch.cuda.empty_cache()
        return False
    return True


def keep(name: str, key: object, thing: Any) -> bool:
    """Keeps `thing` for a later stage that asks for `name` with an equal key; says whether it does."""
    if _on:
        _things[name] = (key, thing)
    return _on


def take(name: str, key: object) -> Any | None:
    """What is kept under this name, None where nothing is; it is no longer kept then.

    Raises:
        Unfit: it is kept under another key.
    """
    known, thing = _things.pop(name, (key, None))
    if known != key:
        raise Unfit(f"another {name}")
    return thing


def look(name: str) -> tuple[Any, Any] | None:
    """Key and thing that are kept under this name, and go on being so."""
    return _things.get(name)


def own_shards(count: int) -> Sequence[int]:
    """Of so many shards, those about which this worker is asked first."""
    return _own(count)


def announce(role: str, ahead: Mapping[str, str], shard: int | None = None, files: Sequence[int] = ()) -> None:
    """Tells workers of a role what they are likely to be asked about next.

    Args:
        role: theirs.
        ahead: what it is.
        shard: of what is told, for the one worker that is asked first about this shard; None for all.
        files: descriptors of open files that go along.
    """
    if _tell is not None:
        _tell(role, ahead, shard, files)


def meanwhile(step: Callable[[], bool]) -> None:
    """Has a worker do a step at a time, until a stage asks it for something or a step says that it was the last."""
    runtime.begin_ahead()
    _steps[:] = [step]


def go_on() -> bool:
    """Does a step of what is to be done meanwhile; whether there is more of it."""
    if _steps and not _steps[0]():
        _steps.clear()
    return bool(_steps)


def afterwards(work: Callable[[], object]) -> None:
    """Has a worker do this, in place of what was left for afterwards before, when it has nothing else to do; a stage
    that runs by itself leaves it out.
    """
    if _on:
        _waiting[:] = [work]


def catch_up() -> None:
    """Does what was left for afterwards."""
    while _waiting:
        _waiting.pop()()
