"""Of a run that is trained again or goes on, nothing counts that the training before has left; files are read once."""

import errno
import os
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from synthetic_runs import SAMPLES, configuration, finish_run, metrics_of, train_again, write_config, write_log

from rloo_pipeline.artifacts import files
from rloo_pipeline.artifacts.files import TIMESTAMP, read_json, write_json
from rloo_pipeline.errors import UserError
from rloo_pipeline.judging import run_files
from rloo_pipeline.judging.diagnosis import STOPPED

EVALUATION = {"num_generations": SAMPLES, "every": 4}


def shown(run: Path) -> tuple[int, list[int], bool]:
    """Number of rounds, evaluated policies, and whether the run is finished."""
    of_run = run_files.read(run)
    return len(of_run.rounds), sorted(of_run.evaluations()), run_files.is_finished(run, of_run.config)


def test_rounds_and_evaluations_of_the_training_before_do_not_count(tmp_path: Path) -> None:
    run = finish_run(tmp_path / "run", configuration(rounds=8, evaluation=EVALUATION))
    assert shown(run) == (8, [0, 4, 8], True)
    train_again(run, 3)
    assert shown(run) == (3, [0], False)
    train_again(run, 8)
    assert shown(run) == (8, [0], False), "before the first evaluation"


def test_the_clock_of_the_node_that_wrote_policy_0_does_not_count(tmp_path: Path) -> None:
    """Snakemake's clock gives the time of tables and, in a folder, of one file."""
    run = finish_run(tmp_path / "run", configuration(rounds=2))
    for file in ("assets/assets.json", "prompts/counts.json", "policies/00000/manifest.json"):
        (run / file).parent.mkdir(parents=True, exist_ok=True)
        for written, late in ((run / file, 30), ((run / file).with_name(TIMESTAMP), -30)):
            written.touch()
            os.utime(written, (time.time() + late,) * 2)
    assert shown(run) == (2, [0, 2], True)
    os.utime(run / "prompts" / TIMESTAMP)
    assert shown(run)[0] == 0, "the prompts were made again"


def test_the_evaluation_of_a_shorter_run_is_not_that_of_the_longer_one(tmp_path: Path) -> None:
    run = finish_run(tmp_path / "run", configuration(rounds=2))
    longer = configuration(rounds=4)
    write_config(run, longer)
    assert shown(run) == (2, [0], False)
    for number in (3, 4):
        write_json(run_files.metrics_of(run, number), metrics_of(number))
    train_again(run, 4)
    assert shown(run) == (4, [0], False)


def test_evaluations_that_the_run_no_longer_has_do_not_count(tmp_path: Path) -> None:
    """They keep their `correct` and their number of prompts if these are changed, so a gate must not compare them."""
    run = finish_run(tmp_path / "run", configuration(rounds=8, evaluation=EVALUATION))
    write_config(run, configuration(rounds=8, evaluation=EVALUATION | {"every": None}))
    assert (run / "evaluation" / "00004" / "summary.json").exists()
    assert shown(run) == (8, [0, 8], True)


def test_a_run_is_not_finished_while_it_is_evaluated_again(tmp_path: Path) -> None:
    run = finish_run(tmp_path / "run", configuration(rounds=2))
    final = run / "evaluation" / "final" / "summary.json"
    content = read_json(final)
    final.unlink()
    assert shown(run) == (2, [0], False)
    write_json(final, content)
    assert shown(run) == (2, [0, 2], False), "the summary is of the evaluation before"


def test_held_out_accuracy_of_an_earlier_policy_does_not_count(tmp_path: Path) -> None:
    run = finish_run(tmp_path / "run", configuration(rounds=4))
    for number in range(1, 5):
        write_json(run_files.held_out_of(run, number), {"policy": number - 1, "accuracy": number / 8, "prompts": 8})
    assert run_files.read(run).accuracies() == {0: 0.125, 1: 0.25, 2: 0.375, 3: 0.5}
    train_again(run, 2)
    assert run_files.read(run).accuracies() == {0: 0.125}, "round 1 is sampled from policy 0, which is the same"


def test_held_out_accuracies_of_another_number_of_prompts_are_not_on_the_curve(tmp_path: Path) -> None:
    """`evaluation.each_round` may change during a run."""
    run = finish_run(tmp_path / "run", configuration(rounds=4))
    for number, prompts in enumerate((80, 80, 16, 16), 1):
        measured = {"policy": number - 1, "accuracy": number / 8, "prompts": prompts}
        write_json(run_files.held_out_of(run, number), measured)
    assert run_files.read(run).accuracies() == {2: 0.375, 3: 0.5}


def test_distance_and_benchmarks_of_another_policy_count_as_none(tmp_path: Path) -> None:
    run = finish_run(tmp_path / "run", configuration(rounds=1))
    folder = run / "evaluation" / "final"
    write_json(folder / "harness.json", {"policy": "final" * 8, "results": {}})
    evaluation = run_files.read_evaluation(run, "final")
    assert evaluation["distance"]["kl"] == 0.1
    assert evaluation["harness"] == {"policy": "final" * 8, "results": {}}
    for part in ("distance", "harness"):
        write_json(folder / f"{part}.json", read_json(folder / f"{part}.json") | {"policy": "another"})
    evaluation = run_files.read_evaluation(run, "final")
    assert evaluation["distance"] is evaluation["harness"] is None


def test_a_stop_is_not_missed_because_the_file_system_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_files.stopped_after(tmp_path) is None
    write_json(tmp_path / STOPPED, {"round": 3})
    assert run_files.stopped_after(tmp_path) == 3
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
    with pytest.raises(UserError, match=f"{STOPPED}: the file system failed"):
        run_files.stopped_after(tmp_path)


def test_files_of_rounds_are_read_again_only_after_they_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finish_run(tmp_path / "run", configuration(rounds=4))
    write_json(run_files.held_out_of(run, 2), {"policy": 1, "accuracy": 0.5, "prompts": 8})
    log = write_log(run, "update/00003.log", "CUDA out of memory")
    of_run = run_files.read(run)
    assert of_run.accuracies() == {1: 0.5}
    assert of_run.out_of_memory() == {3: "update of round 3: CUDA out of memory"}
    read = list[Path]()

    def read_artifact(file: Path) -> dict[str, object]:
        read.append(file)
        return files.read_artifact(file)

    monkeypatch.setattr(run_files, "read_artifact", read_artifact)
    assert run_files.read(run).accuracies() == {1: 0.5}
    assert read == []
    write_json(run_files.metrics_of(run, 4), metrics_of(4) | {"reward": 0.875})
    write_json(run_files.held_out_of(run, 2), {"policy": 1, "accuracy": 0.25, "prompts": 8})
    log.write_text("all is well")
    of_run = run_files.read(run)
    assert of_run.rounds[-1]["reward"] == 0.875
    assert of_run.accuracies() == {1: 0.25}
    assert of_run.out_of_memory() == {}
    assert read == [run_files.metrics_of(run, 4), run_files.held_out_of(run, 2)]
