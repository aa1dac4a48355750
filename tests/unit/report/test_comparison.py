"""The comparison shows runs unchanged, and names what they do not share where a reader sees it."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import plotly.graph_objects as go
import pytest
import yaml
from helpers import done, rloo
from synthetic_runs import PROMPTS, ROUNDS, SAMPLES, Reader, configuration, finish_run, metrics_of

from rloo_pipeline.artifacts import lineage, tables
from rloo_pipeline.artifacts.files import read_json, write_json
from rloo_pipeline.checks.statistics import gain
from rloo_pipeline.commands.compare import compare
from rloo_pipeline.config.rewards import REWARD_MODEL
from rloo_pipeline.errors import UserError
from rloo_pipeline.judging.run_files import read_config
from rloo_pipeline.report import comparison, comparison_page, finished
from rloo_pipeline.report.charts import shared_charts
from rloo_pipeline.report.figures import figure_of_runs
from rloo_pipeline.seeds import derive

FIRST, SECOND, THIRD = "demo-rloo", "demo-grpo", "demo-worse"
GRPO = {"advantage": "grpo", "importance_sampling_level": "token", "kl": {"placement": "loss", "estimator": "k3"}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """Three finished runs that share everything but the algorithm."""
    results = tmp_path_factory.mktemp("results")
    settings = {FIRST: (0.6, {}), SECOND: (0.58, GRPO), THIRD: (0.2, {"beta": 0.0})}
    return [
        finish_run(results / name, configuration(run=name, algorithm=algorithm), learned)
        for name, (learned, algorithm) in settings.items()
    ]


@pytest.fixture
def pair(folders, tmp_path) -> list[Path]:
    """Copies of two of them, to be changed."""
    return [Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in folders[:2]]


def page_of(folders: list[Path], tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """The page and comparison.json."""
    html, summary = tmp_path / "out" / "comparison.html", tmp_path / "out" / "comparison.json"
    compare(folders, html, summary)
    return html.read_text(encoding="utf-8"), read_json(summary)


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a JSON file in place."""
    content = read_json(file)
    change(content)
    write_json(file, content)


def test_the_page_shows_algorithm_and_gain_of_each_run(folders, tmp_path) -> None:
    page, content = page_of(folders, tmp_path)
    text = Reader(page).words
    for row, folder in zip(content["runs"], folders, strict=True):
        summary = read_json(folder / "summary.json")
        assert (row["run"], row["gain"], row["gain_ci95"]) == (folder.name, summary["gain"], summary["gain_ci95"])
        assert f"{summary['final']['accuracy']:.1%}" in text
    assert (content["runs"][0]["seconds"], content["runs"][0]["tokens"]) == (4700.0, ROUNDS * 1250)
    assert content["runs"][1]["algorithm"].items() >= {"advantage": "grpo", "kl_placement": "loss"}.items()
    assert all(value in text for value in ("50,000", "1 h 18 min", "none (beta 0)", "beta 0.05 in loss"))


def test_final_policies_are_compared_with_the_first_one_prompt_by_prompt(folders, tmp_path) -> None:
    _, content = page_of(folders, tmp_path)
    runs = [finished.read(folder) for folder in folders]
    files = [folder / "evaluation" / "final" / "completions.parquet" for folder in folders]
    columns = [tables.read(file, "completions")["scores/answer"] for file in files]
    shares = [np.array(column.to_pylist()).reshape(PROMPTS, SAMPLES).mean(axis=1) for column in columns]
    second, third = (gain(shares[0], after, 200, derive(3, "comparison"), SAMPLES) for after in shares[1:])
    assert all((run.accuracy == share).all() for run, share in zip(runs, shares, strict=True))
    assert [row["difference"] is None for row in content["runs"]] == [True, False, False]
    expected = {"value": third.value, "ci95": list(third.ci95 or ()), "p": third.p, "reason": None}
    assert (second.p or 0) > (third.p or 1), "so Holm doubles that of the third and leaves that of the second"
    assert content["runs"][2]["difference"] == {**expected, "p_holm": 2 * (third.p or 1)}
    assert content["runs"][1]["difference"]["p_holm"] == second.p


