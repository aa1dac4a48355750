"""What a warm worker keeps from one stage to the next: an engine with its weights, under a key that says which.

A stage that runs by itself keeps nothing: there `keep` forgets at once, and whoever asks makes the engine anew. A kept
engine is only ever an equal of what the files would give, never the only copy of anything.
"""

from __future__ import annotations

from typing import Any

from rloo_pipeline.errors import IncompatibleEngine
from rloo_pipeline.runtime import devices

_engines: dict[str, tuple[object, Any]] = {}
_on = False


def start() -> None:
    """From now on this process is a worker."""
    global _on
    _on = True


def is_on() -> bool:
    """Whether this process is a worker."""
    return _on


def keep(name: str, key: object, engine: Any) -> bool:
    """Keeps `engine` for a later stage that asks for `name` with an equal key.

    Returns:
        Whether it is kept: only a worker keeps anything.
    """
    if _on:
        _engines[name] = (key, engine)
    return _on


def take(name: str, key: object) -> Any | None:
    """The engine that is kept under this name, None where there is none; it is no longer kept then.

    Raises:
        IncompatibleEngine: it is kept under another key.
    """
    kept_key, engine = _engines.pop(name, (key, None))
    if kept_key != key:
        raise IncompatibleEngine(f"another {name}")
    return engine


def leave_gpu() -> bool:
    """Has the kept engines leave the GPU to the next stage.

    Returns:
        Whether they could, and are still kept; if one could not, all are dropped.
    """
    try:
        devices.free_gpu()
    except (IncompatibleEngine, Exception) as why:
        import gc

        import torch

        print(f"does not leave the GPU: {why}; this worker starts anew", flush=True)
        _engines.clear()
        gc.collect()
        torch.cuda.empty_cache()
        return False
    return True
