"""A row that runs the same rounds twice: ours by Snakemake, and TRL's RLOOTrainer with vLLM in its process."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from statistics import median
from typing import Any

import machine
import whole
import yaml
from rows import Figures

from rloo_pipeline.config.section import merge

CONFIGURATION, TINY = (Path(__file__).with_name(f"{name}.yaml") for name in ("round", "round-tiny"))
MOVED = r"moved [\d.]+ GB \w+ host memory in [\d.]+ s"
"""How the log says that an engine left its GPU or came back."""
MICRO = 8
"""Completions of TRL's micro-batch."""


def configuration(tiny: bool) -> dict[str, Any]:
    """The configuration of the round; with `tiny`, of a tiny model and short rounds."""
    config = yaml.safe_load(CONFIGURATION.read_text())
    return merge(config, yaml.safe_load(TINY.read_text())) if tiny else config


def against_trl(folder: Path, tiny: bool = False) -> Figures:
    """Seconds of a round of both, each round but the first, and where ours go.

    Args:
        folder: an empty folder for the row's files.
        tiny: use a tiny model and short rounds. TRL is then only planned, since its vLLM needs a GPU.
    """
    config = configuration(tiny)
    project = whole.Project(folder / "ours", config["run"], "--configfile", "round.yaml")
    (project.folder / "round.yaml").write_text(yaml.safe_dump(config))
    rounds = config["rounds"]
    project.start()
    project.rounds(rounds)
    ours = project.seconds(rounds)
    figures = parts(project, rounds) | {"a round s": round(median(ours), 1)}
    call = [sys.executable, Path(__file__).with_name("trl_colocated.py"), project.run, folder / "trl", MICRO]
    if tiny:
        machine.command([*call, "--arguments"], project.folder)
    else:
        theirs = machine.last_json(machine.command(call, project.folder))
        figures |= {"a round of TRL s": round(median(theirs["steps"][1:]), 1)}
        figures |= {"speed by TRL's": round(median(theirs["steps"][1:]) / median(ours), 2)}
        figures |= {"TRL GB": round(theirs["peak_gb"], 1)}
    for heavy in (project.run / "trainer", project.run / "policies"):
        shutil.rmtree(heavy)
    return figures


def parts(project: whole.Project, rounds: int) -> Figures:
    """Seconds of a round's sampling, training and rest, from the logs of each round but the first."""
    logs, names = project.run / "logs", [f"{number:05d}" for number in range(2, rounds + 1)]
    sampled = [
        re.findall(r"([\d.]+) tokens/s, sampled in ([\d.]+) s", (logs / f"rollout/{name}-000.log").read_text())
        for name in names
    ]
    trained = [re.findall(r"trained in ([\d.]+) s", (logs / f"update/{name}.log").read_text()) for name in names]
    shares = [re.findall(r", ([\d.]+) of the peak", (logs / f"update/{name}.log").read_text()) for name in names]
    rest = [a - b for a, b in zip(project.seconds(rounds), project.worked(rounds), strict=True)]
    lines = [line for file in logs.glob("*/*.log") for line in re.findall(MOVED, file.read_text())]
    moves: Figures = {"slowest move": max(lines, key=lambda line: float(line.split()[-2]))} if lines else {}
    of_peak: Figures = {"share of peak": median(float(found[-1]) for found in shares)} if all(shares) else {}
    return (
        of_peak
        | moves
        | {
            "sampling s": median(float(found[-1][1]) for found in sampled),
            "tokens/s": round(median(float(found[-1][0]) for found in sampled)),
            "training s": median(float(found[-1]) for found in trained),
            "neither s": round(median(rest), 1),
        }
    )