def test_the_headline_names_differences_beyond_sampling_and_claims_nothing_about_seeds(folders, tmp_path) -> None:
    page, content = page_of(folders, tmp_path)
    best = max(content["runs"], key=lambda row: row["final"]["accuracy"])
    text = Reader(page).words
    assert f"Of 3 runs, {best['run']} ends best: {best['final']['accuracy']:.1%} of the answers to 60" in text
    assert f"{THIRD} (−" in text
    assert "by more than the sampling of these problems and answers explains; demo-grpo (" in text
    assert "Training seeds were not varied: each run was trained once, and another seed could order them" in text
    assert "2 comparisons with demo-rloo, and their p-values are corrected for that many (Holm)" in text
    assert "more than chance" not in text
    assert "The run that ends best is partly so by luck, so its accuracy is too high on average" in text


def test_runs_that_are_equally_good_end_best_together(folders, tmp_path) -> None:
    _, content = page_of(folders, tmp_path)
    for row, accuracy in zip(content["runs"], (0.9, 0.6 + 0.3), strict=False):  # means that are rounded differently
        row["final"] = row["final"] | {"accuracy": accuracy}
    assert "Of 3 runs, demo-rloo and demo-grpo end best: 90.0% of the answers" in comparison_page.headline(content)


EXPLAINED = "by more than the sampling of these problems and answers explains"


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([(0.15, 0.01)], f"b (+15.0) differs from a (50.0%) {EXPLAINED}. Training seeds"),
        ([(0.05, 0.2)], f"b (+5.0) does not differ from a (50.0%) {EXPLAINED}."),
        ([(0.05, 0.2), (-0.05, 0.3)], f"None of the others differs from a (50.0%) {EXPLAINED}."),
        (
            [(0.15, 0.01), (-0.15, 0.04), (0.05, 0.06)],
            f"b (+15.0) and c (−15.0) differ from a (50.0%) {EXPLAINED}; d (+5.0) does not.",
        ),
    ],
)
def test_a_difference_needs_a_corrected_p_of_at_most_5_percent(differences, expected) -> None:
    final = {"accuracy": 0.5, "ci95": [0.4, 0.6], "prompts": 10}
    others = [{"value": value, "p": p / 10, "p_holm": p, "reason": None} for value, p in differences]
    rows = [
        {"run": name, "final": final, "difference": difference}
        for name, difference in zip("abcd", [None, *others], strict=False)
    ]
    text = comparison_page.headline({"runs": rows, "shared": {"seed": {"same": True}}})
    assert expected in text
    other = comparison_page.headline({"runs": rows, "shared": {"seed": {"same": False}}})
    assert "Each run was trained once, with its own seed" in other


def test_the_page_confirms_that_runs_share_everything(folders, tmp_path) -> None:
    page, content = page_of(folders, tmp_path)
    assert all(fact["same"] for fact in content["shared"].values())
    assert "All runs have the same warm start, seed, training prompts, held-out prompts, rewards" in Reader(page).words
    assert "do not share" not in Reader(page).words


def change_seed(folder: Path) -> None:
    shutil.rmtree(folder)
    finish_run(folder, configuration(run=SECOND, seed=4), 0.58)


def change_rewards(folder: Path) -> None:
    function = "rloo_pipeline.rewards.answer:exact_answer_reward"
    rewards = [{"function": function, "name": "answer"}, {"function": function, "name": "worked", "weight": 0.5}]
    shutil.rmtree(folder)
    finish_run(folder, configuration(run=SECOND, rewards=rewards), 0.58)


def change_warm_start(folder: Path) -> None:
    edit(folder / "summary.json", lambda summary: summary["warmstart"].update(policy="another" * 8))


def change_versions(folder: Path) -> None:
    edit(folder / "summary.json", lambda summary: summary["versions"].update(transformers="0.1"))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (change_seed, "Not the same seed: demo-rloo: 3; demo-grpo: 4. So "),
        (change_rewards, "Not the same rewards: demo-rloo: 1 × exact_answer_reward + 0 × "),
        (change_warm_start, "Not the same warm start: demo-rloo: policy 0 warmstartwar…; demo-grpo: policy 0 another"),
        (change_versions, "Not the same software: demo-rloo; demo-grpo. So "),
    ],
)
def test_differences_between_runs_are_named_at_the_top(pair, tmp_path, change, expected) -> None:
    change(pair[1])
    page, content = page_of(pair, tmp_path)
    text = Reader(page).words
    assert [name for name, fact in content["shared"].items() if not fact["same"]] == [expected.split(":")[0][13:]]
    assert "do not share everything" in text
    assert text.index(expected) < text.index("Reward by round")
    assert content["runs"][1]["difference"]["value"] is not None


