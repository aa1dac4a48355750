"""The engines that a warm worker keeps between stages, each under a key that identifies its content.

A stage outside a worker keeps nothing: `keep` returns False, and the next stage makes its own engine. A kept engine is
always equal to what the files would give, and never the only copy of anything.
"""

from __future__ import annotations

from typing import Any

from rloo_pipeline.errors import IncompatibleEngine
from rloo_pipeline.runtime import devices

_engines: dict[str, tuple[object, Any]] = {}
_enabled = False


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
        Whether it is kept: only a worker keeps engines.
    """
    if _enabled:
        _engines[name] = (key, engine)
    return _enabled


def take(name: str, key: object) -> Any | None:
    """Removes the engine `name` from the cache and returns it; None if it is missing.

    Raises:
        IncompatibleEngine: the engine has another key.
    """
    kept_key, engine = _engines.pop(name, (key, None))
    if kept_key != key:
        raise IncompatibleEngine(f"another {name}")
    return engine


def leave_gpu() -> bool:
    """Moves the kept engines off the GPU for the next stage.

    Returns:
        Whether all could, and are still kept. If one could not, all are dropped.
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
