"""Writes docs/gpus.md from the records of `make gpu` in tools/gpu/measured/, one per kind of card.

After `make gpu`, `gpus_page.py --store` makes results/gpu/gpu.json the record of its card and writes the page anew;
tests/unit/test_docs.py fails when the page is out of date.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rows import ROWS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "gpus.md"
MEASURED = Path(__file__).with_name("measured")
RESULT = ROOT / "results" / "gpu" / "gpu.json"
BEGIN, END = "<!-- measured -->\n", "<!-- /measured -->\n"
Record = Mapping[str, Any]


def outcome_text(outcome: Record) -> str:
    """An outcome in words: what came out, seconds, and why."""
    seconds = f" in {outcome['seconds']:.0f} s" if "seconds" in outcome else ""
    why = f": {outcome['why']}" if outcome.get("why") else ""
    figures = "; ".join(f"{name} {_short(value)}" for name, value in outcome.get("figures", {}).items())
    return f"{outcome['outcome']}{seconds}{why}" + (f" ({figures})" if figures else "")


def counts(record: Record) -> str:
    """How many rows passed, failed and did not run."""
    number = Counter(record["rows"].get(row.name, {}).get("outcome", "not run") for row in ROWS)
    return f"{number['passed']} of {len(ROWS)} rows passed, {number['failed']} failed, {number['not run']} not run"


def section(record: Record) -> str:
    """The rows of a record as a table; those that did not run are named below it."""
    facts, commit = record["machine"], record["commit"]
    at = f" Commit {commit}." if commit else ""
    words = f"Driver {facts['driver']}, {facts['cores']} cores, Python {facts['python']}; {facts['libraries']}.{at}"
    lines = [f"## {facts['cards']}", "", f"{counts(record)}. {words}", "", "| row | outcome | seconds | figures |", "|---|---|---:|---|"]
    ran = [row for row in ROWS if record["rows"].get(row.name, {}).get("outcome") in ("passed", "failed")]
    lines += [_line(row.name, row.shows, record["rows"][row.name]) for row in ran]
    reasons: dict[str, list[str]] = {}
    for row in ROWS:
        if row not in ran:
            reasons.setdefault(record["rows"].get(row.name, {}).get("why", "not tried"), []).append(f"`{row.name}`")
    lines += ["", "Not run:", "", *(f"- {why}: {', '.join(names)}" for why, names in reasons.items())] if reasons else []
    return "\n".join(lines) + "\n"


def _line(name: str, shows: str, outcome: Record) -> str:
    figures = "; ".join(f"{key} {_short(value)}" for key, value in outcome.get("figures", {}).items())
    note = f" {outcome['note']}" if outcome.get("note") else ""
    result = outcome["outcome"] if outcome["outcome"] == "passed" else f"**failed**: {outcome['why']}"
    seconds = f"{outcome['seconds']:.0f}" if "seconds" in outcome else ""
    return f"| `{name}`: {shows} | {_cell(result)} | {seconds} | {_cell(figures + note)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").strip()


def _short(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


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


def readme_sentence() -> str:
    """What README.md says of the cards: the rows that passed, card by card."""
    said = []
    for record in records():
        passed = sum(row["outcome"] == "passed" for row in record["rows"].values())
        said.append(f"{record['machine']['cards']}: {passed} of {len(ROWS)} rows of `make gpu` passed")
    return "; ".join(said)


def main() -> None:
    """Writes the page, with --store from the latest result."""
    if "--store" in sys.argv[1:]:
        record = json.loads(RESULT.read_text())
        name = re.sub(r"[^a-z0-9]+", "-", record["machine"]["cards"].lower()).strip("-")
        (MEASURED / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
