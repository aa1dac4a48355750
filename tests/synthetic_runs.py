"""Synthetic finished runs, and a parser for the text of an HTML page."""

import os
import random
import time
from datetime import datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import helpers
import pyarrow as pa
import yaml

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.config import Config
from rloo_pipeline.config.loading import validate
from rloo_pipeline.judging.evaluation_summary import summarize_evaluation
from rloo_pipeline.report.page import render
from rloo_pipeline.report.summary import summarize_run

ROUNDS, PROMPTS, SAMPLES = 40, 60, 2
NASTY = '</pre></script><script>alert(1)</script><img src="http://x.invalid/y.png">'


BEGAN = datetime(2026, 11, 1, 12, 0, 0)


def completions_schema(*functions: str) -> pa.Schema:
    """Schema of an evaluation's completions: rollout and scores in one row."""
    return pa.schema([*tables.ROLLOUTS, *list(tables.scores_schema(functions))[len(tables.KEYS) :]])


def _check(name: str, value: float | None, verdict: str, advice: str, **more: Any) -> dict[str, Any]:
    limits = {"warn": 0.1, "fail": None, "bad": "below"}
    result = {"name": name, "value": value, "shown": f"{value}", "limits": limits, "verdict": verdict}
    return {**result, "accepted": False, "advice": advice, **more}


CHECKED = {
    "policy": "warmstart" * 8,
    "prompts": 64,
    "num_generations": 4,
    "checks": [
        _check("round_trip", 1.0, "pass", "All is the same."),
        _check(
            "generation_prompt",
            1.0,
            "pass",
            "It ends so.",
            shown="'<|start_header_id|>assistant<|end_header_id|>\\n\\n'",
        ),
        _check("pass_at_k", 0.31, "warn", "look at <it>"),
        _check("teaching", 0.0, "fail", "nothing to learn", accepted=True),
    ],
    "lengths": {"edges": [0, 20, 40], "counts": [200, 56]},
    "right_in_group": [20, 10, 4, 10, 20],
    "expected_mixed": {"2": 0.2, "4": 0.4},
}


def configuration(**changes: Any) -> Config:
    """The configuration of a synthetic run."""
    source = {"path": "rows.jsonl"}
    reward = "rloo_pipeline.rewards.answer:exact_answer_reward"
    plain = {
        "run": "synthetic",
        "rounds": ROUNDS,
        "seed": 3,
        "model": {"name_or_path": "a/model"},
        "dataset": {"train": source, "eval": source},
        "rewards": [{"function": reward, "name": "answer"}, {"function": reward, "name": "worked", "weight": 0}],
        "evaluation": {"num_generations": SAMPLES},
        "report": {"title": "Sums & <b>differences</b>"},
    }
    return validate(plain | changes, "test")


def write_completions(config: Config, run: Path, name: str, worked_share: float, right_share: float) -> None:
    """Writes an evaluation; that of the warm start is the same for every run."""
    draw = random.Random(f"{name} {config.run if name == 'final' else ''}")
    rows = []
    for place in range(PROMPTS * SAMPLES):
        works, right = draw.random() < worked_share, draw.random() < right_share
        text = f"<think>{'1+2+0=03; ' * 12 if works else ''}</think>{place if right else NASTY}"
        length = draw.randint(3, 40)
        rows.append(
            {"prompt_id": f"p{place // SAMPLES}", "sample": place % SAMPLES, "prompt_ids": [1], "seed": place}
            | {"completion": text, "completion_ids": [2] * length, "sampling_logps": [-0.5] * length}
            | {"finish_reason": "stop" if length < 38 else "length", "seconds": 0.0, "error": None}
            | {"scores/answer": float(right), "scores/worked": float(works), "reward": float(right)}
        )
    schema = completions_schema("answer", "worked")
    folder, about = run / "evaluation" / name, {"policy": name * 8, "evaluated": name}
    tables.write(folder / "completions.parquet", rows, schema, "completions", **about)
    tables.write(folder / "greedy.parquet", rows[::SAMPLES], schema, "greedy", **about)
    table = tables.read(folder / "completions.parquet", "completions")
    greedy = summarize_evaluation(config, tables.read(folder / "greedy.parquet", "greedy"), 1, 0.0)
    summary = summarize_evaluation(config, table) | {"greedy": greedy}
    write_json(folder / "summary.json", {"policy": name * 8, "evaluated": name, **summary})
    if name != "warmstart":
        distance = {"policy": name * 8, "temperature": 1.0, "kl/sequence_mean": 3.25, "ci95": [2.5, 4.0], "kl": 0.1}
        write_json(folder / "distance.json", distance | {"reference": "warmstart" * 8})


