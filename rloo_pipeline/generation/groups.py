"""K samples a prompt: seeds in, rows of the rollouts table out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, product
from pathlib import Path
from typing import Any

from rloo_pipeline import kept
from rloo_pipeline.config import Config, Model, Rollout
from rloo_pipeline.generation.completions import Decoding, Request
from rloo_pipeline.generation.sampler import LOGPROBS_MODE, Engine, Sampler, kind_of
from rloo_pipeline.seeds import derive
from rloo_pipeline.training import policy


def load_sampler(folder: Path, config: Config, longest_prompt: int, max_completion_length: int) -> Sampler:
    """A sampler for a policy, whose context is as long as prompts and completions need; one that is kept takes the
    policy's weights.
    """
    model, vllm = config.model, config.vllm
    engine = Engine(
        model.dtype, model.trust_remote_code, vllm.gpu_memory_utilization, vllm.kv_cache_gib, vllm.tensor_parallel_size
    )
    needed = longest_prompt + max_completion_length
    key = (engine, config.seed, kind_of(folder))
    sampler: Sampler | None = kept.take("sampler", key)
    if sampler is None:
        sampler = Sampler(folder, engine, needed, config.seed)
    else:
        sampler.swap(folder, needed)
    kept.keep("sampler", key, sampler)
    return sampler


def expect(requests: Callable[[], list[Request]], decoding: Decoding) -> None:
    """Says what the kept sampler is likely to be asked for with its next policy; it has the requests by then, whatever
    it is asked for before.
    """
    kept.keep("expected", None, (requests, decoding))
    kept.afterwards(_line_up)


def _line_up() -> None:
    """Gives the kept sampler what is expected of it, unless it has that, or has left the GPU to others."""
    sampler, expected = kept.look("sampler"), kept.look("expected")
    if sampler is not None and expected is not None and not sampler[1].asleep and sampler[1].under_way is None:
        requests, decoding = expected[1]
        sampler[1].line_up(requests(), decoding)


def take_ahead(folder: Path) -> bool:
    """Has the sampler that is kept, if there is one, take a policy's weights before a stage asks for them, and begin
    with what is expected of it, which is then no longer expected; whether it did. A stage that asks for something else
    gets that.

    An adapter is left alone: vLLM reads it at its first request, by its path.
    """
    found: tuple[tuple[Engine, int, str], Sampler] | None = kept.look("sampler")
    if found is None:
        return False
    (_, _, kind), sampler = found
    _line_up()
    with _by_any_name(folder) as here:
        if here is None or policy.is_adapter(here) or kind_of(here) != kind:
            return False
        sampler.swap(here, 0)
    kept.take("expected", None)
    kept.meanwhile(sampler.go_on)
    kept.go_on()
    return True


@contextmanager
def _by_any_name(folder: Path) -> Iterator[Path | None]:
    """A path to a folder that stays good while the folder is renamed; None where it is there no more."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield None
        return
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{handle}")
    finally:
        os.close(handle)


def decoding_of(rollout: Rollout) -> Decoding:
    """The rollouts' way of sampling."""
    return Decoding(rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p, rollout.max_completion_length)


def facts(model: Model, decoding: Decoding) -> dict[str, object]:
    """What a footer tells of how its samples were drawn."""
    return {
        "dtype": model.dtype,
        "logprobs_mode": LOGPROBS_MODE,
        **{f"sampling_{k}": v for k, v in decoding._asdict().items()},
    }


def requests_of(rows: Sequence[dict[str, Any]], samples: int, seed: int, names: tuple[str | int, ...]) -> list[Request]:
    """What `sample_groups` asks of the sampler."""
    return [
        Request(row["prompt_ids"], derive(seed, *names, row["prompt_id"], sample))
        for row, sample in product(rows, range(samples))
    ]


def sample_groups(
    sampler: Sampler,
    rows: Sequence[dict[str, Any]],
    samples: int,
    decoding: Decoding,
    seed: int,
    names: tuple[str | int, ...],
) -> list[dict[str, Any]]:
    """Rows of the rollouts table: `samples` completions of each prompt, neighbours in order.

    Args:
        sampler: holds the policy.
        rows: prompts with prompt_id and prompt_ids.
        samples: K.
        decoding: how to sample.
        seed, names: each sample's seed is derived from these, its prompt_id and its number.
    """
    parts = sample_parts(sampler, rows, samples, decoding, seed, names, 1)
    return list(chain.from_iterable(parts))


def sample_parts(
    sampler: Sampler,
    rows: Sequence[dict[str, Any]],
    samples: int,
    decoding: Decoding,
    seed: int,
    names: tuple[str | int, ...],
    parts: int,
) -> Iterator[list[dict[str, Any]]]:
    """The same in at most so many parts of whole groups, each as soon as it is sampled."""
    requests = requests_of(rows, samples, seed, names)
    asked = zip(product(rows, range(samples)), requests, strict=True)
    part = -(-len(rows) // parts) * samples
    rest: list[dict[str, Any]] = []
    for completions in sampler.sample_parts(requests, decoding, "completions", part):
        rest += [
            {
                "prompt_id": row["prompt_id"],
                "sample": sample,
                "prompt_ids": row["prompt_ids"],
                "completion_ids": completion.ids,
                "completion": completion.text,
                "sampling_logps": completion.logps,
                "finish_reason": completion.finish_reason,
                "seed": request.seed,
            }
            for completion, ((row, sample), request) in zip(completions, asked, strict=False)
        ]
        whole = len(rest) // samples * samples
        yield rest[:whole]
        del rest[:whole]
