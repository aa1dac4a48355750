"""The page of an experiment and its tables give the same figures, and say what cannot be said."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from synthetic_runs import ROUNDS, Reader, configuration, finish_run, train_again, write_completions

from rloo_pipeline.artifacts import lineage, tables
from rloo_pipeline.artifacts.files import read_json, write_json
from rloo_pipeline.commands.compare import experiment
from rloo_pipeline.config.rewards import REWARD_MODEL
from rloo_pipeline.errors import UserError
from rloo_pipeline.report import finished
from rloo_pipeline.report.experiment_page import functions, headline
from rloo_pipeline.stages.select import select

ARMS = {"plain": 0.5, "better": 0.75, "same_50%": 0.5}
KEY = "algorithm.beta"


def make(folder: Path, seeds: list[int], *, missing: str = "") -> Path:
    """An experiment whose arms end with these shares of right answers; one run may be unfinished."""
    arms = {name: {KEY: place / 10} for place, name in enumerate(ARMS)}
    about = {"experiment": "study", "base": "x", "vary": {KEY: [0.0, 0.1, 0.2]}, "seeds": seeds, "arms": arms}
    about["rounds"] = dict.fromkeys(arms, ROUNDS)
    folder.mkdir(parents=True)
    (folder / "experiment.yaml").write_text(yaml.safe_dump(about, sort_keys=False))
    for arm, learned in ARMS.items():
        for seed in seeds:
            run = finish_run(folder / arm / str(seed), configuration(run=f"study-{arm[:4]}-{seed}", seed=seed), learned)
            if f"{arm}/{seed}" == missing:
                (run / "summary.json").unlink()
    return folder


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    folder = make(tmp_path_factory.mktemp("results") / "study", [0, 1, 2, 3], missing="same_50%/2")
    experiment(folder)
    return folder


def page_of(folder: Path) -> str:
    """The text of the page of an experiment that is changed."""
    experiment(folder)
    return Reader((folder / "experiment.html").read_text(encoding="utf-8")).words


def test_the_page_has_every_arm_and_every_run_with_its_link(study) -> None:
    page = (study / "experiment.html").read_text(encoding="utf-8")
    text = Reader(page).words
    summary = read_json(study / "experiment.json")
    for row in summary["arms"]:
        low, high = row["mean"]["ci95"]
        assert f"{row['mean']['value']:.1%} {low:.1%} to {high:.1%}" in text
    assert page.count('/report.html">report</a>') == 11
    assert "! not finished" in text
    assert "Of 3 arms with 3 to 4 seeds each, better ends best" in text
    assert "no corrected p-value can be below 0.38." in text, "3 comparisons × 2 / 2^4"
    assert "it takes at least 5" in text, "the interquartile mean"
    assert "so its interval allows for other seeds, but not for other problems" in text


def test_arms_of_another_commit_of_this_package_are_told(tmp_path) -> None:
    folder = make(tmp_path / "study", [0])
    assert "Several versions" not in page_of(folder)
    file = folder / "better" / "0" / "summary.json"
    summary = read_json(file)
    own = summary["versions"]["rloo_pipeline"]
    write_json(file, summary | {"versions": summary["versions"] | {"rloo_pipeline": "0.0.1+gc0ffee"}})
    assert f"Several versions of this package made these runs (0.0.1+gc0ffee, {own});" in page_of(folder)


def test_the_headline_names_arms_that_differ_where_there_are_seeds_enough_to_tell(study) -> None:
    summary = read_json(study / "experiment.json")
    for row in summary["comparisons"]:
        row |= {"p_holm": 0.04 if row["arm"] == "better" else 0.9, "p_smallest": 0.01}
    assert "From plain differ by more than seeds and problems explain: better (" in headline(summary)
    for row in summary["comparisons"]:
        row["p_holm"] = 0.06
    assert headline(summary).endswith("No arm differs from plain by more than seeds and problems explain.")


def test_figures_are_those_of_the_runs(study) -> None:
    summary = read_json(study / "experiment.json")
    accuracies = [finished.read(study / "better" / str(seed)).accuracy.mean() for seed in range(4)]
    better = next(row for row in summary["arms"] if row["arm"] == "better")
    assert better["accuracies"] == pytest.approx(accuracies)
    pairs = {(row["arm"], row["less"]): row for row in summary["comparisons"]}
    assert len(pairs) == 3
    assert pairs["same_50%", "plain"]["seeds"] == [0, 1, 3], "only seeds that both have"
    assert all(row["p_holm"] >= row["p"] for row in pairs.values())
    rows = {row["value"]: row for row in summary["sensitivity"]}
    common = [0, 1, 3]
    assert rows[0.1]["mean"] == pytest.approx(sum(accuracies[seed] for seed in common) / 3)
    assert (rows[0.1]["arms"], rows[0.1]["seeds"]) == (1, common)
    assert "Means over the seeds that all arms have finished: 0, 1, 3." in page_of(study)


def test_each_reward_function_and_monitor_has_a_curve_where_there_are_several(study) -> None:
    page = (study / "experiment.html").read_text(encoding="utf-8")
    assert [page.count(f"<h3>{name} by round</h3>") for name in ("Reward", "answer", "worked")] == [1, 1, 1]
    runs = [finished.read(study / "plain" / str(seed)) for seed in range(2)]
    one = runs[0].config.model_copy(update={"rewards": runs[0].config.rewards[:1]})
    assert not functions({"plain": [run._replace(config=one) for run in runs]}), "it is the reward"


def test_the_tables_have_a_row_for_each_arm_and_run(study) -> None:
    head, *rows = csv.reader((study / "experiment.csv").open(encoding="utf-8"))
    assert [row[0] for row in rows] == list(ARMS)
    assert all(len(row) == len(head) for row in rows)
    assert len(list(csv.reader((study / "runs.csv").open(encoding="utf-8")))) == 1 + 12
    latex = (study / "experiment.tex").read_text(encoding="utf-8")
    assert r"same\_50\% & " in latex
    assert latex.count(r" \\") == 1 + len(ARMS)
    assert "over 3 to 4 seeds with 95" in latex
    better = next(line for line in latex.splitlines() if line.startswith("better"))
    assert better.endswith(r"& 0.375 \\"), "what 4 seeds allow, times 3 comparisons"
    assert "With fewer than 5 seeds there is no interquartile mean" in latex


def test_the_page_says_which_rows_served_for_what(study, tmp_path) -> None:
    folder = tmp_path / "study"
    shutil.copytree(study, folder)
    for file in folder.glob("*/*/config.yaml"):
        content = yaml.safe_load(file.read_text())
        content["dataset"]["dev"] = {"path": "dev.jsonl"}
        file.write_text(yaml.safe_dump(content | {"select": {"by": "dev.pass@1"}}))
    text = page_of(folder)
    assert "Nothing is chosen yet" in text
    select(folder / "selection.json", ["plain/0", *(f"better/{seed}" for seed in range(4))])
    for seed in range(4):
        write_completions(finished.read(folder / "better" / str(seed)).config, folder, "final", 0.9, 0.6)
        test = folder / "test" / str(seed)
        test.parent.mkdir(exist_ok=True)
        (folder / "evaluation" / "final").rename(test)
        summary = read_json(test / "summary.json") | {"evaluated": "test"}
        write_json(test / "summary.json", summary)
    text = page_of(folder)
    summary = read_json(folder / "experiment.json")
    chosen = summary["selection"]
    low, high = chosen["test"]["mean"]["ci95"]
    assert chosen["arm"] == "better"
    assert chosen["test"]["mean"]["value"] != pytest.approx(chosen["value"])
    assert f"{chosen['test']['mean']['value']:.1%} of its answers are right" in text
    assert "the value on test is not for these training runs. For other seeds it still is" in text
    assert "The arm with the highest mean is partly so by luck" in text
    selection = read_json(folder / "selection.json")
    selection["chosen"][0]["round"] = 1
    write_json(folder / "selection.json", selection)
    table = folder / selection["chosen"][0]["run"] / "rounds" / "00001" / "train.parquet"
    tables.write(table, [], tables.TRAIN, "train", policy="another")
    with pytest.raises(UserError, match=r"selection\.json: its policy is .*, but another is expected here"):
        page_of(folder)
    assert f"problems {low:.1%} to {high:.1%}" in text
    assert "better, test & " in (folder / "experiment.tex").read_text(encoding="utf-8")


def test_with_two_seeds_it_says_that_nothing_can_be_said(tmp_path) -> None:
    folder = make(tmp_path / "study", [0, 1])
    text = page_of(folder)
    assert "With fewer than 3 seeds, nothing can be said about training" in text
    assert "differ by more than" not in text
    summary = read_json(folder / "experiment.json")
    latex = (folder / "experiment.tex").read_text(encoding="utf-8")
    assert "over 2 seeds; difference from plain in points, paired by seed and prompt. With fewer than 3 seeds" in latex
    assert "95" not in latex.split("tabular")[0]
    assert all(row["p"] is None and row["ci95"] is None for row in summary["comparisons"])


def test_runs_that_are_trained_again_or_go_on_are_not_finished(tmp_path) -> None:
    folder = make(tmp_path / "study", [0, 1])
    train_again(folder / "better" / "1", 3)
    file = folder / "plain" / "0" / "config.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"rounds": 50}))
    experiment(folder)
    runs = {(run["arm"], run["seed"]): run for run in read_json(folder / "experiment.json")["runs"]}
    assert {key for key, run in runs.items() if not run["finished"]} == {("better", 1), ("plain", 0)}
    assert (runs["better", 1]["rounds"], runs["plain", 0]["rounds"]) == (3, 40)
    assert (folder / "experiment.html").read_text(encoding="utf-8").count("! not finished") == 2
    for arm in ARMS:
        for seed in (0, 1):
            train_again(folder / arm / str(seed), 1)
    with pytest.raises(UserError, match="no run of the experiment is finished"):
        experiment(folder)


@pytest.fixture
def changed(study, tmp_path) -> Path:
    """A copy of the experiment, to be changed."""
    return Path(shutil.copytree(study, tmp_path / "study"))


def test_arms_with_too_few_common_seeds_are_not_compared(changed) -> None:
    """Each arm has three seeds, two of them common."""
    for run in ("plain/3", "better/0"):
        (changed / run / "summary.json").unlink()
    text = page_of(changed)
    assert "Not compared with plain: better (too few common seeds), same_50% (too few common seeds)." in text
    assert "by more than seeds" not in text
    assert "corrected for" not in text
    assert "Too few seeds" not in text
    assert "fewer than 3 common seeds" in text, "what a dash means"
    assert "corrected by Holm" not in (changed / "experiment.tex").read_text(encoding="utf-8")


def test_only_comparisons_with_a_p_value_count_in_its_correction(changed) -> None:
    (changed / "plain/3/summary.json").unlink()
    text = page_of(changed)
    assert "p-values are corrected for the 2 comparisons of arms that have one (Holm)" in text
    assert "There are too few seeds to show that an arm differs from plain" in text
    assert "Not compared with plain: same_50% (too few common seeds)." in text
    assert "corrected by Holm over 2 comparisons" in (changed / "experiment.tex").read_text(encoding="utf-8")


def test_an_arm_with_too_few_seeds_takes_no_interval_from_the_others(changed) -> None:
    for seed in (1, 2, 3):
        (changed / "same_50%" / str(seed) / "summary.json").unlink(missing_ok=True)
    text = page_of(changed)
    low, high = read_json(changed / "experiment.json")["arms"][0]["mean"]["ci95"]
    assert f"{low:.1%} to {high:.1%}" in text
    assert "An arm with fewer than 3 seeds says nothing about training: it has no interval" in text
    latex = (changed / "experiment.tex").read_text(encoding="utf-8")
    assert r"with 95\% intervals" in latex
    assert "With fewer than 3 seeds there are no intervals" in latex


def test_accuracies_of_each_round_on_different_numbers_of_problems_have_no_chart(changed) -> None:
    for prompts, charts in ((8, 1), (16, 0)):
        for run in changed.glob("*/[0-9]"):
            count = prompts if run.parent.name == "better" else 8
            measured = {"policy": 0, "accuracy": 0.5, "ci95": [0.2, 0.8], "prompts": count}
            write_json(run / "rounds" / "00001" / "held_out.json", measured)
        text = page_of(changed)
        assert text.count("Held-out accuracy, each round") == charts
        assert ("The held-out accuracy of each round has no curves, because" in text) == (not charts)
        assert ("of a round; at most evaluation.num_prompts)" in text) == (not charts)


def test_arms_that_are_equally_good_end_best_together(changed) -> None:
    shutil.rmtree(changed / "same_50%")
    shutil.copytree(changed / "better", changed / "same_50%")
    assert "better and same_50% end best on average: " in page_of(changed)


def test_one_arm_alone_is_not_called_best(changed) -> None:
    for seed in range(4):
        for arm in ("plain", "same_50%"):
            (changed / arm / str(seed) / "summary.json").unlink(missing_ok=True)
    text = page_of(changed)
    assert "Only better has finished runs, 4 seeds: " in text
    assert "ends best" not in text


def test_without_a_finished_run_of_the_first_arm_no_other_arm_is_called_the_baseline(changed, caplog) -> None:
    for seed in range(4):
        (changed / "plain" / str(seed) / "summary.json").unlink()
    caplog.set_level("INFO")
    text = page_of(changed)
    sentence = "plain, the baseline, has no finished run, so no arm is compared with it."
    assert sentence in text
    assert sentence in caplog.text
    assert "Less plain" in text
    assert text.count("baseline") == 1
    assert "differ" not in text.split("Every arm less every other")[0].split("Final held-out accuracy")[0]
    assert "difference from" not in (changed / "experiment.tex").read_text(encoding="utf-8")
    head, *rows = csv.reader((changed / "experiment.csv").open(encoding="utf-8"))
    assert [row[head.index("difference")] for row in rows] == ["", ""]
    assert read_json(changed / "experiment.json")["comparisons"][0]["less"] == "better", "pairs are still compared"


def test_a_choice_of_an_arm_that_is_no_longer_there_counts_as_none(changed) -> None:
    for file in changed.glob("*/*/config.yaml"):
        content = yaml.safe_load(file.read_text())
        content["dataset"]["dev"] = {"path": "dev.jsonl"}
        file.write_text(yaml.safe_dump(content | {"select": {"by": "dev.pass@1"}}))
    select(changed / "selection.json", [f"better/{seed}" for seed in range(4)])
    about = yaml.safe_load((changed / "experiment.yaml").read_text())
    del about["arms"]["better"]
    (changed / "experiment.yaml").write_text(yaml.safe_dump(about, sort_keys=False))
    assert "Nothing is chosen yet" in page_of(changed)


def test_the_page_names_the_folder_where_snakemake_works_with_a_modules_prefix(study, tmp_path, monkeypatch) -> None:
    folder = Path("prefix", "results", "study")
    shutil.copytree(study, tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    assert f"from the files of {folder}." in page_of(folder)


@pytest.mark.parametrize(
    ("section", "key", "reason"),
    [
        ("correct", {"threshold": 0.5}, "another definition of right"),
        (
            "evaluation",
            {"max_completion_length": 64},
            "another temperature, length or generation_kwargs in evaluations",
        ),
    ],
)
def test_arms_that_were_evaluated_differently_have_no_difference(changed, section, key, reason) -> None:
    for seed in range(4):
        file = changed / "better" / str(seed) / "config.yaml"
        content = yaml.safe_load(file.read_text())
        file.write_text(yaml.safe_dump(content | {section: content[section] | key}))
    text = page_of(changed)
    pairs = {(row["arm"], row["less"]): row for row in read_json(changed / "experiment.json")["comparisons"]}
    assert {pair for pair, row in pairs.items() if row["reason"] == reason} == {
        ("better", "plain"),
        ("same_50%", "better"),
    }
    assert (pairs["better", "plain"]["value"], pairs["better", "plain"]["p"]) == (None, None)
    assert pairs["same_50%", "plain"]["p"] is not None
    assert f"Not compared with plain: better ({reason})." in text
    assert "Sensitivity" not in text
    assert "ends best" not in text
    assert "better & " in (changed / "experiment.tex").read_text(encoding="utf-8")


def test_seeds_of_an_arm_that_were_evaluated_differently_have_no_mean(changed) -> None:
    file = changed / "better" / "0" / "config.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"correct": {"threshold": 0.5}}))
    with pytest.raises(UserError, match=r"arm better: its seeds have no mean, since some have another definition"):
        experiment(changed)


def test_a_run_that_is_not_evaluated_again_with_a_new_threshold_counts_as_unfinished(changed) -> None:
    def change(run: Path) -> None:
        file = run / "config.yaml"
        file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"correct": {"threshold": 2.0}}))

    change(changed / "better" / "0")
    text = page_of(changed)
    runs = {(run["arm"], run["seed"]): run for run in read_json(changed / "experiment.json")["runs"]}
    assert {key for key, run in runs.items() if not run["finished"]} == {("better", 0), ("same_50%", 2)}
    assert (runs["better", 0]["final"], text.count("! not finished")) == (None, 2)
    for run in changed.glob("*/[0-9]"):
        change(run)
    with pytest.raises(UserError, match="no run of the experiment is finished; finish one with `rloo run`"):
        experiment(changed)


def test_a_run_that_is_not_evaluated_again_with_new_options_of_a_reward_counts_as_unfinished(changed) -> None:
    run = changed / "better" / "0"
    completions = run / "evaluation" / "final" / "completions.parquet"
    table = tables.read(completions, "completions")
    facts = {key: tables.footer(table)[key] for key in ("policy", "evaluated")}
    options = json.dumps(["evaluate", None, {"rewards": []}])
    tables.write(completions, table, table.schema, "completions", **facts, decided=options)
    page_of(changed)
    runs = {(run["arm"], run["seed"]): run for run in read_json(changed / "experiment.json")["runs"]}
    assert {key for key, run in runs.items() if not run["finished"]} == {("better", 0), ("same_50%", 2)}


def with_reward_model(folder: Path, version: Callable[[str, int], str], **options: str) -> None:
    """Makes a reward model the deciding reward of all runs; an empty version is not recorded."""
    for run in folder.glob("*/[0-9]"):
        file = run / "config.yaml"
        content = yaml.safe_load(file.read_text())
        content["rewards"][0] |= {"function": REWARD_MODEL, "options": options}
        if not options:
            content["reward_model"] = {"train": {"path": "pairs.jsonl"}}
        file.write_text(yaml.safe_dump(content))
        completions = run / "evaluation" / "final" / "completions.parquet"
        table = tables.read(completions, "completions")
        facts = {key: tables.footer(table)[key] for key in ("policy", "evaluated")}
        key = lineage.REWARD_FILES if options else lineage.REWARD_MODELS
        if digest := version(run.parent.name, int(run.name)):
            facts[key] = json.dumps({"answer": digest})
        tables.write(completions, table, table.schema, "completions", **facts)


def reasons(folder: Path) -> dict[tuple[str, str], str | None]:
    """Why pairs of arms are not compared."""
    experiment(folder)
    return {(row["arm"], row["less"]): row["reason"] for row in read_json(folder / "experiment.json")["comparisons"]}


ANOTHER = "another version of the reward functions"


def test_arms_are_not_compared_if_the_files_of_a_reward_model_were_replaced(changed) -> None:
    with_reward_model(changed, lambda arm, _: "new" if arm == "better" else "old", model="judge")
    found = {("better", "plain"): ANOTHER, ("same_50%", "plain"): None, ("same_50%", "better"): ANOTHER}
    assert reasons(changed) == found
    with_reward_model(changed, lambda _, seed: str(seed), model="judge")
    with pytest.raises(UserError, match=f"arm plain: its seeds have no mean, since some have {ANOTHER}"):
        experiment(changed)


def test_arms_are_compared_if_an_earlier_release_did_not_record_the_files_of_a_reward_model(changed) -> None:
    with_reward_model(changed, lambda arm, _: "" if arm == "better" else "old", model="judge")
    assert not any(reasons(changed).values())


def test_each_seed_may_have_trained_its_own_reward_model_if_all_arms_share_it(changed) -> None:
    with_reward_model(changed, lambda _, seed: str(seed))
    assert not any(reasons(changed).values())
    assert read_json(changed / "experiment.json")["sensitivity"]
    with_reward_model(changed, lambda arm, seed: f"{seed}{arm == 'better'}")
    assert reasons(changed)["better", "plain"] == ANOTHER
    assert reasons(changed)["same_50%", "plain"] is None


def test_without_a_finished_run_of_an_arm_a_varied_key_has_no_sensitivity(changed) -> None:
    """The mean of a value would be that of other arms than the mean of another value."""
    for seed in (0, 1, 3):
        (changed / "same_50%" / str(seed) / "summary.json").unlink()
    assert "Sensitivity" not in page_of(changed)


def test_a_run_that_a_gate_ended_is_marked(changed) -> None:
    assert "stopped" not in page_of(changed)
    shutil.rmtree(changed / "better" / "0")
    finish_run(changed / "better" / "0", configuration(run="study-bett-0", seed=0, rounds=3), 0.75)
    text = page_of(changed)
    assert "3 of 40 ! stopped" in text
    assert "better 4 ! 1 stopped" in text
    assert text.count("stopped") == 2
    assert "A gate ended better with seed 0 after round 3 of 40; in the mean of its arm, the policy" in text
    assert "1 ended before the last planned round" in (changed / "experiment.tex").read_text(encoding="utf-8")


def test_a_folder_without_an_experiment_gives_a_one_line_error(tmp_path) -> None:
    with pytest.raises(UserError, match=r"not the folder of an experiment"):
        experiment(tmp_path)
