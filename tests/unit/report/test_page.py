"""The page of a run opens anywhere, escapes all text, and depends on the run's files alone."""

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import (
    NASTY,
    ROUNDS,
    SAMPLES,
    Reader,
    configuration,
    finish_run,
    make_run,
    metrics_of,
    page_words,
    train_again,
    write_completions,
    write_log,
    write_prompts,
)

from rloo_pipeline.artifacts import prompt_counts, tables
from rloo_pipeline.artifacts.files import read_json, write_json
from rloo_pipeline.artifacts.prompt_counts import Counts
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.judging.diagnosis import diagnose
from rloo_pipeline.judging.evaluation_summary import summarize_evaluation
from rloo_pipeline.report.frame import chance, points
from rloo_pipeline.report.origin import versions
from rloo_pipeline.report.page import check_figures, render, verdict
from rloo_pipeline.report.summary import so_far, summarize_run, training_prompts
from rloo_pipeline.stages.report import report
from rloo_pipeline.stages.report_so_far import report_so_far
from rloo_pipeline.version import VERSION


@pytest.fixture(scope="module")
def config() -> Config:
    return configuration().only("report")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, config: Config) -> Path:
    return make_run(tmp_path_factory.mktemp("results") / "synthetic", config)


@pytest.fixture(scope="module")
def page(run: Path, config: Config) -> str:
    return render(config, run, summarize_run(config, run))


def test_completions_are_shown_as_text(page: str) -> None:
    read = Reader(page)
    assert all(text in read.text for text in (NASTY, "<think>", "+<b>", "look at <it>"))
    assert [tag for tag, _ in read.elements].count("script") == 3
    assert "alert(1)</script>" not in page
    assert not {"img", "b"} & {tag for tag, _ in read.elements}


def test_without_a_mouse_or_javascript_the_page_can_be_read(page: str) -> None:
    elements = Reader(page).elements
    filters = [attrs for _, attrs in elements if attrs.get("class") == "tools"]
    tall = [attrs for tag, attrs in elements if tag == "pre"]
    assert sum(attrs.get("tabindex") == "0" for attrs in tall) > 60, "text that scrolls takes the keyboard's focus"
    assert all("hidden" in attrs for attrs in filters), "JavaScript shows the filters, which need it"
    assert "@media screen and (prefers-color-scheme: dark)" in page, "dark text on paper"
    levels = [int(tag[1]) for tag, _ in elements if re.fullmatch(r"h\d", tag)]
    assert all(after <= before + 1 for before, after in pairwise([0, *levels])), "headings skip no level"


