"""Writes docs/gpus.md from the records of `make gpu` in tools/gpu/measured/, one per kind of card.

After `make gpu`, `gpus_page.py --store` makes results/gpu/gpu.json the record of its card and writes the page anew;
tests/unit/test_docs.py fails when the page is out of date.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rows import ROWS

ROOT = Path(__file__).resolve().parents[2]
PAGE, README = ROOT / "docs" / "gpus.md", ROOT / "README.md"
MEASURED = Path(__file__).with_name("measured")
RESULT = ROOT / "results" / "gpu" / "gpu.json"
BEGIN, END = "<!-- measured -->\n", "<!-- /measured -->\n"
SPEED = "speed by TRL's"
README_BEGIN, README_END = "<!-- gpus -->\n", "<!-- /gpus -->\n"
Record = Mapping[str, Any]


def outcome_text(outcome: Record) -> str:
    """An outcome in words: result, seconds and reason."""
    seconds = f" in {outcome['seconds']:.0f} s" if "seconds" in outcome else ""
    why = f": {outcome['why']}" if outcome.get("why") else ""
    figures = "; ".join(_figure(name, value) for name, value in outcome.get("figures", {}).items())
    return f"{outcome['outcome']}{seconds}{why}" + (f" ({figures})" if figures else "")


def counts(record: Record) -> str:
    """The numbers of rows that passed, failed and did not run."""
    number = Counter(record["rows"].get(row.name, {}).get("outcome", "not run") for row in ROWS)
    return f"of {len(ROWS)} rows {number['passed']} passed, {number['failed']} failed, {number['not run']} did not run"


def section(record: Record) -> str:
    """The rows of a record as a table; those that did not run are named below it."""
    facts, commit = record["machine"], record["commit"]
    at = f" Commit {commit}." if commit else ""
    words = f"Driver {facts['driver']}, {facts['cores']} cores, Python {facts['python']}; {facts['libraries']}.{at}"
    lines = [
        f"## {facts['cards']}",
        "",
        f"{counts(record).capitalize()}. {words}",
        "",
        "| row | outcome | seconds | figures |",
        "|---|---|---:|---|",
    ]
    ran = [row for row in ROWS if record["rows"].get(row.name, {}).get("outcome") in ("passed", "failed")]
    lines += [_line(row.name, row.shows, record["rows"][row.name]) for row in ran]
    reasons: dict[str, list[str]] = {}
    for row in ROWS:
        if row not in ran:
            reasons.setdefault(record["rows"].get(row.name, {}).get("why", "not tried"), []).append(f"`{row.name}`")
    lines += (
        ["", "Not run:", "", *(f"- {why}: {', '.join(names)}" for why, names in reasons.items())] if reasons else []
    )
    return "\n".join(lines) + "\n"


def _line(name: str, shows: str, outcome: Record) -> str:
    figures = "; ".join(_figure(key, value) for key, value in outcome.get("figures", {}).items())
    note = f". {outcome['note']}" if outcome.get("note") and figures else outcome.get("note", "")
    result = outcome["outcome"] if outcome["outcome"] == "passed" else f"**failed**: {outcome['why']}"
    seconds = f"{outcome['seconds']:.0f}" if "seconds" in outcome else ""
    return f"| `{name}`: {shows} | {_cell(result)} | {seconds} | {_cell(figures + note)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").strip()


def _figure(name: str, value: float | str) -> str:
    if isinstance(value, str):
        return f"{name}: {value}"
    return f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value:,.4g}"


def records() -> Iterator[Record]:
    """The stored records."""
    for file in sorted(MEASURED.glob("*.json")):
        yield json.loads(file.read_text())


def not_yet_seen(all_records: list[Record]) -> list[str]:
    """The rows that have passed on no card."""
    passed = {name for record in all_records for name, row in record["rows"].items() if row["outcome"] == "passed"}
    return [row.name for row in ROWS if row.name not in passed]


def measured() -> str:
    """The generated part of the page."""
    all_records = list(records())
    unseen = ", ".join(f"`{name}`" for name in not_yet_seen(all_records))
    sections = "\n".join(map(section, all_records))
    return f"{sections}\n## Not yet seen to pass on any card\n\n{unseen or 'Nothing: every row has passed.'}\n"


def page() -> str:
    """docs/gpus.md as the records have it."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + measured() + END + rest.partition(END)[2]


def readme() -> str:
    """README.md with what has been measured, card by card."""
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(README_BEGIN)
    lines = "".join(map(_readme_line, records()))
    return before + README_BEGIN + lines + README_END + rest.partition(README_END)[2]


def _readme_line(record: Record) -> str:
    """The number of rows that passed on a card, the demo's gain, and our speed relative to TRL's."""
    rows = record["rows"]
    said = [f"Measured on {record['machine']['cards']}: {counts(record)}"]
    if (demo := rows.get("demo", {})).get("outcome") == "passed":
        before, after = (f"{demo['figures'][f'pass@1 {when}']:.1%}" for when in ("before", "after"))
        said.append(f"`make demo` takes {demo['seconds']:.0f} s, held-out pass@1 from {before} to {after}")
    if (step := rows.get("step-1.5B", {})).get("outcome") == "passed":
        ratio = step["figures"]["deepspeed tokens/s"] / step["figures"]["trl tokens/s"]
        said.append(f"an optimizer step of 1.5 billion weights has {ratio:.2f} times TRL's tokens/s")
    if (one := rows.get("round", {})).get("outcome") == "passed":
        said.append(f"a whole round {one['figures'][SPEED]:.2f} times its speed")
    text = f"- {'; '.join(said)} ([all rows](docs/gpus.md))."
    return textwrap.fill(text, 120, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False) + "\n"


def main() -> None:
    """Writes the page and the line of README.md, with --store from the latest result."""
    if "--store" in sys.argv[1:]:
        record = json.loads(RESULT.read_text())
        name = re.sub(r"[^a-z0-9]+", "-", record["machine"]["cards"].lower()).strip("-")
        (MEASURED / f"{name}.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page(), encoding="utf-8")
    README.write_text(readme(), encoding="utf-8")


if __name__ == "__main__":
    main()
