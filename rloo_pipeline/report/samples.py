"""Chooses the completions that the report shows: with the run's seed, or by what they show, never by hand."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rloo_pipeline.artifacts import image_store, lineage, round_tables, tables
from rloo_pipeline.artifacts.prompt_set import PromptSet, content_text, held_out_part
from rloo_pipeline.checks.statistics import Array
from rloo_pipeline.config import Config
from rloo_pipeline.data.images import with_parts
from rloo_pipeline.judging.completions import grid, is_correct, score_names
from rloo_pipeline.report.run_tables import read_pair, read_round
from rloo_pipeline.seeds import derive, permutation

if TYPE_CHECKING:
    from PIL.Image import Image

EXAMPLES = 20
"""Number of held-out prompts whose completions are shown."""
GROUPS = 6
"""Number of prompts shown from each of the first, middle and last rounds."""
PROBED, SAMPLES_OF_PROBED = 5, 2
"""Number of prompts shown from a probe whose checks failed, and of completions of each."""
COMPLETIONS = 8
"""Number of completions shown from a group."""
MAX_CHARACTERS = 6000
"""Number of characters shown of a prompt or completion. Longer ones are cut in the middle; if there are several
messages, each of them is.
"""

THUMBNAIL, IMAGES = 160, 4
"""Longest side of an image on the page in pixels, and maximum number of images per prompt."""

Messages = list[dict[str, Any]]
"""Role and content of each message, and `images` as data URIs."""


class ShownCompletion(NamedTuple):
    """A completion as the page shows it."""

    turns: Messages
    """The turns; a completion without tools is one turn."""
    right: bool
    rewards: dict[str, float | None]
    finish_reason: str
    tokens: int
    advantage: float | None = None
    """The completion's advantage in the update; None in evaluations, and for completions that are left out of the loss.
    """


class ShownGroup(NamedTuple):
    """A prompt of a round and its completions."""

    round: int
    messages: Messages
    completions: list[ShownCompletion]
    left_out: int
    """Number of completions that are not shown."""


def held_out_examples(config: Config, run: Path) -> list[dict[str, Any]]:
    """Chooses some held-out prompts, as `messages`, with the first completion of each policy: `warmstart` and `final`,
    for the same seed.

    Raises:
        UserError: the two evaluations have different prompts.
    """
    before, after = read_pair(run)
    samples = config.evaluation.num_generations
    drawn = sorted(permutation(after.num_rows // samples, derive(config.seed, "report"))[:EXAMPLES])
    rows = [index * samples for index in drawn]
    ids = after["prompt_id"].take(rows).to_pylist()
    prompts = PromptSet(held_out_part(run / "prompts")).by_id(ids)
    pairs = zip(ids, *(_completions(config, table.take(rows)) for table in (before, after)), strict=True)
    return [{"messages": _messages(prompts[key]), "warmstart": first, "final": last} for key, first, last in pairs]


def groups(config: Config, run: Path, last: int) -> list[ShownGroup]:
    """Chooses some prompts of the first round, the middle one and round `last`, with rewards and advantages.

    Raises:
        UserError: a table of these rounds is damaged, or tables do not belong together.
    """
    groups = list[ShownGroup]()
    for number in sorted({1, (last + 1) // 2, last} - {0}):
        folder = lineage.round_folder(run, number)
        if round_tables.files_of(folder, "rollouts", config.rollout):
            groups += _shown_groups(config, run, number, read_round(folder, config.rollout), GROUPS, COMPLETIONS)
    return groups


def probed(config: Config, run: Path) -> list[ShownGroup]:
    """Chooses some prompts of policy 0's probe, shown as those of round 0."""
    table = tables.read(run / "warmstart" / "probe.parquet", "probe")
    return _shown_groups(config, run, 0, table, PROBED, SAMPLES_OF_PROBED)


def _shown_groups(
    config: Config, run: Path, number: int, table: pa.Table, most: int, most_each: int
) -> list[ShownGroup]:
    """At most `most` prompts of a table and `most_each` completions of each."""
    if not len(table):  # no group has ended (rollout.token_budget)
        return []
    samples = max(table["sample"].to_pylist()) + 1
    ids = table["prompt_id"].to_pylist()[::samples]
    right = is_correct(config, table, samples)
    advantages = grid(table["advantage"], samples) if "advantage" in table.column_names else np.zeros(right.shape)
    chosen = choose_groups(right, advantages, permutation(len(ids), derive(config.seed, "report", number)), most)
    prompts = PromptSet(run / "prompts" / "train").by_id([ids[index] for index in chosen])
    shown = []
    for index in chosen:
        rows = [index * samples + place for place in _rarer_first(right[index], most_each)]
        completions = _completions(config, table.take(rows))
        shown.append(ShownGroup(number, _messages(prompts[ids[index]]), completions, samples - len(completions)))
    return shown


