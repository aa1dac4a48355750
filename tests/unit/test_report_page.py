"""The page of a run opens anywhere, shows what was said as it was said, and depends on the run's files alone."""

import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pyarrow as pa
import pytest

from rloo_pipeline import tables
from rloo_pipeline.config import Config
from rloo_pipeline.config_file import validate
from rloo_pipeline.errors import UserError
from rloo_pipeline.files import write_json
from rloo_pipeline.insight.charts import charts, figure
from rloo_pipeline.insight.page import duration, figure_of, parts_of_gain, points, render, verdict
from rloo_pipeline.insight.summary import summarize
from rloo_pipeline.stages.evaluate import summarize as summarize_evaluation

ROUNDS, PROMPTS, SAMPLES = 40, 60, 2
NASTY = '</pre></script><script>alert(1)</script><img src="http://x.invalid/y.png">'


def configuration(**changes: Any) -> Config:
    source = {"path": "rows.jsonl"}
    reward = "rloo_pipeline.rewards.answer:exact_answer_reward"
    plain = {
        "run": "synthetic",
        "rounds": ROUNDS,
        "seed": 3,
        "model": {"name_or_path": "a/model"},
        "dataset": {"train": source, "eval": source},
        "rewards": [{"function": reward, "name": "answer"}, {"function": reward, "name": "worked", "weight": 0}],
        "evaluation": {"num_generations": SAMPLES, "breakdown": ["worked"], "bootstrap_samples": 200},
        "report": {"title": "Sums & <b>differences</b>", "note": "Three digits, from memory or in columns."},
    }
    return validate(plain | changes, "test").only("report")


def write_completions(config: Config, run: Path, name: str, worked: float, chance: float) -> None:
    draw = random.Random(name)
    rows = []
    for place in range(PROMPTS * SAMPLES):
        works, right = draw.random() < worked, draw.random() < chance
        text = f"<think>{'1+2+0=03; ' * 12 if works else ''}</think>{place if right else NASTY}"
        length = draw.randint(3, 40)
        row = {
            "prompt_id": f"p{place // SAMPLES}",
            "sample": place % SAMPLES,
            "prompt_ids": [1],
            "completion_ids": [2] * length,
        }
        row |= {
            "completion": text,
            "sampling_logps": [-0.5] * length,
            "finish_reason": "stop" if length < 38 else "length",
        }
        rows.append(
            row
            | {
                "seed": place,
                "answer": float(right),
                "worked": float(works),
                "reward": float(right),
                "seconds": 0.0,
                "error": None,
            }
        )
    schema = tables.completions_schema(["answer", "worked"])
    folder = run / "evaluation" / name
    tables.write(folder / "completions.parquet", rows, schema, "completions", evaluated=name)
    table = tables.read(folder / "completions.parquet", "completions")
    write_json(folder / "summary.json", {"policy": name * 8, "evaluated": name, **summarize_evaluation(config, table)})


