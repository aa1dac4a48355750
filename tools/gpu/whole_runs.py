"""Rows that are whole runs by Snakemake: the demo, the mini configuration and its variants, runs that are killed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import machine
import soak
import whole
import yaml
from rows import Figures, RowError

from rloo_pipeline.config.section import merge
from rloo_pipeline.rewards.model import LOADED

ROOT = machine.ROOT
MINI = ROOT / ".test" / "config" / "config.yaml"
CALL = (sys.executable, "-m", "snakemake", "--cores", "all", "--configfile", "gpu-row.yaml")
OLD_LOGPS = {"old_logps": "trainer"}
"""In 16 bits sampler and trainer differ by rounding."""
STARTED = " ranks started in "
"""A line of the log of an update whose ranks started in it."""
PATIENCE = 600.0
"""Seconds until a stage that is to be killed has started."""


def mini(
    folder: Path,
    changes: Mapping[str, Any] | None = None,
    dry: bool = False,
    reward_model: bool = False,
    container: bool = False,
) -> Figures:
    """The mini configuration from its first job to its page.

    Args:
        folder: an empty folder for the row's files.
        changes: keys that differ.
        dry: only plan the jobs.
        reward_model: score with a model on the GPU as well.
        container: run stages in the image.
    """
    config = _mini_config(changes or {})
    if reward_model:
        config["rewards"] = [*config["rewards"], _model_that_scores(folder / "scorer")]
    figures = _run(folder, config, dry, *(["--sdm", "apptainer"] if container else []))
    if reward_model and not dry:
        last = (folder / "results/mini/logs/score").glob("00002-*-reward_model.log")
        if all(LOADED in log.read_text() for log in last):
            raise RowError("no process of the first round's reward model scored the second round", figures)
    return figures


def warm_ranks(folder: Path, dry: bool = False) -> Figures:
    """The mini configuration with updates on two GPUs, whose ranks stay for the second update."""
    figures = mini(folder, {"deepspeed": {"processes": 2, "zero_stage": 2}}, dry)
    if dry:
        return figures
    logs = [(folder / f"results/mini/logs/update/0000{round_}.log").read_text() for round_ in (1, 2)]
    if STARTED not in logs[0] or STARTED in logs[1]:
        raise RowError("the ranks of the first update are not those of the second", figures)
    seconds = [float(log.rpartition(" took ")[2].split()[0]) for log in logs]
    return figures | {"first update s": seconds[0], "second update s": seconds[1]}


def demo(folder: Path, dry: bool = False) -> Figures:
    """Runs the demo as `make demo` does."""
    return _run(folder, yaml.safe_load((ROOT / "config" / "config.yaml").read_text()), dry)


ONE_SMALL_ROUND = {
    "model": {"dtype": "float32"},
    "rounds": 1,
    "rollout": {"shards": 1},
    "algorithm": {"beta": 0},
}
"""Changes of the mini configuration for a rehearsal on CPUs."""


def images(folder: Path, kind: str, dry: bool = False) -> Figures:
    """The demo of images in bfloat16, two rounds of a kind of model."""
    config = yaml.safe_load((ROOT / "config" / "vision-demo.yaml").read_text())
    changes = {
        "rounds": 2,
        "model": {"dtype": "bfloat16", "build_options": {"model_type": kind}},
        "algorithm": OLD_LOGPS,
    }
    return _run(folder, merge(config, changes), dry)


def resume(
    folder: Path, reproducible: bool = False, on_cpu: bool = False, kills: Sequence[str] = ("rollout", "update")
) -> Figures:
    """A mini run that is killed in its first rollout and in its first update, with all of its processes.

    Args:
        folder: an empty folder for the row's files.
        reproducible: set the key of that name, and compare the bytes with those of an undisturbed run.
        on_cpu: run one small round, in float32.
        kills: stages during which the run is killed.
    """
    config = _mini_config(ONE_SMALL_ROUND if on_cpu else {})
    config["reproducible"] = reproducible
    scratch = tempfile.mkdtemp(prefix="rloo-gpu-")
    variables = {"TMPDIR": scratch}
    figures = _run(folder / "undisturbed", config, False, **variables) if reproducible else {}
    place = _project(folder / "killed", config)
    for stage in kills:
        _kill(place, stage, variables)
    _snakemake(place, **variables)
    left = [path for path in soak.leftovers(place, Path(scratch)) if not soak.is_unread(path)]
    if left:
        raise RowError(f"left over after the run: {', '.join(map(str, left))}")
    shutil.rmtree(scratch)
    if not figures:
        return {"kills": len(kills), **_result(place / "results" / config["run"])}
    expected, now = soak.digests(folder / "undisturbed"), soak.digests(place)
    names = sorted(expected.keys() | now.keys())
    different = [name for name in names if expected.get(name) != now.get(name)]
    if different:
        raise RowError(
            f"{len(different)} of {len(names)} files differ from those of an undisturbed run, first {different[0]}"
        )
    return {"kills": len(kills), "equal files": len(names)}


def _mini_config(changes: Mapping[str, Any]) -> dict[str, Any]:
    on_gpu = {"model": {"dtype": "bfloat16"}, "algorithm": OLD_LOGPS}
    return merge(merge(yaml.safe_load(MINI.read_text()), on_gpu), dict(changes))


def _project(folder: Path, config: Mapping[str, Any]) -> Path:
    """A folder in which Snakemake finds the workflow and a configuration."""
    place = whole.Project(folder, config["run"]).folder
    (place / "tests").symlink_to(ROOT / "tests")
    (place / "gpu-row.yaml").write_text(yaml.safe_dump(dict(config)))
    return place


def _snakemake(place: Path, *options: str, **variables: str) -> str:
    return machine.command([*CALL, *options], place, **variables)


def _run(folder: Path, config: Mapping[str, Any], dry: bool, *options: str, **variables: str) -> Figures:
    """A whole run and its figures; with `dry`, the number of its jobs."""
    place = _project(folder, config)
    if dry:
        return {"jobs planned": int(_planned(place, *options).partition("\ntotal")[2].split()[0])}
    began = time.monotonic()
    _snakemake(place, *options, **variables)
    return {"run s": round(time.monotonic() - began, 1), **_result(place / "results" / config["run"])}


def _planned(place: Path, *options: str) -> str:
    """Snakemake's list of a run's jobs, made in this process, which has imported it already."""
    sys.argv[1:] = [*CALL[3:], "--dry-run", "--logger-rloo-plain", *options]
    output, code = io.StringIO(), 0
    with contextlib.chdir(place), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            runpy.run_module("snakemake", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = int(end.code or 0)
    print(output.getvalue(), flush=True)
    if code:
        raise RowError(machine.sentence(output.getvalue(), code))
    return output.getvalue()


def _result(run: Path) -> Figures:
    """The figures of a finished run.

    Raises:
        RowError: policy 0 has failed a check, or there is no page.
    """
    if not (run / "report.html").exists():
        raise RowError(f"{run}: Snakemake succeeded, and there is no report.html")
    summary = json.loads((run / "summary.json").read_text())
    return {
        f"pass@1 {name}": round(summary[key]["accuracy"], 4)
        for name, key in (("before", "warmstart"), ("after", "final"))
    }


def _kill(place: Path, stage: str, variables: Mapping[str, str]) -> None:
    """Starts or continues the run, and ends all of its processes by SIGKILL while a stage runs."""
    environment = machine.environment(**{**variables, soak.MARK: str(place)})
    with (place / "killed.log").open("ab") as log:
        run = subprocess.Popen(
            CALL, cwd=place, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + PATIENCE
    while not soak.stages(run.pid, stage):
        if run.poll() is not None or time.monotonic() > deadline:
            code = run.poll()
            _end(place, run)
            raise RowError(f"{stage} did not start: {machine.sentence((place / 'killed.log').read_text(), code or 0)}")
        time.sleep(0.05)
    time.sleep(0.5)
    _end(place, run)


def _end(place: Path, run: subprocess.Popen[bytes]) -> None:
    """Ends a run and its processes by SIGKILL and waits until none lives."""
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    while alive := soak.marked(place):
        for process in alive:
            process.kill()
        time.sleep(0.1)


def _model_that_scores(folder: Path) -> dict[str, Any]:
    """Writes a reward model of random weights; returns the reward."""
    import torch
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    from rloo_pipeline.demo.character_model import character_tokenizer

    tokenizer = character_tokenizer(256)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    names: dict[str, Any] = {"num_labels": 1, "pad_token_id": tokenizer.pad_token_id, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    Qwen3ForSequenceClassification(Qwen3Config(**sizes, **names, intermediate_size=64)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    function = "rloo_pipeline.rewards.model:reward_model"
    return {"function": function, "batch": "all", "gpus": 1, "weight": 0.1, "options": {"model": str(folder)}}
