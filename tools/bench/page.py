"""`make reference`: writes the table of docs/performance.md anew from tools/bench/stored.json.

tests/unit/test_docs.py fails when the page is out of date. After `make bench`, `python tools/bench/page.py --store`
makes results/bench/bench.json the stored figures and writes the table.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"
STORED = Path(__file__).with_name("stored.json")
RESULT = ROOT / "results" / "bench" / "bench.json"
BEGIN, END = "<!-- figures -->\n", "<!-- /figures -->\n"


class Figure(NamedTuple):
    """A row of the table."""

    what: str
    number: str
    """Its name in stored.json."""
    unit: str
    """Behind the number."""
    part: str
    """What `--only` takes."""


FIGURES = [
    Figure(
        "rounds of 90 s (vocabulary 151,936, hidden size 512, 8 layers) against TRL's RLOOTrainer",
        "large_time_vs_trl",
        "times as fast",
        "large",
    ),
    Figure("share of its rounds that is neither sampling nor training", "round_overhead_share_large", "", "large"),
    Figure(
        "an optimizer step against TRL: vocabulary 151,936, hidden size 512, 8 layers, float32, one thread",
        "update_tokens_per_s_vs_trl",
        "times its tokens/s",
        "update",
    ),
    Figure("peak memory of that", "update_peak_memory_vs_trl", "of TRL's", "update"),
    Figure(
        "the step with all log-probs that come before it",
        "after_sampling_tokens_per_s_vs_trl",
        "times its tokens/s",
        "update",
    ),
    Figure(
        "an optimizer step of a small model: hidden size 64, vocabulary 512",
        "update_tokens_per_s_vs_trl_small",
        "times its tokens/s",
        "update",
    ),
    Figure(
        "a warm rollout stage, text and table included, against `vllm.LLM.generate` alone",
        "rollout_tokens_per_s_vs_vllm",
        "times its tokens/s",
        "rollout",
    ),
    Figure(
        "scoring GSM8K with `math_reward` against the bare function on as many cores",
        "score_rows_per_s_vs_bare",
        "of its rows/s",
        "scoring",
    ),
]


def table(stored: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Lines of the table."""
    yield "| what | median (least to most, repetitions) | `make bench BENCH_ARGS=…` |"
    yield "|---|---|---|"
    for figure in FIGURES:
        number = stored[figure.number]
        median, least, most = (_short(number[key]) for key in ("value", "min", "max"))
        spread = f" ({least} to {most}, {number['repeats']:.0f})" if number["repeats"] > 1 else ""
        yield f'| {figure.what} | {median}{spread} {figure.unit} | `"--only {figure.part}"` |'.replace("  ", " ")


def _short(number: float) -> str:
    return f"{number:.3g}" if number < 100 else f"{number:.0f}"


def page() -> str:
    """docs/performance.md with the table as stored.json has it."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    return before + BEGIN + "\n".join(table(json.loads(STORED.read_text()))) + "\n" + END + after


def main() -> None:
    """Writes the page, with --store from the latest result."""
    if "--store" in sys.argv[1:]:
        shutil.copyfile(RESULT, STORED)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