def test_accuracies_on_different_prompts_are_not_subtracted(pair, tmp_path) -> None:
    file = pair[1] / "evaluation" / "final" / "completions.parquet"
    table = tables.read(file, "completions")
    facts = {key: tables.footer(table)[key] for key in ("policy", "evaluated")}
    others = table.slice(SAMPLES)
    tables.write(file, others, table.schema, "completions", **facts)
    accuracy = float(np.mean(others["scores/answer"]))
    edit(pair[1] / "summary.json", lambda summary: summary["final"].update(accuracy=accuracy, prompts=PROMPTS - 1))
    page, content = page_of(pair, tmp_path)
    assert content["runs"][1]["difference"] == {
        "value": None,
        "ci95": None,
        "p": None,
        "p_holm": None,
        "reason": "other held-out prompts",
    }
    assert "– other held-out prompts" in Reader(page).words
    assert "cannot all be compared with that of demo-rloo" in Reader(page).words
    assert not content["shared"]["held-out prompts"]["same"]


@pytest.mark.parametrize(
    ("section", "key", "shown"),
    [
        ("evaluation", {"temperature": 0.5}, "temperature 0.5"),
        ("evaluation", {"max_completion_length": 64}, "64 tokens"),
        ("rollout", {"generation_kwargs": {"stop": ["\n"]}}, "tokens, stop."),
    ],
)
def test_accuracies_of_another_way_to_sample_are_not_subtracted(pair, tmp_path, section, key, shown) -> None:
    sections = {"evaluation": {"num_generations": SAMPLES}}
    shutil.rmtree(pair[1])
    finish_run(pair[1], configuration(run=SECOND, **sections | {section: sections.get(section, {}) | key}), 0.58)
    page, content = page_of(pair, tmp_path)
    assert content["runs"][1]["difference"]["value"] is None
    words = Reader(page).words
    assert "– another temperature, length or generation_kwargs in evaluations" in words
    assert "some have another temperature, length or generation_kwargs in evaluations." in words
    assert "Not the same sampling in evaluations: " in words
    assert shown in words


def test_accuracies_by_different_versions_of_a_function_are_not_subtracted(pair) -> None:
    first, second = (finished.read(folder)._replace(functions={"answer": "a" * 16}) for folder in pair)
    for functions in ({"answer": "b" * 16}, {}):
        other = second._replace(functions=functions)
        assert comparison.difference(first, other)["reason"] == "another version of the reward functions"
        assert not comparison.compare([first, other])["shared"]["code and models of your rewards"]["same"]
    assert comparison.difference(first, second)["reason"] is None


def test_runs_that_trained_different_reward_models_are_not_subtracted(pair) -> None:
    rewards, model = [{"function": REWARD_MODEL, "name": "answer"}], {"train": {"path": "pairs.jsonl"}}
    runs = [finished.read(folder) for folder in pair]
    configs = [
        configuration(run=run.name, seed=seed, rewards=rewards, reward_model=model) for seed, run in enumerate(runs)
    ]
    first, second = (
        run._replace(config=config, functions={"answer": str(config.seed)})
        for run, config in zip(runs, configs, strict=True)
    )
    assert comparison.difference(first, second)["reason"] == "another version of the reward functions"


def test_more_samples_do_not_count_as_different_sampling(pair, tmp_path) -> None:
    evaluation = {"num_generations": 2 * SAMPLES}
    first, second = (finished.read(folder) for folder in pair)
    summary = first.summary | {"final": first.summary["final"] | {"num_generations": 2 * SAMPLES}}
    more = first._replace(summary=summary, config=configuration(run=FIRST, evaluation=evaluation))
    assert comparison.difference(more, second)["value"] is not None


def test_of_the_run_with_more_samples_as_many_count_as_the_other_has(pair) -> None:
    """Equally good policies: 16 samples hit some prompts once, and one sample of each hits one prompt or none."""
    first, second = (finished.read(folder) for folder in pair)
    draw, prompts = np.random.default_rng(0), len(first.right)
    below = 0
    for _ in range(100):
        runs = [of._replace(right=draw.random((prompts, of_each)) < 0.02) for of, of_each in ((first, 1), (second, 16))]
        found = comparison.difference(*runs)
        below += found["p"] <= 0.05
        assert found["value"] == pytest.approx(runs[1].right[:, :1].mean() - runs[0].right.mean())
    assert below <= 10


