"""The engines that a warm worker keeps between stages, each under a key that identifies its content.

A stage outside a worker keeps nothing: `keep` returns False, and the next stage makes its own engine. A kept engine is
always equal to what the files would give, and never the only copy of anything. So a worker writes a trainer's state
only after it has answered, during the next rollouts, and rarely enough that this takes at most `SHARE` of the time.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts import files
from rloo_pipeline.errors import IncompatibleEngine
from rloo_pipeline.runtime import devices

SHARE = 0.05
"""Largest share of the time that a worker may spend on writing what `write_later` was given."""

_engines: dict[str, tuple[object, Any]] = {}
_enabled = False
_pending: tuple[Callable[[Path], None], Path] | None = None
_wrote, _seconds = 0.0, 0.0
"""When the last writing ended (by `time.monotonic`), and how long it took."""


def enable() -> None:
    """Makes this process a worker, which keeps engines."""
    global _enabled
    _enabled = True


def is_enabled() -> bool:
    """True if this process is a worker."""
    return _enabled


def keep(name: str, key: object, engine: Any) -> bool:
    """Keeps `engine` for the next stage that takes `name` with an equal key.

    Returns:
        True if it is kept: only a worker keeps engines.
    """
    if _enabled:
        _engines[name] = (key, engine)
    return _enabled


def holds_engine() -> bool:
    """True if an engine is kept."""
    return bool(_engines)


def take(name: str, key: object) -> Any | None:
    """Removes the engine `name` from the cache and returns it; None if it is missing.

    Raises:
        IncompatibleEngine: the engine has a different key.
    """
    kept_key, engine = _engines.pop(name, (key, None))
    if kept_key != key:
        raise IncompatibleEngine(f"another {name}")
    return engine


def write_later(write: Callable[[Path], None], target: Path) -> None:
    """Makes `write_pending` call `write` with `target`, a folder that is complete or absent."""
    global _pending
    _pending = write, target


def write_pending() -> None:
    """Writes what the last stage has left to write, if it is due. A failure only costs time later."""
    global _pending, _wrote, _seconds
    if _pending is None:
        return
    began, (_, target) = time.monotonic(), _pending
    if not _wrote or _seconds <= SHARE * (began - _wrote):
        try:
            write_now()
            _wrote = time.monotonic()
            _seconds = _wrote - began
            print(f"wrote {target} in {_seconds:.1f} s", flush=True)
        except Exception as error:
            print(f"{target} was not written: {error}", flush=True)
    _pending = None


def write_now() -> None:
    """Writes what the last stage has left to write. A rank calls it when its worker tells it to."""
    global _pending
    if _pending is not None:
        write, target = _pending
        write(target)
    _pending = None


def target() -> Path | None:
    """The folder that `write_pending` would write."""
    return None if _pending is None else _pending[1]


def forget_pending() -> None:
    """Drops what earlier stages have left to write."""
    global _pending
    _pending = None


def abandon() -> None:
    """Removes a half-written target when the process ends."""
    if _pending is not None:
        files.remove_temporary(_pending[1].parent, _pending[1].name)


def leave_gpu() -> bool:
    """Moves the kept engines off the GPU for the next stage.

    Returns:
        True if all could leave, and are still kept. If one could not, all are dropped.
    """
    try:
        devices.free_gpu()
    except (IncompatibleEngine, Exception) as error:
        import gc

        import torch

        print(f"an engine stays on the GPU ({error}), so this worker restarts", flush=True)
        _engines.clear()
        gc.collect()
        torch.cuda.empty_cache()
        return False
    return True
