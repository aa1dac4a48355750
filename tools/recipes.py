"""Writes into docs/recipes.md what the shipped configurations gave: a row for each finished run that is named.

snakemake --cores all --configfile config/distill-demo.yaml
python tools/recipes.py results/distill-demo
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from marks import around, write_part

from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.judging.run_files import read_config
from rloo_pipeline.report.jobs import jobs_of

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "recipes.md"
HEAD = (
    "| configuration | what happens | held-out accuracy | gain (95% interval) | CPU minutes |\n|---|---|---|---|---|\n"
)


def described(file: str) -> str:
    """The description of a configuration in config/README.md."""
    [text] = re.findall(
        rf"^\| `{re.escape(file)}` \| (.*) \|$", (ROOT / "config" / "README.md").read_text(), re.MULTILINE
    )
    return str(text)


def row(run: Path) -> str:
    """The result of a run of a configuration in config/."""
    config, summary = read_config(run), read_json(run / "summary.json")
    file = "config.yaml" if config.run == "demo" else f"{config.run}.yaml"
    before, after = (summary[name]["accuracy"] for name in ("warmstart", "final"))
    low, high = summary["gain_ci95"]
    minutes = sum(job.cpu_seconds or 0.0 for job in jobs_of(run, config.rounds)) / 60
    return (
        f"| `{file}` | {described(file)} | {before:.1%} → {after:.1%} | {100 * summary['gain']:+.1f} "
        f"({100 * low:+.1f} to {100 * high:+.1f}) | {minutes:.1f} |"
    )


if __name__ == "__main__":
    _, old, _ = around(PAGE, "recipes")
    rows = {line.split("|")[1]: line for line in old.removeprefix(HEAD).splitlines()}
    rows |= {line.split("|")[1]: line for line in map(row, map(Path, sys.argv[1:]))}
    write_part(PAGE, "recipes", HEAD + "\n".join(rows[name] for name in sorted(rows)) + "\n")