def test_only_comparisons_with_a_p_value_count_in_its_correction(folders, tmp_path) -> None:
    runs = [finished.read(folder) for folder in folders]
    runs[1] = runs[1]._replace(held_out_prompts=runs[1].held_out_prompts[1:])
    text = Reader(comparison_page.render(comparison.compare(runs), runs)).words
    assert "corrected" not in text, "one comparison is left"


def test_captions_hold_for_each_of_several_algorithms(folders, tmp_path) -> None:
    text = Reader(page_of(folders, tmp_path)[0]).words
    assert "by each run’s estimator" in text
    assert "k1 estimate" not in text
    assert "with cispo, whose weight was cut" in text
    assert "beta 0.05 in loss, k3" in text


def test_only_keys_that_differ_are_shown(folders, tmp_path) -> None:
    page, content = page_of(folders, tmp_path)
    assert content["differing"] == {
        "algorithm.advantage": {FIRST: "rloo", SECOND: "grpo", THIRD: "rloo"},
        "algorithm.beta": {FIRST: 0.05, SECOND: 0.05, THIRD: 0.0},
        "algorithm.importance_sampling_level": {FIRST: "sequence", SECOND: "token", THIRD: "sequence"},
        "algorithm.kl.estimator": {FIRST: "k1", SECOND: "k3", THIRD: "k1"},
        "algorithm.kl.placement": {FIRST: "reward", SECOND: "loss", THIRD: "reward"},
    }
    assert all(key in Reader(page).words for key in content["differing"])


def test_a_section_that_one_run_lacks_is_shown_key_by_key() -> None:
    rewards = [{"name": None, "function": "m:f", "weight": 1.0}]
    a = {"run": "a", "report": {"title": "A"}, "update": {"lora": None}, "rewards": rewards}
    b = {"run": "b", "report": {}, "update": {"lora": {"r": 8}}, "rewards": [{**rewards[0], "weight": 2.0}]}
    expected = {"update.lora.r": {"a": None, "b": 8}, "rewards.f.weight": {"a": 1.0, "b": 2.0}}
    assert comparison.differing({"a": a, "b": b}) == expected


def test_every_run_has_its_line_in_every_figure() -> None:
    runs = {name: [metrics_of(number, name) for number in range(1, ROUNDS + 1)] for name in "abcdefghijkl"}
    for chart in shared_charts(["answer"]):
        drawn = figure_of_runs(chart, runs)
        assert drawn is not None
        go.Figure(drawn)
        assert [line["name"] for line in drawn["data"]] == list(runs)
        styles = {(line["line"]["color"], line["line"]["dash"]) for line in drawn["data"]}
        assert len(styles) == len(runs)


def test_the_mean_of_what_decides_begins_at_0_as_on_the_page_of_a_run() -> None:
    (chart,) = [chart for chart in shared_charts(["answer"]) if chart.title == "Reward function answer"]
    drawn = figure_of_runs(chart, {"a": [metrics_of(1), metrics_of(2)]})
    assert (drawn or {})["layout"]["yaxis"]["rangemode"] == "tozero"


def test_a_metric_that_one_run_lacks_is_drawn_for_the_others() -> None:
    rounds = [metrics_of(number) for number in range(1, 4)]
    bare = [metrics | {"entropy": None} for metrics in rounds]
    entropy = next(chart for chart in shared_charts(["answer"]) if chart.title == "Entropy")
    drawn = figure_of_runs(entropy, {"a": rounds, "b": bare})
    assert [any(line["y"]) for line in (drawn or {})["data"]] == [True, False]
    assert figure_of_runs(entropy, {"a": bare, "b": bare}) is None


def test_the_page_fetches_nothing_and_escapes_names(folders, tmp_path) -> None:
    runs = [finished.read(folder) for folder in folders]
    content = comparison.compare(runs)
    content["differing"]["<b>key</b>"] = dict.fromkeys((FIRST, SECOND, THIRD), "</script><img src=x>")
    read = Reader(comparison_page.render(content, runs))
    assert "<b>key</b>" in read.text
    assert "</script><img src=x>" in read.text
    assert not {"img", "b"} & {tag for tag, _ in read.elements}
    assert [tag for tag, _ in read.elements].count("script") == 3
    assert [attrs["href"] for _, attrs in read.elements if "href" in attrs] == ["data:,"]
    assert any(attrs.get("http-equiv") == "Content-Security-Policy" for _, attrs in read.elements)