def test_the_page_loads_nothing(page: str) -> None:
    read = Reader(page)
    loaded = [
        value
        for _, attrs in read.elements
        for key, value in attrs.items()
        if key in ("src", "href", "srcset", "data", "action")
    ]
    assert [value for value in loaded if not str(value).startswith("#")] == ["data:,"]
    [style] = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert not re.search(r"@import|url\(", style)
    policy = next(
        attrs["content"] for _, attrs in read.elements if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    assert str(policy).startswith("default-src 'none'; ")
    assert "http" not in str(policy)


def test_the_same_run_gives_the_same_bytes_wherever_it_lies(tmp_path: Path, config: Config, page: str) -> None:
    other = make_run(tmp_path / "elsewhere", config)
    assert render(config, other, summarize_run(config, other)) == page


def test_the_summary_has_nothing_of_the_clock(run: Path, config: Config, tmp_path: Path) -> None:
    summary = summarize_run(config, run)
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    write_log(copy, "update/00001.log", "2031-01-01 00:00:00,000 INFO rloo.time: took 99999.0 s\n")
    assert summarize_run(config, copy) == summary
    assert render(config, copy, summary) != render(config, run, summary), "report.html may differ"


def test_a_summary_read_back_from_its_file_gives_the_same_page(run: Path, config: Config, page: str) -> None:
    assert render(config, run, json.loads(json.dumps(summarize_run(config, run), sort_keys=False))) == page


def test_the_headline_has_before_after_and_gain(page: str, run: Path, config: Config) -> None:
    text = Reader(page).words
    summary = summarize_run(config, run)
    before, after = summary["warmstart"]["accuracy"], summary["final"]["accuracy"]
    assert f"On 60 held-out problems, {after:.1%} of the final policy’s answers are right;" in text
    assert f"before training with RLOO it was {before:.1%}." in text
    assert f"{points(summary['gain_ci95'][0])} to {points(summary['gain_ci95'][1])}" in text
    assert "rloo run results/synthetic/config.yaml" in text


@pytest.mark.parametrize(
    ("interval", "word"),
    [((0.1, 0.2), "above 0"), ((-0.2, -0.1), "below 0"), ((-0.1, 0.2), "contains 0"), ((0.0, 0.2), "contains 0")],
)
def test_the_verdict_follows_the_interval(interval: tuple[float, float], word: str) -> None:
    assert word in verdict({"gain_ci95": interval, "gain_p_holm": 0.01})


def test_the_verdict_depends_on_the_number_of_comparisons() -> None:
    assert "that can be chance" in verdict({"gain_ci95": (0.1, 0.2), "gain_p_holm": 0.06})
    assert "cannot tell the change from chance" in verdict({"gain_ci95": (-0.1, 0.2), "gain_p_holm": 0.06})


def test_the_verdict_does_not_contradict_a_small_p_and_is_never_certain() -> None:
    assert "although p is small" in verdict({"gain_ci95": (-0.1, 0.2), "gain_p_holm": 0.01})
    loss = verdict({"gain_ci95": (-0.2, -0.1), "gain_p_holm": 0.01})
    gain = verdict({"gain_ci95": (0.1, 0.2), "gain_p_holm": 0.01})
    assert loss == gain.replace("above", "below").replace("gain", "loss")


def test_the_table_has_corrected_p_values_with_an_explanation(page: str, run: Path, config: Config) -> None:
    summary = summarize_run(config, run)
    text = Reader(page).words
    rows = len(summary["gains"])
    assert f"The table makes {rows} comparisons, so its p-values are corrected for that many (Holm)" in text
    smallest = min(summary["gains"].values(), key=lambda one: one["p"])
    assert smallest["p_holm"] == rows * smallest["p"]
    assert f"{chance(summary['gain_p'])} by itself, {chance(summary['gain_p_holm'])} corrected" in text
    assert "They count each problem as independent of the others" in text
    assert "No interval can allow for a rare reward that hardly any answer got." in text


def test_a_mean_without_spread_has_no_interval(tmp_path: Path, config: Config) -> None:
    """A reward of 0.5 everywhere says nothing about its spread; 0 right answers are a share, which has an interval."""
    run = make_run(tmp_path / "run", config)
    for name in ("warmstart", "final"):
        for file, samples in (("completions", SAMPLES), ("greedy", 1)):
            path = run / "evaluation" / name / f"{file}.parquet"
            table = tables.read(path, path.stem)
            for column, value in (("scores/answer", 0.0), ("scores/worked", 0.5)):
                place = table.schema.get_field_index(column)
                table = table.set_column(place, table.schema.field(column), [[value] * len(table)])
            tables.write(path, table, table.schema, path.stem, policy=name * 8, evaluated=name)
            evaluation = summarize_evaluation(config, table, samples)
            assert evaluation["rewards"]["worked"] == {"value": 0.5, "ci95": None}
            assert (evaluation["accuracy"], evaluation["ci95"][0], round(evaluation["ci95"][1], 3)) == (0.0, 0.0, 0.06)
            summary_file = run / "evaluation" / name / "summary.json"
            if file == "completions":
                write_json(summary_file, read_json(summary_file) | evaluation)
    summary = summarize_run(config, run)
    assert summary["gains"]["rewards/worked"] == {"value": 0.0, "ci95": None, "p": 1.0, "prompts": 60, "p_holm": 1.0}
    assert summary["gain_ci95"] == pytest.approx((-0.0596, 0.0596), abs=1e-4)
    assert "all equal" in Reader(render(config, run, summary)).text


def test_the_command_to_reproduce_a_run_names_its_folder(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an experiment, and with a module's prefix."""
    folder = Path("study", "results", "demo-algorithms", "rloo", "0")
    make_run(tmp_path / folder, config)
    monkeypatch.chdir(tmp_path)
    text = page_words(tmp_path / folder, config)
    assert f"rloo run {folder}/config.yaml" in text
    assert f"from the files of {folder}." in text


def test_a_log_ratio_of_greedy_or_masked_completions_is_not_called_a_kl(
    tmp_path: Path, config: Config, page: str
) -> None:
    assert "KL from the warm start, nats per completion" in page
    run = make_run(tmp_path / "run", config)
    file = run / "evaluation" / "final" / "distance.json"
    far = read_json(file)
    for changes, kind in (({"temperature": 0.0}, "greedy completions"), ({"masked_by": "min_tokens"}, "min_tokens")):
        write_json(file, far | changes)
        text = Reader(render(config, run, summarize_run(config, run))).text
        assert re.search(f"log-ratio to the warm start, of (completions under )?{kind}, nats per completion", text)
        assert "KL from the warm start, nats per completion" not in text


def test_a_long_prompt_stands_on_the_page_once_and_shortened(tmp_path: Path, config: Config) -> None:
    run = make_run(tmp_path / "run", config)
    shutil.rmtree(run / "prompts")
    for part in ("train", "eval"):
        write_prompts(run / "prompts" / part, context="x" * 10_000)
    text = Reader(render(config, run, summarize_run(config, run))).text
    longest = max(map(len, re.findall("x+", text)))
    shown = len(re.findall("x{3000}", text))  # of each prompt the first half; in the second its last characters follow
    assert longest == 3000
    assert 0 < shown == len(re.findall("(?<!x)x{199}…", text))


def test_evaluations_of_different_prompts_are_not_compared(tmp_path: Path, config: Config) -> None:
    run = make_run(tmp_path / "run", config)
    summary = summarize_run(config, run)
    file = run / "evaluation" / "final" / "completions.parquet"
    table = tables.read(file, "completions")
    tables.write(file, table.slice(SAMPLES), table.schema, "completions", policy="final" * 8, evaluated="final")
    with pytest.raises(UserError, match="final"):
        render(config, run, summary)


def test_a_distance_from_another_policy_0_is_refused(tmp_path: Path, config: Config) -> None:
    run = make_run(tmp_path / "run", config)
    file = run / "evaluation" / "final" / "distance.json"
    write_json(file, read_json(file) | {"reference": "of another run"})
    with pytest.raises(UserError, match=r"distance\.json: its reference is of another run, but warmstart"):
        summarize_run(config, run)


def test_a_run_of_one_round_without_a_gain_has_a_page_too(tmp_path: Path) -> None:
    config = configuration(rounds=1, report={}, evaluation={"num_generations": SAMPLES}).only("report")
    run = make_run(tmp_path / "run", config)
    write_completions(config, run, "warmstart", 0.5, 0.0)
    write_completions(config, run, "final", 0.5, 0.0)
    text = page_words(run, config)
    assert "That is a change of 0.0 percentage points" in text
    assert "95% interval −6.0 to +6.0" in text, "0 right answers of 60 say little about other problems"


def test_a_failure_that_was_accepted_stays_on_the_page(page: str) -> None:
    text = Reader(page).words
    assert "This run continued despite failed checks: checks.accept names teaching" in text
    assert "fail, accepted" in text


def test_policies_in_between_are_shown(tmp_path: Path) -> None:
    every = {"num_generations": SAMPLES, "every": 20}
    config = configuration(evaluation=every).only("report")
    run = make_run(tmp_path / "run", config)
    assert "Held-out accuracy" in page_words(run, config)


def test_benchmarks_are_shown_next_to_the_held_out_prompts(tmp_path: Path) -> None:
    harness = {"tasks": ["gsm8k"]}
    config = configuration(rounds=1, evaluation={"num_generations": SAMPLES, "harness": harness}).only("report")
    run = make_run(tmp_path / "run", config)
    for name, value in (("warmstart", 0.125), ("final", 0.625)):
        results = {"gsm8k": {"alias": "gsm8k", "exact_match,strict": value, "exact_match_stderr,strict": 0.03125}}
        results["wiki"] = {"word_perplexity,none": 8.0, "word_perplexity_stderr,none": "N/A"}
        counts = {"n-shot": {"gsm8k": 5}, "n-samples": {"gsm8k": {"original": 1319, "effective": 1319}}}
        counts["higher_is_better"] = {"gsm8k": {"exact_match": True}, "wiki": {"word_perplexity": False}}
        harness_json = {"policy": name * 8, "lm_eval": "0.4.13", "results": results, **counts}
        write_json(run / "evaluation" / name / "harness.json", harness_json)
    text = page_words(run, config)
    assert "by lm-eval 0.4.13" in text
    assert "5 examples, 1319 problems0.125 ± 0.0312" in text
    assert "wiki word_perplexity, – examples, – problems; lower is better8 ± –" in text
    assert "0.125 ± 0.0312" in text
    assert "0.625 ± 0.0312" in text


def test_benchmarks_of_another_policy_are_left_out_and_refused_only_where_they_are_asked_for(tmp_path: Path) -> None:
    """A benchmark is in a configuration file of its own, so a run can go on without it."""
    every = {"num_generations": SAMPLES, "every": 20}
    config = configuration(evaluation=every).only("report")
    run = make_run(tmp_path / "run", config)
    results = {"gsm8k": {"exact_match,strict": 0.5, "exact_match_stderr,strict": 0.03125}}
    for name in ("warmstart", "final"):
        harness_json = {"policy": name * 8, "lm_eval": "0.4.13", "results": results}
        write_json(run / "evaluation" / name / "harness.json", harness_json)
    text = page_words(run, config)
    assert "Benchmarks, by lm-eval 0.4.13Warm startFinal policy gsm8k" in text, "none of round 20"
    assert text.count("0.5 ± 0.0312") == 2
    write_json(run / "evaluation" / "final" / "harness.json", harness_json | {"policy": "another"})
    text = page_words(run, config)
    assert "Benchmarks" not in text
    asked = configuration(evaluation=every | {"harness": {"tasks": ["gsm8k"]}}).only("report")
    with pytest.raises(UserError, match=r"final/harness\.json: its policy is another"):
        summarize_run(asked, run)


def test_mixed_groups_stand_in_the_order_of_their_size() -> None:
    """As checks.json has them, whose keys are sorted as text."""
    read = json.loads(json.dumps({"expected_mixed": {str(2**n): n / 10 for n in range(1, 7)}}, sort_keys=True))
    assert next(iter(read["expected_mixed"])) == "16"
    [drawn] = check_figures(read)["plot-mixed"]["data"]
    assert (drawn["x"], drawn["y"]) == (["2", "4", "8", "16", "32", "64"], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])


def test_a_run_in_flight_has_the_same_page_with_what_is_there(tmp_path: Path, config: Config) -> None:
    run = make_run(tmp_path / "run", config)
    shutil.rmtree(run / "evaluation" / "final")
    shutil.rmtree(run / "rounds" / f"{ROUNDS:05d}")
    (run / "rounds" / f"{ROUNDS:05d}").mkdir()
    for number in range(1, ROUNDS + 1):
        write_json(run / "rounds" / f"{number:05d}" / "held_out.json", held_out_of(number, 76))
    output = run / "pages" / "00039.json"
    report_so_far(config, run, output)
    assert read_json(output) == {"round": ROUNDS - 1, "versions": versions()}
    page = (run / "report.html").read_text()
    text = Reader(page).words
    assert "39 of 40 rounds are done. 80.0% of the answers of policy 39 to the first 76 held-out problems" in text
    assert "it was 2.0% for policy 0" in text
    assert all(part in text for part in ("Held-out accuracy", "Samples that teach little", "Round 20", "When each job"))
    assert "Held-out completions, side by side" not in text
    figures = json.loads(page.split('id="figures">')[1].split("</script>")[0])
    band, sampled, greedy, each_round = figures["plot-1"]["data"]
    assert each_round["y"] == [number / 50 for number in range(1, ROUNDS + 1)]
    assert [value for value in sampled["y"] if value is not None] == sampled["y"][:1], "only the warm start"
    assert len(greedy["y"]) == ROUNDS
    assert max(value for value in band["y"] if value is not None) == 1.0


def held_out_of(number: int, prompts: int) -> dict[str, Any]:
    """held_out.json of a round."""
    facts = {"policy": number - 1, "accuracy": number / 50, "ci95": [0.0, number / 40]}
    return facts | {"prompts": prompts, "num_completion_tokens": 10 * prompts}


def test_tokens_of_evaluations_include_those_beside_rollouts_and_the_curve_has_one_number_of_problems(
    tmp_path: Path, config: Config
) -> None:
    run = make_run(tmp_path / "run", config)
    before = summarize_run(config, run)["tokens"]["evaluation"]
    for number in range(1, ROUNDS + 1):
        file = run / "rounds" / f"{number:05d}" / "held_out.json"
        write_json(file, held_out_of(number, 76 if number < ROUNDS - 1 else 20))
    summary = summarize_run(config, run)
    assert summary["tokens"]["evaluation"] - before == 10 * ((ROUNDS - 2) * 76 + 2 * 20)
    page = render(config, run, summary)
    assert f"Held-out accuracies of {ROUNDS - 2} earlier rounds are left out, because" in Reader(page).words
    figures = json.loads(page.split('id="figures">')[1].split("</script>")[0])
    assert [value for value in figures["plot-1"]["data"][-1]["y"] if value is not None] == [39 / 50, 40 / 50]
    assert "of the answers of policy 39 to the first 20" not in Reader(page).words
    for number in range(2, ROUNDS + 1):
        write_json(run / "rounds" / f"{number:05d}" / "held_out.json", held_out_of(number, 20))
    text = Reader(render(config, run, summarize_run(config, run))).words
    assert (
        "The held-out accuracy of 1 earlier round is left out, because evaluation.each_round, "
        "or an evaluation.num_prompts below it, had another value then."
    ) in text


def test_answers_without_a_score_of_the_deciding_reward_count_as_wrong_and_are_named(tmp_path: Path) -> None:
    config = configuration(rounds=1).only("report")
    run = make_run(tmp_path / "run", config)
    assert "without a score of answer" not in page_words(run, config)
    folder = run / "evaluation" / "final"
    table = tables.read(folder / "completions.parquet", "completions")
    rows = table.to_pylist()
    for row in rows[:30]:
        row |= {"scores/answer": None, "reward": None}
    about = {"policy": "final" * 8, "evaluated": "final"}
    tables.write(folder / "completions.parquet", rows, table.schema, "completions", **about)
    table = tables.read(folder / "completions.parquet", "completions")
    summary = read_json(folder / "summary.json") | summarize_evaluation(config, table)
    assert summary["unscored"] == 30
    assert summary["accuracy"] == sum(row["scores/answer"] == 1 for row in rows) / len(rows)
    write_json(folder / "summary.json", summary)
    assert f"without a score of answer count as wrong0.0%{30 / len(rows):.1%}" in page_words(run, config)


def test_a_page_of_a_run_in_flight_replaces_no_last_page_and_ends_no_run(tmp_path: Path, config: Config) -> None:
    run = finish_run(tmp_path / "run", configuration())
    (run / "report.html").write_text("the last page")
    report_so_far(config, run, run / "pages" / "00001.json")
    assert (run / "report.html").read_text() == "the last page"
    (run / "summary.json").unlink()
    (run / "warmstart" / "checks.json").write_text("{")
    report_so_far(config, run, run / "pages" / "00002.json")
    assert (run / "report.html").read_text() == "the last page"
    assert (run / "pages" / "00002.json").exists()


def test_an_evaluation_that_cannot_be_read_ends_no_run_in_flight(tmp_path: Path, config: Config) -> None:
    run = make_run(tmp_path / "run", config)
    (run / "evaluation" / "warmstart" / "summary.json").write_text("{")
    report_so_far(config, run, run / "pages" / "00001.json")
    assert read_json(run / "pages" / "00001.json") == {"round": 1, "versions": versions()}
    assert not (run / "report.html").exists()


def test_the_page_of_a_run_that_is_trained_again_shows_the_new_rounds_alone(tmp_path: Path) -> None:
    config = configuration(evaluation={"num_generations": SAMPLES, "every": 2})
    run = finish_run(tmp_path / "run", config)
    train_again(run, 3)
    left = run / "evaluation" / "00002"
    (left / "distance.json").write_text("{")
    report_so_far(config.only("report"), run, run / "pages" / "00003.json")
    page = (run / "report.html").read_text()
    assert "3 of 40 rounds are done" in Reader(page).words
    figures = json.loads(page.split('id="figures">')[1].split("</script>")[0])
    assert figures["plot-1"]["data"][1]["x"] == [1, 2, 3]


def test_a_lack_of_memory_stands_on_the_page(tmp_path: Path) -> None:
    config = configuration(rounds=6).only("report")
    run = make_run(tmp_path / "run", config)
    write_log(run, "evaluate/final.log", "torch.OutOfMemoryError: CUDA out of memory")
    text = page_words(run, config)
    assert "out of memory6evaluate/final: torch.OutOfMemoryError: CUDA out of memory" in text


def test_rounds_of_another_commit_of_this_package_are_told(tmp_path: Path, monkeypatch) -> None:
    config = configuration(rounds=2).only("report")
    monkeypatch.setenv(VERSION, "0.1.0+gc0ffee")
    run = make_run(tmp_path / "run", config)
    assert "earlier_versions" not in summarize_run(config, run)
    monkeypatch.setenv(VERSION, "0.1.0+gdecade.changed")
    summary = summarize_run(config, run)
    assert summary["earlier_versions"] == {"rloo_pipeline": {"0.1.0+gc0ffee": 1}}
    assert summary["versions"]["rloo_pipeline"] == "0.1.0+gdecade.changed"


def test_a_package_that_changed_during_the_run_is_named_with_its_versions(tmp_path: Path, page: str, caplog) -> None:
    caplog.set_level("INFO")
    config = configuration(rounds=3).only("report")
    run = make_run(tmp_path / "run", config)
    earlier = versions() | {"torch": "1.0"}
    for number, then in ((1, earlier), (2, earlier | {"gone": "3"})):
        write_json(run / "pages" / f"{number:05d}.json", {"round": number, "versions": then})
    report(config, run, tmp_path / "summary.json", tmp_path / "report.html")
    now = versions()["torch"]
    assert read_json(tmp_path / "summary.json")["earlier_versions"] == {"torch": {"1.0": 1}, "gone": {"3": 2}}
    assert f"warn: torch was 1.0 from round 1 and is {now} now: " in "\n".join(caplog.messages)
    text = Reader((tmp_path / "report.html").read_text()).text
    assert "gone has changed since rounds used it: 3 from round 2, not installed when this page was made." in text
    for number in (1, 2):  # one of older code, and one whose packages are the same
        write_json(
            run / "pages" / f"{number:05d}.json", {"round": number} | ({"versions": versions()} if number == 1 else {})
        )
    assert "earlier_versions" not in summarize_run(config, run)
    assert "since rounds used it" not in page


def test_symptoms_stand_on_the_page_and_at_the_end_on_the_terminal(tmp_path: Path, page: str, caplog) -> None:
    caplog.set_level("INFO")
    assert "No symptom" in Reader(page).text
    config = configuration(rounds=6).only("report")
    run = make_run(tmp_path / "run", config)
    equal_rewards = {"frac_reward_zero_std": 1.0, "reward_std": 0.0, "reward": 0.0}
    for number in range(1, 7):
        write_json(run / "rounds" / f"{number:05d}" / "metrics.json", metrics_of(number) | equal_rewards)
    text = page_words(run, config)
    assert "No symptom" not in text
    assert "warmstart.sft" in text
    symptoms = diagnose([metrics_of(n) | equal_rewards for n in range(1, 7)], config.gates, monitors=["worked"])
    assert symptoms
    assert all(symptom.title in text and symptom.cure in text for symptom in symptoms)
    report(config, run, tmp_path / "summary.json", tmp_path / "report.html")
    lines = caplog.messages
    assert all((symptom.line() in lines) == (symptom.last == 6) for symptom in symptoms)
    assert "ended by a gate" not in text
    for number, said in ((6, True), (5, False)):  # a run that has gone on since
        write_json(run / "stopped.json", {"round": number, "symptoms": []})
        assert ("· 6 rounds, ended by a gate " in page_words(run, config)) == said


def test_the_page_says_how_rounds_draw_prompts_where_policy_0_was_not_sampled_for_it(tmp_path: Path) -> None:
    source = {"path": "rows.jsonl"}
    dataset = {"train": source, "eval": source, "select": {"weights": "online"}}
    config = configuration(rounds=1, dataset=dataset, correct={"reward": "answer"})
    text = page_words(make_run(tmp_path / "run", config), config.only("report"))
    assert "where p is the pass rate in earlier rounds: prompts that are solved half of the time" in text


def test_prompts_with_unscored_answers_are_at_the_nearest_pass_rate_and_the_page_says_how_many(tmp_path) -> None:
    source = {"path": "rows.jsonl"}
    dataset = {"train": source, "eval": source, "select": {"pass_rate": [0.2, 0.8], "num_generations": 4}}
    config = configuration(rounds=1, dataset=dataset, correct={"reward": "answer"})
    run = make_run(tmp_path / "run", config)
    counted = [Counts(1, 4), Counts(1, 3), Counts(2, 3), Counts(1, 2), Counts(0, 1), Counts()]
    file = run / "warmstart" / "difficulty" / "000.parquet"
    prompt_counts.write(file, dict(zip("abcdef", counted, strict=True)), 0, shard=0, policy="0")
    chosen = training_prompts(config, run)
    assert (chosen["right"], chosen["between"], chosen["unscored"]) == ([1, 2, 1, 1, 0], 2, 1)
    text = page_words(run, config.only("report"))
    assert "2 of the prompts, some of whose answers could not be scored, are at the nearest share." in text


def test_the_page_says_which_round_was_chosen_and_which_rows_served_for_what(tmp_path) -> None:
    source = {"path": "rows.jsonl"}
    evaluation = {"num_generations": 2, "every": 20}
    dataset = {"train": source, "dev": source, "eval": source}
    config = configuration(dataset=dataset, evaluation=evaluation, select={})
    run = make_run(tmp_path / "run", config)
    final = read_json(run / "evaluation" / "final" / "summary.json")
    best = {"run": ".", "seed": config.seed, "round": 20, "value": 0.7125, "policy": final["policy"]}
    write_json(run / "selection.json", {"chosen": [best]})
    write_json(run / "test" / str(config.seed) / "summary.json", final | {"evaluated": "test"})
    only = config.only("report")
    text = page_words(run, only)
    assert "Of 2 policies, that of round 20 is the first with the best pass@1 on dataset.dev: 71.2%" in text
    assert f"It alone was evaluated on dataset.eval: {final['accuracy']:.1%} of its answers" in text
    evaluations = [read_json(file) for file in run.glob("evaluation/*/summary.json")]
    parts = [part for evaluation in (*evaluations, final) for part in (evaluation, evaluation["greedy"])]
    sampled = sum(part["num_completion_tokens"] for part in parts)
    assert f"{sampled:,} in evaluations" in text, "with greedy decoding and the test"
    in_flight = Reader(render(only, run, so_far(only, run))).words
    assert "Here, the held-out problems are those of dataset.dev, on which the choice is made." in in_flight
    write_json(run / "selection.json", {"chosen": [best | {"policy": "another"}]})
    with pytest.raises(UserError, match="its policy is"):
        summarize_run(only, run)
