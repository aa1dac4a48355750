"""Steps of a round on a very small model: what sampler and trainer make of it, and how far apart they are.

Each step is to run in a process of its own (`forks.call`), since a process holds one engine.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Dtype
from rloo_pipeline.rollout.requests import Request

Rows = list[tuple[list[int], list[float]]]
"""Completions and their log-probs, by the sampler."""


class Rollout(NamedTuple):
    """What is sampled, and by which engine."""

    requests: Sequence[Request]
    context: int
    dtype: Dtype = "float32"
    images: int = 0
    """Images that a prompt may have."""


class Distance(NamedTuple):
    """Between the log-probs of sampler and trainer, in nats."""

    form: str
    """Form of batch of the trainer."""
    mean: float
    largest: float


def rollout(rollouts: list[tuple[Path, Rollout]]) -> tuple[list[Rows], str]:
    """Completions of policies; the first starts the engine, and the others are swapped in. A swap that is refused ends
    the list.

    Returns:
        The completions, and the messages about a refused swap.
    """
    from rloo_pipeline.errors import IncompatibleEngine
    from rloo_pipeline.rollout import swap_check, vllm_internals
    from rloo_pipeline.rollout.engine_arguments import EngineSettings
    from rloo_pipeline.rollout.sampler import Sampler

    messages: list[str] = []
    vllm_internals.say = swap_check.say = messages.append
    folder, request = rollouts[0]
    sampler = Sampler(Policy(folder), EngineSettings(request.dtype, 0.5, 1, 1, request.images), request.context, 0)
    rows: list[Rows] = []
    for folder, request in rollouts:
        try:
            sampler.swap(Policy(folder), request.context)
        except IncompatibleEngine:
            break
        sampled = sampler.sample(request.requests, "completions")
        rows.append([([*completion.ids], [*completion.logps]) for completion in sampled])
    return rows, " ".join(messages)


def trainer_logps(folder: Path, make: Callable[[Path, Rows], Any], rows: Rows, dtype: Dtype) -> tuple[Any, list[Any]]:
    """The model as the reference pass loads it, and its log-probs of the sequences that `make` makes of the rows."""
    from rloo_pipeline.training import forward_only
    from rloo_pipeline.training.logprobs import TokenLogProbs

    _allow_any_format()
    module = TokenLogProbs(forward_only.load(Policy(folder), dtype), 1.0)
    return module, forward_only.score(module, make(folder, rows), 150, "reference").logps


def differences(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> list[list[float]]:
    """Absolute differences, row by row."""
    return [[abs(a - b) for a, b in zip(*pair, strict=True)] for pair in zip(first, second, strict=True)]


def distance(folder: Path, make: Callable[[Path, Rows], Any], rows: Rows, dtype: Dtype = "float32") -> Distance:
    """Between sampler and reference pass."""
    module, values = trainer_logps(folder, make, rows, dtype)
    gaps = list(chain(*differences([logps for _, logps in rows], values)))
    return Distance(module.form.name, sum(gaps) / len(gaps), max(gaps))


def rounding(folder: Path, rows: Rows, make: Callable[[Path, Rows], Any], dtype: Dtype) -> float:
    """Mean distance between the reference pass in `dtype` and in float32, nats."""
    logps = [trainer_logps(folder, make, rows, one)[1] for one in (dtype, "float32")]
    gaps = list(chain(*differences(*logps)))
    return sum(gaps) / len(gaps)


def update(folder: Path, make: Callable[[Path, Rows], Any], rows: Rows, target: Path, changes: dict[str, Any]) -> float:
    """Makes the completions likelier and writes the policy; returns how much likelier, nats.

    Args:
        folder: of the policy before.
        make: the sequences, of a policy's folder and completions.
        rows: completions.
        target: folder of the policy after.
        changes: arguments of `trainer_settings`.
    """
    from trainers import trainer_settings

    from rloo_pipeline.training.engine import Engine

    _allow_any_format()
    engine = Engine(Policy(folder), trainer_settings(**{"rate": 1e-3, "max_tokens_per_micro_batch": 150, **changes}), 0)
    sequences, count = make(folder, rows), sum(len(ids) for ids, _ in rows)
    before = engine.logps(sequences)
    for _ in range(2):
        engine.step(sequences, range(len(rows)), lambda _, logps, mask, __: -(logps * mask).sum() / count)
    after = engine.logps(sequences)
    engine.save_policy(target)
    engine.close()
    return float((after - before).sum())


def _allow_any_format() -> None:
    """Has DeepSpeed take number formats that are slow on this processor."""
    from rloo_pipeline.training import engine

    engine.import_libraries()
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_bf16_supported = lambda: True