def test_the_same_runs_give_the_same_bytes_wherever_they_lie(folders, pair, tmp_path) -> None:
    assert page_of(pair, tmp_path / "a") == page_of(folders[:2], tmp_path / "b")


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def more_rounds(folder: Path) -> None:
    written = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(written.replace(f"rounds: {ROUNDS}", f"rounds: {ROUNDS + 5}"))


def define_right_anew(folder: Path) -> None:
    written = (folder / "config.yaml").read_text()
    assert written.count("threshold: 1.0") == 1
    (folder / "config.yaml").write_text(written.replace("threshold: 1.0", "threshold: 2.0"))


def train_second_round_again(folder: Path) -> None:
    edit(folder / "rounds" / "00002" / "metrics.json", lambda metrics: metrics.update(num_completion_tokens=7))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (shutil.rmtree, ["demo-grpo: no such folder"]),
        (remove("config.yaml"), ["demo-grpo: not the folder of a run", "config.yaml"]),
        (remove("summary.json"), ["demo-grpo/summary.json", "not finished", "snakemake --cores all --configfile"]),
        (more_rounds, ["demo-grpo/summary.json: its rounds is 40, but 45 is expected here", "snakemake"]),
        (define_right_anew, ["demo-grpo/summary.json: 7", "but by the folder's config.yaml 0.0%; finish the run with"]),
        (train_second_round_again, ["demo-grpo/summary.json: of other rounds than those in the folder", "snakemake"]),
        (remove("rounds/00007/metrics.json"), ["rounds/00007/metrics.json: no such file"]),
        (remove("evaluation/final/completions.parquet"), ["evaluation/final/completions.parquet: no such table"]),
        (remove("prompts/train/state.json"), ["prompts/train/state.json is missing"]),
    ],
)
def test_a_run_that_is_not_finished_is_named(pair, tmp_path, change, expected) -> None:
    change(pair[1])
    with pytest.raises(UserError) as error:
        page_of(pair, tmp_path)
    assert all(text in str(error.value) for text in expected)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["warmstart", "final"])
def test_a_run_that_is_not_evaluated_again_with_new_options_of_a_reward_is_named(pair, tmp_path, name) -> None:
    """The accuracy alone may be the same by accident."""
    file = pair[1] / "evaluation" / name / "completions.parquet"
    table = tables.read(file, "completions")
    facts = {key: tables.footer(table)[key] for key in ("policy", "evaluated")}
    facts |= lineage.decided(read_config(pair[1]), "evaluate")
    tables.write(file, table, table.schema, "completions", **facts)
    page_of(pair, tmp_path)
    content = yaml.safe_load((pair[1] / "config.yaml").read_text())
    content["rewards"][0]["options"] = {"lenient": True}
    (pair[1] / "config.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(
        UserError,
        match=rf"{name}/completions\.parquet: made without rewards\[0\]\.options\.lenient, but this run has true; "
        "finish the run with: snakemake",
    ):
        page_of(pair, tmp_path)


def test_a_table_that_cannot_be_read_is_an_error_and_not_an_outdated_evaluation(pair, monkeypatch) -> None:
    """An experiment would leave out the run as unfinished."""
    monkeypatch.setattr(lineage, "other_key", Mock(side_effect=UserError("Stale file handle")))
    with pytest.raises(UserError, match="Stale file handle") as error:
        finished.read(pair[1])
    assert not isinstance(error.value, finished.OutdatedEvaluationError)


def test_one_run_and_a_run_named_twice_are_refused(folders, tmp_path) -> None:
    with pytest.raises(UserError, match="at least two runs, got demo-rloo"):
        page_of(folders[:1], tmp_path)
    with pytest.raises(UserError, match="two of the runs are named 'demo-rloo'"):
        page_of([*folders, folders[0]], tmp_path)


def test_it_is_a_command(folders, tmp_path) -> None:
    outputs = tmp_path / "c.html", tmp_path / "c.json"
    outcome = done("compare", *folders, "--output", outputs[0], "--summary", outputs[1])
    assert f"see {outputs[0]}" in outcome.stderr
    assert re.search(
        r"pass@1 \d+\.\d% -> \d+\.\d%, gain [+-]\d+\.\d points \(95% interval [+-]\d+\.\d to [+-]\d+\.\d\)$",
        outcome.stderr,
        re.MULTILINE,
    )
    assert len(json.loads(outputs[1].read_text())["runs"]) == 3
    wrong = rloo("compare", folders[0], "--output", outputs[0])
    assert (wrong.returncode, wrong.stderr.count("\n")) == (1, 1)
