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
STEP = "update_step_share/"
"""Before an operation's name: its share of an optimizer step (shapes.py)."""


class Figure(NamedTuple):
    """A row of the table."""

    description: str
    number: str
    """Its name in stored.json."""
    unit: str
    """Behind the number."""
    part: str
    """What `--only` takes."""


FIGURES = [
    Figure(
        "the demo's rounds, all processes' starts included, against TRL's RLOOTrainer",
        "demo_time_vs_trl",
        "times as fast",
        "demo",
    ),
    Figure(
        "rounds of 90 s (vocabulary 151,936, hidden size 512, 8 layers) against TRL's RLOOTrainer",
        "large_time_vs_trl",
        "times as fast",
        "large",
    ),
    Figure("share of these rounds that is neither sampling nor training", "round_overhead_share_large", "", "large"),
    Figure(
        "seconds of a demo round that are neither sampling nor training, with warm workers",
        "round_overhead_seconds",
        "s",
        "demo",
    ),
    Figure("the same with `workers: never`: engines start in each round", "round_overhead_cold_seconds", "s", "demo"),
    Figure("Snakemake alone, with jobs that do nothing", "round_floor_seconds", "s a round", "demo"),
    Figure(
        "an optimizer step against TRL: vocabulary 151,936, hidden size 512, 8 layers, float32, one thread",
        "update_tokens_per_s_vs_trl",
        "times its tokens/s",
        "update",
    ),
    Figure("peak memory of this step", "update_peak_memory_vs_trl", "of TRL's", "update"),
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
    Figure(
        "6 of the rounds of 90 s with `rollout.lag: 1` against none, one core for each side",
        "overlap_time_vs_in_turns",
        "times as fast",
        "overlap",
    ),
    Figure("the same with the lag against TRL on both cores", "overlap_time_vs_trl", "times as fast", "overlap_trl"),
    Figure(
        "with the lag against none in one SLURM job of two nodes",
        "overlap_slurm_time_vs_in_turns",
        "times as fast",
        "overlap_slurm",
    ),
    Figure("share of a round in which no engine works, without a lag", "round_idle_share_lag_0", "", "overlap"),
    Figure("the same with `rollout.lag: 1`", "round_idle_share_lag_1", "", "overlap"),
    Figure(
        "an optimizer step's matrix products by `torch.matmul` alone, share of the step's time",
        "update_gemm_share",
        "",
        "limits",
    ),
    Figure(
        "a decoding step's reads of weights and cache, share of the memory's bandwidth",
        "rollout_bandwidth_share",
        "",
        "limits",
    ),
    Figure(
        "peak memory of a rank of four under ZeRO 3, 300 million weights in bfloat16",
        "split_peak_memory_4_vs_1",
        "of one process's",
        "split",
    ),
    Figure("a dry run of 10 rounds with 8 shards", "plan_seconds_10_rounds", "s", "plan"),
    Figure("a dry run of 100 rounds with 8 shards", "plan_seconds_100_rounds", "s", "plan"),
    Figure("a dry run of 1,000 rounds with 8 shards", "plan_seconds_1000_rounds", "s", "plan"),
]


def table(stored: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Lines of the table."""
    yield "| what | median (least to most, repetitions) | `make bench BENCH_ARGS=…` |"
    yield "|---|---|---|"
    for figure in (one for one in FIGURES if one.number in stored):
        number = stored[figure.number]
        median, least, most = (_short(number[key]) for key in ("value", "min", "max"))
        spread = f" ({least} to {most}, {number['repeats']:.0f})" if number["repeats"] > 1 else ""
        yield f'| {figure.description} | {median}{spread} {figure.unit} | `"--only {figure.part}"` |'.replace("  ", " ")


def step_table(stored: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Lines of the table of where an optimizer step goes."""
    shares = {name.removeprefix(STEP): number["value"] for name, number in stored.items() if name.startswith(STEP)}
    yield "| operation | share of an optimizer step |"
    yield "|---|---|"
    for name, share in sorted(shares.items(), key=lambda pair: (-pair[1], pair[0])):
        yield f"| `{name}` | {share:.0%} |"
    yield f"| all others | {1 - sum(shares.values()):.0%} |"


def _short(number: float) -> str:
    return f"{number:.3g}" if number < 100 else f"{number:.0f}"


def page() -> str:
    """docs/performance.md with the tables as stored.json has it."""
    text, stored = PAGE.read_text(encoding="utf-8"), json.loads(STORED.read_text())
    for mark, lines in (("figures", table(stored)), ("step", step_table(stored))):
        begin, end = f"<!-- {mark} -->\n", f"<!-- /{mark} -->\n"
        before, _, rest = text.partition(begin)
        text = before + begin + "\n".join(lines) + "\n" + end + rest.partition(end)[2]
    return text


def main() -> None:
    """Writes the page, with --store from the latest result."""
    if "--store" in sys.argv[1:]:
        shutil.copyfile(RESULT, STORED)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
