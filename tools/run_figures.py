"""Writes the figures of docs/monitoring.md about a run: what held-out accuracy by round costs, and lines printed.

snakemake --cores all > printed.txt 2>&1
python tools/run_figures.py results/demo [printed.txt]
"""

from __future__ import annotations

import sys
from pathlib import Path

from marks import write_part

from rloo_pipeline.artifacts import tables
from rloo_pipeline.judging.run_files import read_config
from rloo_pipeline.report.jobs import jobs_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "monitoring.md"
STAGES = ("rollout", "score", "reference", "update", "gate", "held_out")
"""Those of a round that its next round or its curve needs."""


def held_out_share(run: Path) -> tuple[float, float]:
    """Share of the rounds from the second on that held-out prompts take, and CPU seconds of such a round.

    Of sampling they take their share of the tokens, of scoring that of the completions.
    """
    rounds = read_config(run).rounds
    seconds = dict.fromkeys(STAGES, 0.0)
    for job in jobs_of(run, rounds):
        if job.stage in STAGES and job.name[:5] != "00001":
            seconds[job.stage] += job.cpu_seconds or 0.0
    lengths: dict[str, list[int]] = {"rollouts": [], "held_out": []}
    for kind in lengths:
        for number in range(2, rounds + 1):
            for file in sorted((run / "rounds" / f"{number:05d}" / kind).glob("*.parquet")):
                lengths[kind] += tables.lengths(tables.read(file, kind)["completion_ids"])
    beside, rollouts = lengths["held_out"], lengths["rollouts"]
    sampling = seconds["rollout"] * sum(beside) / sum(beside + rollouts)
    scoring = seconds["score"] * len(beside) / len(beside + rollouts)
    return (seconds["held_out"] + sampling + scoring) / sum(seconds.values()), sum(seconds.values()) / (rounds - 1)


def figures(run: Path, printed: Path | None = None) -> str:
    """The figures in words."""
    config = read_config(run)
    share, seconds = held_out_share(run)
    text = (
        f"In `{config.run}`, whose rounds take {seconds:.1f} s of CPU, this is {share:.1%} of them; "
        "`python tools/run_figures.py results/my-run`\nmeasures it in a run.\n"
    )
    if printed:
        count = len(printed.read_text().splitlines())
        text += f"`snakemake --cores all` printed {count} lines there, without a terminal.\n"
    return text


if __name__ == "__main__":
    text = figures(Path(sys.argv[1]), *map(Path, sys.argv[2:3]))
    write_part(PAGE, "run", text)
    print(text, end="")