def write_prompts(folder: Path) -> None:
    rows = [{"prompt_id": f"p{n}", "prompt": [{"role": "user", "content": f"{n}+<b>{n}</b>"}]} for n in range(PROMPTS)]
    table = pa.Table.from_pylist(rows)
    folder.mkdir(parents=True)
    with pa.OSFile(str(folder / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def metrics_of(number: int) -> dict[str, float | None]:
    draw, t = random.Random(number), number / ROUNDS
    gone = number in (12, 13)
    return {
        "round": number,
        "reward": None if gone else 0.2 + 0.6 * t + draw.gauss(0, 0.03),
        "reward_std": None if gone else 0.3 - 0.2 * t,
        "rewards/answer/mean": None if gone else 0.2 + 0.6 * t + draw.gauss(0, 0.03),
        "rewards/worked/mean": 0.5 + 0.4 * t + draw.gauss(0, 0.02),
        "frac_reward_zero_std": 0.2 + 0.4 * t,
        "kl": 8 * t**2,
        "entropy": 1.2 - 0.9 * t,
        "clip_ratio/region_mean": 0.01 + 0.02 * draw.random(),
        "grad_norm": 0.5 + 0.3 * draw.random(),
        "learning_rate": 3e-4 * (1 - t),
        "completions/mean_length": 18 + 8 * t,
        "completions/min_length": 3,
        "completions/max_length": 40,
        "completions/mean_terminated_length": 17 + 8 * t,
        "completions/clipped_ratio": 0.05,
        "num_completion_tokens": 1250,
    }


def make_run(run: Path, config: Config) -> Path:
    """A finished run that nobody had to wait for."""
    for number in range(1, config.rounds + 1):
        write_json(run / "rounds" / f"{number:05d}" / "metrics.json", metrics_of(number))
    write_completions(config, run, "warmstart", 0.5, 0.3)
    write_completions(config, run, "final", 0.9, 0.75)
    write_prompts(run / "prompts" / "eval")
    found = [
        ("tokens", "pad 0, eos 2", "pass", ""),
        ("pass@4", 0.31, "pass", ""),
        ("mean reward", None, "warn", "look at <it>"),
    ]
    names = ("name", "value", "verdict", "advice")
    checked = [dict(zip(names, check, strict=True)) for check in found]
    write_json(
        run / "warmstart" / "checks.json", {"policy": "w", "prompts": 64, "num_generations": 4, "checks": checked}
    )
    for stage, seconds in {"rollout/00001-000": 4000, "update/00001": 700, "prompts": 1.5}.items():
        log = run / "logs" / f"{stage}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"2026 INFO rloo.time: took {seconds:.1f} s\n")
    return run


@pytest.fixture(scope="module")
def config() -> Config:
    return configuration()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, config: Config) -> Path:
    return make_run(tmp_path_factory.mktemp("results") / "synthetic", config)


@pytest.fixture(scope="module")
def page(run: Path, config: Config) -> str:
    return render(config, run, summarize(config, run))


class Reader(HTMLParser):
    """Every element's attributes, and the text outside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += "" if self.cdata_elem else data


def test_completions_stand_on_the_page_as_text(page: str) -> None:
    read = Reader(page)
    assert all(said in read.text for said in (NASTY, "<think>", "+<b>", "look at <it>"))
    assert [tag for tag, _ in read.elements].count("script") == 3
    assert "alert(1)</script>" not in page
    assert not {"img", "b"} & {tag for tag, _ in read.elements}


def test_nothing_is_loaded_from_anywhere(page: str) -> None:
    read = Reader(page)
    loaded = [
        value
        for _, attrs in read.elements
        for key, value in attrs.items()
        if key in ("src", "href", "srcset", "data", "action")
    ]
    assert loaded == ["data:,"]
    [style] = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert not re.search(r"@import|url\(", style)
    policy = next(
        attrs["content"] for _, attrs in read.elements if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    assert str(policy).startswith("default-src 'none'; ")
    assert "http" not in str(policy)


def test_the_same_run_gives_the_same_bytes_wherever_it_lies(tmp_path: Path, config: Config, page: str) -> None:
    other = make_run(tmp_path / "elsewhere", config)
    assert render(config, other, summarize(config, other)) == page


def test_a_summary_read_back_from_its_file_gives_the_same_page(run: Path, config: Config, page: str) -> None:
    assert render(config, run, json.loads(json.dumps(summarize(config, run), sort_keys=False))) == page


def test_the_headline_says_before_after_and_gain(page: str, run: Path, config: Config) -> None:
    text = " ".join(Reader(page).text.split())
    found = summarize(config, run)
    before, after = found["warmstart"]["accuracy"], found["final"]["accuracy"]
    assert f"On 60 held-out problems, {after:.1%} of the final policy’s answers are right;" in text
    assert f"before training with RLOO it was {before:.1%}." in text
    assert f"{points(found['gain_ci95'][0])} to {points(found['gain_ci95'][1])}" in text
    assert "snakemake --cores all --configfile results/synthetic/config.yaml" in text


@pytest.mark.parametrize(
    ("interval", "word"),
    [((0.1, 0.2), "above 0"), ((-0.2, -0.1), "below 0"), ((-0.1, 0.2), "contains 0"), ((0.0, 0.2), "contains 0")],
)
def test_the_verdict_follows_the_interval(interval: tuple[float, float], word: str) -> None:
    assert word in verdict({"gain_ci95": interval})


def test_the_parts_of_a_gain_add_up_to_it(run: Path, config: Config) -> None:
    found = summarize(config, run)
    parts = parts_of_gain(found["warmstart"], found["final"], "worked")
    assert sum(parts or ()) == pytest.approx(found["gain"])


def test_a_property_that_one_policy_always_has_takes_no_gain_apart() -> None:
    some = {"breakdown": {"worked": {"share": 0.5, "accuracy_with": 0.6, "accuracy_without": 0.2}}}
    every = {"breakdown": {"worked": {"share": 1.0, "accuracy_with": 0.6, "accuracy_without": None}}}
    assert parts_of_gain(some, every, "worked") is None


def test_every_figure_is_one_that_plotly_knows_and_null_is_a_gap(config: Config) -> None:
    rounds = [metrics_of(number) for number in range(1, ROUNDS + 1)]
    made = {chart.title: figure(chart, rounds) for chart in charts(config.rewards)}
    for drawn in made.values():
        go.Figure(drawn)
    band, line = made["Reward"]["data"]  # type: ignore[index]
    assert (line["y"][11:13], line["connectgaps"]) == ([None, None], False)
    assert [number for number in range(1, ROUNDS + 1) if number not in band["x"]] == [12, 13]


def test_a_value_between_two_gaps_is_seen_though_no_line_reaches_it(config: Config) -> None:
    rounds = [metrics_of(number) | ({"entropy": None} if number in (20, 22) else {}) for number in range(1, ROUNDS + 1)]
    entropy = next(chart for chart in charts(config.rewards) if chart.title == "Entropy")
    [line] = (figure(entropy, rounds) or {})["data"]
    assert [number for number, size in zip(line["x"], line["marker"]["size"], strict=True) if size] == [21]


def test_a_metric_that_no_round_has_is_not_drawn(config: Config) -> None:
    rounds = [metrics_of(number) | {"kl": None} for number in range(1, 4)]
    missing = [chart.title for chart in charts(config.rewards) if figure(chart, rounds) is None]
    assert missing == ["KL from the warm start"]


def test_evaluations_of_different_prompts_are_not_put_side_by_side(tmp_path: Path, config: Config) -> None:
    run = make_run(tmp_path / "run", config)
    summary = summarize(config, run)
    file = run / "evaluation" / "final" / "completions.parquet"
    table = tables.read(file, "completions")
    tables.write(file, table.slice(SAMPLES), table.schema, "completions")
    with pytest.raises(UserError, match="final"):
        render(config, run, summary)


def test_a_run_of_one_round_without_a_gain_has_a_page_too(tmp_path: Path) -> None:
    config = configuration(rounds=1, report={}, evaluation={"num_generations": SAMPLES, "bootstrap_samples": 100})
    run = make_run(tmp_path / "run", config)
    write_completions(config, run, "warmstart", 0.5, 0.0)
    write_completions(config, run, "final", 0.5, 0.0)
    text = " ".join(Reader(render(config, run, summarize(config, run))).text.split())
    assert "That is a change of 0.0 percentage points" in text
    assert "resampling them shows no spread" in text
    assert "What the gain is made of" not in text


def test_numbers_read_well() -> None:
    assert [figure_of(value) for value in (None, "pad 0", 12345, 0.018750000000000003, 2210.4, 0)] == [
        "–",
        "pad 0",
        "12,345",
        "0.0188",
        "2,210",
        "0",
    ]
    assert [points(value) for value in (0.123, -0.123, 0.0, -0.0001)] == ["+12.3", "−12.3", "0.0", "0.0"]
    assert [duration(value) for value in (1.5, 90, 4000, 7200)] == ["1.5 s", "1 min 30 s", "1 h 7 min", "2 h 0 min"]
