"""What is chosen on dev: the best round of each run, the best arm over its seeds, and the first of equal ones."""

from pathlib import Path

import pytest
import yaml
from helpers import mini

from rloo_pipeline.artifacts.files import read_artifact, write_json
from rloo_pipeline.artifacts.policy import chosen_of
from rloo_pipeline.errors import UserError
from rloo_pipeline.stages.select import select

DEV = {"generator": "rloo_pipeline.demo.arithmetic:problems", "options": {"split": "dev", "size": 50}}


def write_run(run: Path, seed: int, *values: float, prompts: int = 50) -> None:
    """A run whose policies of rounds 1, 2, … have these values on dev; policy 0 has the best one."""
    changes = {"rounds": len(values), "seed": seed, "evaluation": {"every": 1}, "select": {}}
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(mini(**changes, dataset={"dev": DEV})))
    names = [f"{number:05d}" for number in range(1, len(values))]
    for name, value in zip(["warmstart", *names, "final"], [1.0, *values], strict=True):
        about = {"evaluated": name, "policy": f"{run.name} {name}", "prompts": prompts}
        write_json(run / "evaluation" / name / "summary.json", {**about, "pass@k": {"1": {"value": value}}})


def choose(folder: Path, runs: dict[str, tuple[float, ...]]) -> dict:
    for name, values in runs.items():
        write_run(folder / name, int(name.rpartition("/")[2]), *values)
    select(folder / "selection.json", [*runs])
    return read_artifact(folder / "selection.json")


def test_each_run_has_its_best_round_and_the_arm_is_best_on_average(tmp_path) -> None:
    chosen = choose(
        tmp_path, {"a/0": (0.9, 0.2, 0.3), "a/1": (0.1, 0.2, 0.3), "b/0": (0.6, 0.7, 0.5), "b/1": (0.6, 0.5, 0.65)}
    )
    assert (chosen["arm"], chosen["value"], chosen["arms"]) == ("b", 0.675, {"a": 0.6, "b": 0.675})
    assert [(one["seed"], one["round"]) for one in chosen["chosen"]] == [(0, 2), (1, 3)]
    assert [best["round"] for best in chosen["best"]["a"]] == [1, 3]
    one = chosen_of(tmp_path / "selection.json", 1)
    assert (one.policy, one.digest) == (tmp_path / "b/1/policies/00003", "1 final")


def test_the_first_of_several_equal_ones_is_chosen_and_the_others_are_named(tmp_path) -> None:
    """0.1 + 0.2 + 0.3 and 0.3 + 0.2 + 0.1 differ in the last digit."""
    shares = (0.1, 0.2, 0.3)
    runs = {f"{arm}/{seed}": (0.0, shares[place], shares[place]) for arm, places in (("b", (2, 1, 0)), ("a", (0, 1, 2)))
            for seed, place in enumerate(places)}  # fmt: skip
    chosen = choose(tmp_path, runs)
    assert (chosen["arm"], chosen["tied"]) == ("b", ["a"])
    assert [one["round"] for one in chosen["chosen"]] == [2, 2, 2]


def test_a_single_run_chooses_its_round(tmp_path) -> None:
    write_run(tmp_path / "run", 3, 0.5, 0.8, 0.6)
    select(tmp_path / "run" / "selection.json", ["."])
    chosen = read_artifact(tmp_path / "run" / "selection.json")
    assert (chosen["arm"], chosen["chosen"][0]["round"]) == (None, 2)
    assert chosen_of(tmp_path / "run" / "selection.json", 3).run == tmp_path / "run"


def test_what_an_earlier_training_left_beside_an_evaluation_is_no_reason_to_fail(tmp_path) -> None:
    write_run(tmp_path / "run", 3, 0.5, 0.8, 0.6)
    for part in ("distance", "harness"):
        write_json(tmp_path / "run" / "evaluation" / "final" / f"{part}.json", {"policy": "of the training before"})
    select(tmp_path / "run" / "selection.json", ["."])
    assert read_artifact(tmp_path / "run" / "selection.json")["chosen"][0]["round"] == 2


def test_evaluations_of_other_prompts_are_refused(tmp_path) -> None:
    write_run(tmp_path / "a/0", 0, 0.5)
    write_run(tmp_path / "b/0", 0, 0.5, prompts=49)
    with pytest.raises(UserError, match=r"b/0 was evaluated on 49 prompts of dataset.dev and a/0 on 50"):
        select(tmp_path / "selection.json", ["a/0", "b/0"])
