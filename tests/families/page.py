"""`make models`: tries out every type of causal language model of transformers and writes docs/generated/families.md.

With types as arguments, only their rows are made anew.
"""

import sys
import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers
from sweep import KINDS, Outcome, try_out

PAGE = Path(__file__).parents[2] / "docs" / "generated" / "families.md"
BEGIN, END = "<!-- families -->\n", "<!-- /families -->\n"
HEAD = ["| type | form | |", "|---|---|---|"]
NAMES = {"single": "one at a time"}


def row(kind: str, outcome: Outcome) -> str:
    """The row of a type."""
    form = NAMES.get(outcome.form, outcome.form) if outcome.verdict == "right" else outcome.verdict
    why = outcome.slow if outcome.verdict == "right" else outcome.why
    why = " ".join(why.replace(f"{kind}: ", "").replace("config.json: ", "").replace("|", "/").split())
    return f"| `{kind}` | {form} | {why[:200]}{'…' if len(why) > 200 else ''} |"


def rows() -> dict[str, str]:
    """The rows of the page, by type."""
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    return {line.split("`")[1]: line for line in table.splitlines() if line.startswith("| `")}


def summary(lines: dict[str, str]) -> str:
    """How many types have each result."""
    counts = Counter(line.split(" | ")[1] for line in lines.values())
    return f"{len(lines)} types: " + ", ".join(f"{count} {result}" for result, count in counts.most_common()) + "."


def main(kinds: list[str]) -> None:
    """Tries the types out and writes the page."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for kind in kinds or KINDS:
        lines = {**rows(), kind: row(kind, try_out(kind))}
        print(lines[kind], flush=True)
        write({kind: lines[kind] for kind in KINDS if kind in lines})


def write(lines: dict[str, str]) -> None:
    """Writes the page with these rows."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table = "\n".join([summary(lines), "", *HEAD, *lines.values()])
    PAGE.write_text(before + BEGIN + table + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main(sys.argv[1:])
