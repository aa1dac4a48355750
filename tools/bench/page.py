"""`make reference`: writes the table of docs/performance.md anew from tools/bench/stored.json.

tests/unit/test_docs.py fails when the page is out of date. After `make bench`, `python tools/bench/page.py --store`
makes results/bench/bench.json the stored figures and writes the table.
"""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"
STORED = Path(__file__).with_name("stored.json")
ROWS = Path(__file__).with_name("figures.csv")
"""Of the table: a number's name in stored.json, its part of `--only`, its unit and what it is."""
RESULT = ROOT / "results" / "bench" / "bench.json"
STEP = "update_step_share/"
"""Before an operation's name: its share of an optimizer step (shapes.py)."""


def table(stored: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Lines of the table."""
    yield "| what | median (least to most, repetitions) | `make bench BENCH_ARGS=…` |"
    yield "|---|---|---|"
    for row in csv.DictReader(ROWS.read_text(encoding="utf-8").splitlines()):
        if row["number"] not in stored:
            continue
        number = stored[row["number"]]
        median, least, most = (_short(number[key]) for key in ("value", "min", "max"))
        spread = f" ({least} to {most}, {number['repeats']:.0f})" if number["repeats"] > 1 else ""
        figure = " ".join(filter(None, (f"{median}{spread}", row["unit"])))
        yield f'| {row["description"]} | {figure} | `"--only {row["part"]}"` |'


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