def choose_groups(right: NDArray[np.bool_], advantages: Array, drawn: Sequence[int], most: int) -> list[int]:
    """Chooses the groups to show: half at random, the others by how much they show.

    Args:
        right: True for right completions, [groups, samples].
        advantages: their advantages, [groups, samples]; NaN for those without one.
        drawn: all groups in random order.
        most: number of groups.

    Returns:
        Indices in ascending order: the first half of `most` from `drawn`, then the groups with the fewest right
        completions but at least one, then the group with the lowest advantage.
    """
    counts = right.sum(axis=1)
    rare = sorted(np.flatnonzero(counts), key=lambda index: int(counts[index]))
    worst = int(np.nan_to_num(advantages).min(axis=1).argmin())
    half = most // 2
    order = [*drawn[:half], *rare[: most - half - 1], worst, *drawn[half:]]
    return sorted([*dict.fromkeys(map(int, order))][:most])


def _rarer_first(right: NDArray[np.bool_], most: int) -> list[int]:
    """Chooses up to `most` completions of a group, preferring the rarer kind, right or wrong. Returns indices in
    ascending order.
    """
    rarer = right if right.sum() * 2 <= len(right) else ~right
    return sorted(np.argsort(~rarer, kind="stable")[:most].tolist())


def _completions(config: Config, rows: pa.Table) -> list[ShownCompletion]:
    """Converts rows with completions and scores to the form that the page shows."""
    correct = is_correct(config, rows, 1)
    return [
        ShownCompletion(
            turns_of(row),
            bool(correct[index, 0]),
            {name: row[tables.score_column(name)] for name in score_names(config.rewards)},
            row["finish_reason"],
            len(row["sampling_logps"]),
            None if row.get("masked") else row.get("advantage"),
        )
        for index, row in enumerate(rows.to_pylist())
    ]


def turns_of(row: Mapping[str, Any]) -> Messages:
    """The messages of a completion; the role of a tool's answer has the tool's name."""
    if row.get("messages") is None:
        return _as_text([{"role": "assistant", "content": row["completion"]}])
    messages = json.loads(row["messages"])
    named = (" ".join(filter(None, (message["role"], message.get("name")))) for message in messages)
    return _as_text([message | {"role": role} for message, role in zip(messages, named, strict=True)])


def _as_text(messages: Messages) -> Messages:
    """The messages with their tool calls as text; together they get MAX_CHARACTERS."""
    texts = ("\n".join(filter(None, (content_text(message["content"]), *_calls(message)))) for message in messages)
    short = (_shortened(text, MAX_CHARACTERS // len(messages)) for text in texts)
    return [message | {"content": text} for message, text in zip(messages, short, strict=True)]


def _calls(message: Mapping[str, Any]) -> Iterator[str]:
    """The tool calls of a message, in Python syntax."""
    for call in message.get("tool_calls") or ():
        function = call.get("function") or call  # templates read both forms in prompts
        arguments = function.get("arguments") or {}
        if not isinstance(arguments, str):
            arguments = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
        yield f"→ {function['name']}({arguments})"


def _shortened(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters …]\n{text[len(text) - half :]}"


def _messages(row: Mapping[str, Any]) -> Messages:
    """The messages of a prompt as the page shows them."""
    if isinstance(row["prompt"], str):
        return _as_text([{"role": "prompt", "content": row["prompt"]}])
    pixels = row.get(image_store.PIXELS)
    if pixels is None:
        return _as_text(row["prompt"])
    waiting, shown = iter([*map(_thumbnail, pixels[:IMAGES]), *[None] * len(pixels[IMAGES:])]), []
    for message in with_parts(row["prompt"], len(pixels), "the page"):
        images = [next(waiting) for part in message["content"] if part["type"] == "image"]
        text = content_text([part for part in message["content"] if part["type"] != "image"])
        left_out = f"[{images.count(None)} more images]\n" if None in images else ""
        shown.append({"role": message["role"], "content": left_out + text, "images": [*filter(None, images)]})
    return _as_text(shown)


def _thumbnail(image: Image) -> str:
    """A small copy of an image as a data URI of at most a few kB."""
    small, buffer = image.copy(), io.BytesIO()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    small.save(buffer, "WEBP", quality=60)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