def write_round(run: Path, number: int) -> None:
    """Writes rollouts, scores and train.parquet of a round, with one group of 4 per prompt."""
    draw, names = random.Random(f"round {number}"), ("prompt_id", "sample")
    rollouts, score_rows, train_rows = [], [], []
    for place in range(PROMPTS * 4):
        key = dict(zip(names, (f"p{place // 4}", place % 4), strict=True))
        right = draw.random() < 0.5
        text = f"<think>round {number}</think>{'yes' if right else NASTY}"
        rollouts.append(
            {**key, "prompt_ids": [1], "completion_ids": [2, 3], "completion": text, "sampling_logps": [-0.5, -0.1]}
            | {"finish_reason": "stop", "seed": place}
        )
        scores = {"scores/answer": float(right), "scores/worked": 1.0, "reward": float(right)}
        score_rows.append({**key, **scores, "seconds": 0.0, "error": None})
        train_rows.append(
            {**key, "reward": float(right), "kl": 0.0, "advantage": right - 0.5, "ratio": 1.0, "clipped": False}
            | {"masked": False}
        )
    folder = run / "rounds" / f"{number:05d}"
    about = {"run": "synthetic", "round": number, "shard": 0, "seed": 3}
    tables.write(folder / "rollouts" / "000.parquet", rollouts, tables.ROLLOUTS, "rollouts", **about)
    about = tables.facts_about(tables.read(folder / "rollouts" / "000.parquet", "rollouts"))
    schema = tables.scores_schema(["answer", "worked"])
    tables.write(folder / "scores" / "000.parquet", score_rows, schema, "scores", **about)
    tables.write(folder / "train.parquet", train_rows, tables.TRAIN, "train", round=number)


def write_prompts(folder: Path, context: str = "") -> None:
    """Writes a set of prompts, with the same text before each."""
    rows = [
        {"prompt_id": f"p{n}", "prompt": [{"role": "user", "content": f"{context}{n}+<b>{n}</b>"}]}
        for n in range(PROMPTS)
    ]
    helpers.write_prompts(folder.parent, rows, folder.name)


def metrics_of(number: int, run: str = "", learned: float = 0.6) -> dict[str, float | None]:
    """metrics.json of a round; in two rounds no completion could be scored."""
    draw, t = random.Random(f"{number} {run}"), number / ROUNDS
    unscored = number in (12, 13)
    return {
        "round": number,
        "step": number,
        "reward": None if unscored else 0.2 + learned * t * (2 - t) + draw.gauss(0, 0.02),
        "reward_std": None if unscored else 0.45 - 0.2 * t,
        "rewards/answer/mean": None if unscored else 0.2 + learned * t * (2 - t) + draw.gauss(0, 0.02),
        "rewards/worked/mean": 0.5 + 0.4 * t + draw.gauss(0, 0.02),
        "frac_reward_zero_std": 0.2 + 0.4 * t,
        "kl": 0.4 * t**2,
        "kl/sequence_mean": 12 * learned * t**2,
        "beta": 0.05,
        "entropy": 1.2 - 1.5 * learned * t,
        "clip_ratio/low_mean": 0.01 * draw.random(),
        "clip_ratio/high_mean": 0.01 + 0.01 * draw.random(),
        "clip_ratio/region_mean": 0.01 + 0.02 * draw.random(),
        "sampling/sampling_logp_difference/mean": 0.004 + 0.001 * draw.random(),
        "sampling/sampling_logp_difference/max": 0.3 + 0.4 * draw.random(),
        "grad_norm": 0.5 + 0.3 * draw.random(),
        "learning_rate": 3e-4 * (1 - t),
        "completions/mean_length": 18 + 8 * t,
        "completions/min_length": 3,
        "completions/max_length": 40,
        "completions/mean_terminated_length": 17 + 8 * t,
        "completions/clipped_ratio": 0.05,
        "num_completion_tokens": 1250,
    }


def write_config(run: Path, config: Config) -> None:
    """Writes a run's configuration as Snakemake does."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))


def write_log(run: Path, name: str, text: str, time: float | None = None) -> Path:
    """Writes a log, last changed at some time."""
    log = run / "logs" / name
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(text)
    if time is not None:
        os.utime(log, (time, time))
    return log


def make_run(run: Path, config: Config, learned: float = 0.6) -> Path:
    """Writes the files that the report reads."""
    for number in {1, (config.rounds + 1) // 2, config.rounds}:
        write_round(run, number)
    for number in range(1, config.rounds + 1):
        write_json(run / "rounds" / f"{number:05d}" / "metrics.json", metrics_of(number, config.run, learned))
    write_completions(config, run, "warmstart", 0.5, 0.3)
    for name in list(config.evaluated)[1:-1]:
        write_completions(config, run, name, 0.7, 0.15 + learned / 2)
    write_completions(config, run, "final", 0.9, 0.15 + learned)
    for part in ("train", "eval"):
        write_prompts(run / "prompts" / part)
    write_json(run / "warmstart" / "checks.json", CHECKED)
    for stage, seconds in {"rollout/00001-000": 4000, "update/00001": 700, "prompts": 1.5}.items():
        end = BEGAN + timedelta(seconds=seconds)
        write_log(run, f"{stage}.log", f"{end},123 INFO rloo.time: took {seconds:.1f} s\n")
    return run


def finish_run(run: Path, config: Config, learned: float = 0.6) -> Path:
    """Writes a finished run without report.html and weights."""
    make_run(run, config, learned)
    write_config(run, config)
    write_json(run / "summary.json", summarize_run(config.only("report"), run))
    return run


def train_again(run: Path, rounds: int) -> None:
    """Makes so many rounds newer than all that the folder had before, as a new training of them would."""
    for number in range(1, rounds + 1):
        os.utime(run / "rounds" / f"{number:05d}" / "metrics.json", (time.time() + number,) * 2)


def page_words(run: Path, config: Config) -> str:
    """What the page of a finished run says, made anew."""
    return Reader(render(config, run, summarize_run(config, run))).words


class Reader(HTMLParser):
    """Collects the attributes of every element and the text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    @property
    def words(self) -> str:
        """The text with one space for any white space."""
        return " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += "" if self.cdata_elem else data
