"""Writes the figures of docs/monitoring.md about a run: what held-out accuracy by round costs, and lines printed.

snakemake --cores all > printed.txt 2>&1
python tools/run_figures.py results/demo [printed.txt]
"""

from __future__ import annotations

import sys
from pathlib import Path

from rloo_pipeline.artifacts import tables
from rloo_pipeline.diagnosis.run_files import read_config
from rloo_pipeline.report.jobs import jobs_of, seconds_by_stage

PAGE = Path(__file__).resolve().parents[1] / "docs" / "monitoring.md"
BEGIN, END = "<!-- run -->\n", "<!-- /run -->\n"
STAGES = ("rollout", "score", "reference", "update", "gate", "held_out")
"""Those of a round that its next round or its curve needs."""


def held_out_share(run: Path) -> tuple[float, float]:
    """Share of rounds from the second on that held-out prompts take, and seconds of such a round, over all jobs."""
    rounds = read_config(run).rounds
    jobs = [job for job in jobs_of(run, rounds) if job.stage in STAGES and job.name[:5] != "00001"]
    seconds = seconds_by_stage(jobs)
    tokens = dict.fromkeys(("rollouts", "held_out"), 0)
    for kind in tokens:
        for number in range(2, rounds + 1):
            for file in sorted((run / "rounds" / f"{number:05d}" / kind).glob("*.parquet")):
                tokens[kind] += sum(tables.lengths(tables.read(file, kind)["completion_ids"]))
    sampling = seconds["rollout"] * tokens["held_out"] / sum(tokens.values())
    return (seconds["held_out"] + sampling) / sum(seconds.values()), sum(seconds.values()) / (rounds - 1)


def figures(run: Path, printed: Path | None = None) -> str:
    """The figures in words."""
    config = read_config(run)
    share, seconds = held_out_share(run)
    text = (
        f"In `{config.run}`, whose rounds are {seconds:.1f} s of jobs, this is {share:.0%} of them. Most of it starts "
        "the processes of reward\nfunctions, which does not grow with the round. "
        "`python tools/run_figures.py results/my-run` measures it in a run.\n"
    )
    if printed:
        count = len(printed.read_text().splitlines())
        text += f"`snakemake --cores all` printed {count} lines there, without a terminal.\n"
    return text


if __name__ == "__main__":
    text = figures(Path(sys.argv[1]), *map(Path, sys.argv[2:3]))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2])
    print(text, end="")
