"""Charts of a page: captions, lines, gaps and bands."""

from typing import Any

import plotly.graph_objects as go
import pytest
from synthetic_runs import ROUNDS, SAMPLES, configuration, metrics_of

from rloo_pipeline.config import Config
from rloo_pipeline.report.charts import Chart, charts
from rloo_pipeline.report.figures import figure
from rloo_pipeline.report.page import drawn_charts


@pytest.fixture(scope="module")
def config() -> Config:
    return configuration().only("report")


def test_plotly_accepts_every_figure_and_null_is_a_gap(config: Config) -> None:
    rounds = [metrics_of(number) for number in range(1, ROUNDS + 1)]
    figures = {chart.title: figure(chart, rounds) for chart in charts(config)}
    for drawn in figures.values():
        go.Figure(drawn)
    band, line = figures["Reward"]["data"]  # type: ignore[index]
    assert (line["y"][11:13], line["connectgaps"]) == ([None, None], False)
    assert [number for number in range(1, ROUNDS + 1) if number not in band["x"]] == [12, 13]


def test_a_value_between_two_gaps_has_a_marker(config: Config) -> None:
    rounds = [metrics_of(number) | ({"entropy": None} if number in (20, 22) else {}) for number in range(1, ROUNDS + 1)]
    entropy = next(chart for chart in charts(config) if chart.title == "Entropy")
    [line] = (figure(entropy, rounds) or {})["data"]
    assert [number for number, size in zip(line["x"], line["marker"]["size"], strict=True) if size] == [21]


def accuracy_chart(config: Config, each_round: bool, greedy: bool = True) -> tuple[str, list[dict[str, Any]]]:
    """The caption of held-out accuracy and its traces."""
    evaluation = {"accuracy": 0.5, "ci95": [0.4, 0.6], "greedy": {"accuracy": 0.6} if greedy else None}
    rounds = [{"policy": number, "accuracy": 0.5, "ci95": [0.3, 0.7]} for number in range(ROUNDS)] if each_round else []
    [(chart, drawn), *_] = drawn_charts(config, [metrics_of(1)], dict.fromkeys(config.evaluated, evaluation), rounds)
    assert chart.title == "Held-out accuracy"
    return chart.caption, (drawn or {})["data"]


def test_the_band_of_accuracy_has_the_colour_of_its_line_and_the_legend_only_lines_that_are_there() -> None:
    config = configuration(evaluation={"num_generations": SAMPLES, "every": 20}).only("report")
    for each_round, of in ((True, "some problems, each round"), (False, "sampled")):
        caption, (band, *lines) = accuracy_chart(config, each_round)
        colour = next(line["line"]["color"] for line in lines if line["name"] == of)
        assert band["fillcolor"] == f"rgba({int(colour[1:3], 16)},{int(colour[3:5], 16)},{int(colour[5:], 16)},0.16)"
        assert caption.endswith("interval of “some problems”." if each_round else "interval of “sampled”.")
    assert [line["name"] for line in lines] == ["sampled", "greedy"]
    _, (_, *lines) = accuracy_chart(config, each_round=True, greedy=False)
    assert [line["name"] for line in lines] == ["sampled", "some problems, each round"]


def test_policies_that_are_many_rounds_apart_have_no_tick_for_each_round() -> None:
    config = configuration(evaluation={"num_generations": SAMPLES, "every": 20}).only("report")
    evaluation = {"accuracy": 0.5, "ci95": [0.4, 0.6], "greedy": None}
    [(_, drawn), *_] = drawn_charts(config, [metrics_of(1)], dict.fromkeys(config.evaluated, evaluation), [])
    assert (drawn or {})["data"][1]["x"] == [0, 20, 40]
    assert (drawn or {})["layout"]["xaxis"].items() >= {"nticks": 7}.items()
    assert "dtick" not in (drawn or {})["layout"]["xaxis"]


@pytest.mark.parametrize(
    ("algorithm", "kl", "clipped"),
    [
        ({}, "Distance of the sampling policy from policy 0: nats per completion, k1", "of completions whose gradient"),
        ({"preset": "grpo"}, "Distance of the policy in training from policy 0: nats per completion, k3", "of tokens"),
        ({"preset": "reinforce_pp_baseline"}, "nats per completion, k2 estimate", "of tokens whose gradient was"),
        ({"preset": "cispo"}, "policy in training", "of tokens whose weight was cut by the clip"),
    ],
)
def test_captions_are_those_of_the_algorithm(algorithm: dict[str, Any], kl: str, clipped: str) -> None:
    captions = {chart.title: chart.caption for chart in charts(configuration(algorithm=algorithm).only("report"))}
    assert kl in captions["KL from the warm start"]
    assert clipped in captions["Clipped ratios"]


@pytest.mark.parametrize("rollout", [{"lag": 1}, {"token_budget": 8}])
@pytest.mark.parametrize(
    ("algorithm", "kl"),
    [
        ({}, "KL from policy 0 of the latest policy on samples of older ones, which can be below 0: nats"),
        ({"kl": {"estimator": "k3"}}, "Distance of the sampling policy from policy 0: nats"),
        ({"old_logps": "sampler"}, "Distance of the sampling policy from policy 0: nats"),
        ({"preset": "grpo"}, "Distance of the policy in training from policy 0: nats"),
    ],
)
def test_the_caption_of_the_kl_tells_whose_samples_it_is_measured_on(rollout, algorithm, kl) -> None:
    config = configuration(algorithm=algorithm, rollout=rollout).only("report")
    assert any(chart.caption.startswith(kl) for chart in charts(config))


def titles(config: Config, rounds: list[dict[str, float | None]]) -> set[str]:
    return {chart.title for chart in charts(config) if figure(chart, rounds)}


def test_a_long_name_in_a_legend_is_broken_and_has_room() -> None:
    rounds = [{"round": 1, "a": 1.0, "b": 0.0}]
    short, long = (
        figure(Chart("", "", {"a": "answer, weight 1", "b": name}), rounds)
        for name in ("format, weight 0.1", "get_repetition_penalty_reward, weight 0.25")
    )
    assert short
    assert long
    assert long["data"][1]["name"] == "get_repetition_penalty_reward,<br>weight 0.25"
    assert long["layout"]["height"] == short["layout"]["height"] + 16


def test_a_legend_has_the_name_of_a_reward_as_it_is() -> None:
    """plotly reads names as HTML."""
    drawn = figure(Chart("", "", {"a": "a <b>, weight 1", "b": 'R&D "q"'}), [{"round": 1, "a": 1.0, "b": 0.0}])
    assert drawn
    assert [line["name"] for line in drawn["data"]] == ["a &lt;b&gt;, weight 1", 'R&amp;D "q"']


def test_a_metric_that_no_round_has_is_not_drawn(config: Config) -> None:
    rounds = [metrics_of(number) for number in range(1, 4)]
    without = [metrics | {"kl/sequence_mean": None} for metrics in rounds]
    assert titles(config, rounds) - titles(config, without) == {"KL from the warm start"}


def test_beta_is_drawn_if_it_is_adapted(config: Config) -> None:
    rounds = [metrics_of(number) for number in range(1, 4)]
    adapted = [metrics | {"beta": 0.05 * number} for number, metrics in enumerate(rounds, 1)]
    assert titles(config, adapted) - titles(config, rounds) == {"KL coefficient"}
