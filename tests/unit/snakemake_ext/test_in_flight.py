"""For which rounds Snakemake asks for held-out accuracy and pages: never for rounds that a finished run lacks; the copy
of the configuration that jobs read.
"""

from pathlib import Path

import pytest
import yaml
from helpers import mini

from rloo_pipeline.config import Config
from rloo_pipeline.config.loading import read_mapping
from rloo_pipeline.config.run_set import read_runs
from rloo_pipeline.judging.run_files import held_out_of, metrics_of
from rloo_pipeline.snakemake_ext import run_folders


def touch(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def make_round(run: Path, number: int) -> None:
    """Writes a round whose held-out completions were not scored."""
    folder = metrics_of(run, number).parent
    touch(folder / "rollouts" / "000.parquet", folder / "metrics.json", folder / "held_out" / "000.parquet")


def test_a_new_run_has_held_out_accuracy_and_pages_unless_they_are_turned_off(tmp_path: Path) -> None:
    config = Config(**mini(rounds=4))
    assert run_folders.held_out_rounds(config, tmp_path) == [1, 2, 3, 4]
    assert run_folders.page_rounds(config, tmp_path) == [1, 2, 3]
    off = Config(**mini(rounds=4, evaluation={"each_round": 0}, report={"every": 0}))
    assert run_folders.held_out_rounds(off, tmp_path) == run_folders.page_rounds(off, tmp_path) == []


@pytest.mark.parametrize(
    ("every", "rounds"), [(None, [1, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 33, 36, 39]), (20, [1, 20, 40])]
)
def test_pages_come_after_the_first_round_and_every_nth(tmp_path: Path, every: int | None, rounds: list[int]) -> None:
    config = Config(**mini(rounds=41, report={"every": every}))
    assert run_folders.page_rounds(config, tmp_path) == rounds


def test_a_killed_run_makes_what_it_lacks_and_a_finished_one_does_not(tmp_path: Path) -> None:
    config = Config(**mini(rounds=3))
    make_round(tmp_path, 1)
    make_round(tmp_path, 2)
    assert run_folders.held_out_rounds(config, tmp_path) == [1, 2, 3]
    assert run_folders.page_rounds(config, tmp_path) == []
    make_round(tmp_path, 3)
    touch(*(tmp_path / "evaluation" / name / "summary.json" for name in ("warmstart", "final")))
    touch(tmp_path / "summary.json")
    assert run_folders.held_out_rounds(config, tmp_path) == []
    touch(held_out_of(tmp_path, 1), run_folders.page_of(tmp_path, 2))
    assert (run_folders.held_out_rounds(config, tmp_path), run_folders.page_rounds(config, tmp_path)) == ([1], [2])
    folders = [tmp_path / "rounds" / "00003" / name for name in ("held_out", "scores/held_out")]
    tables = [folder / f"{shard:03d}.parquet" for folder in folders for shard in range(config.rollout.shards)]
    touch(tmp_path / "tensorboard" / "eval" / "00003.tfevents", *tables)
    assert run_folders.held_out_rounds(config, tmp_path) == [1, 3], "a measurement that was deleted is made again"
    for table in tables:
        table.unlink()
        assert run_folders.held_out_rounds(config, tmp_path) == [1], "but nothing is sampled or scored again for it"
        table.touch()
    (tmp_path / "tensorboard" / "eval" / "00003.tfevents").unlink()
    (tmp_path / "summary.json").unlink()
    assert run_folders.held_out_rounds(config, tmp_path) == [1, 2, 3]
    assert run_folders.held_out_rounds(config, tmp_path, in_job=True) == [1], "as planned before the report began again"
    longer = Config(**mini(rounds=5))
    assert run_folders.held_out_rounds(longer, tmp_path) == [1, 2, 3, 4, 5]
    assert run_folders.page_rounds(longer, tmp_path) == [2, 4]


@pytest.mark.parametrize("base", ["jobs.yaml", "of/mine.yaml"])
def test_jobs_read_the_same_experiment_from_the_copy_whatever_the_name_of_its_base(tmp_path: Path, base: str) -> None:
    (tmp_path / base).parent.mkdir(exist_ok=True)
    (tmp_path / base).write_text(yaml.safe_dump(mini()))
    file = tmp_path / "mine.yaml"
    experiment = {"experiment": "e", "base": base, "vary": {"algorithm.beta": [0, 0.1]}, "seeds": [1]}
    file.write_text(yaml.safe_dump(experiment))
    runs = read_runs(file)
    copy = run_folders.freeze_config(read_mapping(file), runs, file, tmp_path / "copy")
    kept = {run: config.model_copy(update={"functions": "keep"}) for run, config in runs.configs.items()}
    assert read_runs(copy).configs == kept
