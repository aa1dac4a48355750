"""`make kinds`: runs a model of each kind through two rounds and writes the table of docs/generated/kinds.md.

With kinds as arguments, only their rows are made anew.
"""

import contextlib
import sys
import tempfile
from pathlib import Path

import forks
import two_rounds
from two_rounds import KINDS, Outcome

PAGE = Path(__file__).parents[2] / "docs" / "generated" / "kinds.md"
BEGIN, END = "<!-- kinds -->\n", "<!-- /kinds -->\n"
HEAD = [
    "| kind | example | number format | sampler and trainer: all weights | LoRA | other weights in a running engine |",
    "|---|---|---|---|---|---|",
]


def row(kind: str, outcome: Outcome) -> str:
    """The row of a kind."""
    facts = KINDS[kind]
    full = f"{max(distance.mean for distance in outcome.distances[:2]):.2g}"
    if outcome.rounding:
        full += f" ({outcome.rounding:.2g})"
    lora = f"{outcome.distances[2].mean:.2g}, on {', '.join(facts.lora)}" if facts.lora else "refused"
    warm = "yes" if outcome.warm else "refused, and a new engine starts"
    return f"| {facts.name} | `{kind}` | {facts.dtype} | {full} | {lora} | {warm} |"


def rows() -> dict[str, str]:
    """The rows of the page, by kind."""
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    return {line.split("`")[1]: line for line in table.splitlines()[2:] if line}


def main(names: list[str]) -> None:
    """Runs the kinds and writes the page."""
    for kind in names or KINDS:
        with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
            outcome = two_rounds.run(kind, Path(place))
        print(kind, outcome, flush=True)
        lines = {**rows(), kind: row(kind, outcome)}
        before, _, rest = PAGE.read_text().partition(BEGIN)
        table = "\n".join([*HEAD, *(lines[kind] for kind in KINDS if kind in lines)])
        PAGE.write_text(before + BEGIN + table + "\n" + END + rest.partition(END)[2])
    forks.close()


if __name__ == "__main__":
    main(sys.argv[1:])
