"""The cost in the report: GPUs that a job really had times its seconds, and CPU time, including work in a worker."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic_runs import Reader, configuration, make_run, page_words

from rloo_pipeline.report.jobs import costs, jobs_of
from rloo_pipeline.report.page import render
from rloo_pipeline.report.summary import summarize_run
from rloo_pipeline.runtime import gpu_claims
from rloo_pipeline.runtime.ranks import RENDEZVOUS

STAGE = (
    "from pathlib import Path; from rloo_pipeline.runtime import cost, environment, gpu_claims; "
    "environment.prepare(Path({log!r})); {statement}; cost.end()"
)


def add_gpus(run: Path, stage: str, gpus: str) -> None:
    """The line that a stage on GPUs logs before the line that every stage logs."""
    log = run / "logs" / f"{stage}.log"
    log.write_text(f"2026-11-01 12:00:00,000 INFO rloo.time: used {gpus}\n{log.read_text()}")


def test_the_page_has_gpu_seconds_per_stage_and_in_total(tmp_path: Path) -> None:
    config = configuration(rounds=3).only("report")
    run = make_run(tmp_path / "run", config)
    assert "No GPU was used." in Reader(render(config, run, summarize_run(config, run))).text
    add_gpus(run, "rollout/00001-000", "2 x NVIDIA H100 80GB HBM3")  # 4000 s
    add_gpus(run, "update/00001", "16 x NVIDIA H100 80GB HBM3")  # 700 s
    text = page_words(run, config)
    hours = {cost.stage: cost.gpu_hours for cost in costs(jobs_of(run, 3))}
    assert hours == {"rollout": pytest.approx(8000 / 3600), "update": pytest.approx(11200 / 3600), "prompts": 0}
    assert "rollout11 h 7 min–2.22–" in text
    assert "update112 min–3.11–" in text
    assert "all jobs31 h 18 min–5.33–" in text
    assert "count every GPU that a job could see (NVIDIA H100 80GB HBM3)" in text


def test_the_cost_of_a_stage_on_a_worker_is_that_of_the_worker(tmp_path) -> None:
    """Snakemake measures the client of a worker, which only waits."""
    run = tmp_path / "run"
    log = str(run / "logs" / "update" / "00001.log")
    burn = "until = time.process_time() + {}\nwhile time.process_time() < until: pass\n"
    code = (
        "import time; from pathlib import Path; from rloo_pipeline.runtime import cost, environment\n"
        f"{burn.format(0.6)}"
        f"held = bytearray(200_000_000); del held; environment.prepare(Path({log!r}))\n"
        f"cost.begin(time.time()); held = bytearray(90_000_000)\n{burn.format(0.2)}cost.end()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    benchmark = run / "benchmarks" / "update" / "00001.tsv"
    benchmark.parent.mkdir(parents=True)
    benchmark.write_text("s\tmax_rss\tcpu_time\n3\t12\t0.02\n")
    [job] = jobs_of(run, 1)
    assert 0.2 <= (job.cpu_seconds or 0) < 0.6, "and nothing of the stages before"
    assert 90 <= (job.memory_mb or 0) < 200
    benchmark.write_text("s\tmax_rss\tcpu_time\n3\t5000\t70\n")  # ranks that it started
    assert [(again.cpu_seconds, again.memory_mb) for again in jobs_of(run, 1)] == [(70, job.memory_mb)]


def test_peak_memory_is_that_of_the_largest_rank(tmp_path) -> None:
    log = tmp_path / "run" / "logs" / "update" / "00001.log"
    code = "from rloo_pipeline.runtime import cost, environment, gpu_claims; environment.prepare(None); "
    code += "held = b'x' * 60_000_000; cost.end()"
    subprocess.run([sys.executable, "-c", STAGE.format(log=str(log), statement="pass")], check=True)
    [alone] = jobs_of(tmp_path / "run", 1)
    with log.open("a") as shared:
        rank = os.environ | {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
        subprocess.run([sys.executable, "-c", code], check=True, env=rank, stderr=shared)
    [with_rank] = jobs_of(tmp_path / "run", 1)
    assert 55 <= (with_rank.memory_mb or 0) - (alone.memory_mb or 0) < 90
    assert with_rank.cpu_seconds == alone.cpu_seconds


def driver(folder: Path, output: str) -> dict[str, str]:
    """An environment whose nvidia-smi prints this."""
    folder.mkdir()
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\necho '{output}'\n")
    (folder / "nvidia-smi").chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("statement", "driver_output", "gpus", "gpu"),
    [
        ("gpu_claims.note_subprocess_gpus(3)", "NVIDIA L4", 3, "NVIDIA L4"),
        ("gpu_claims.note_subprocess_gpus(3)", "", 0, None),  # requested, but the machine has none
        ("gpu_claims.note_subprocess_gpus(0)", "NVIDIA L4", 0, None),
        ("gpu_claims.note_subprocess_gpus(3); cost.begin(0.0)", "NVIDIA L4", 0, None),  # another stage of the worker
    ],
)
def test_a_stage_whose_reward_function_has_the_gpus_counts_them(statement, driver_output, gpus, gpu, tmp_path) -> None:
    log = tmp_path / "run" / "logs" / "score" / "00001-000-judge.log"
    code = STAGE.format(log=str(log), statement=statement)
    environment = driver(tmp_path / "bin", driver_output)
    outcome = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
    assert outcome.stdout + outcome.stderr == b"", "the log is enough"
    [job] = jobs_of(tmp_path / "run", 1)
    assert (job.stage, job.gpus, job.gpu) == ("score", gpus, gpu)


@pytest.mark.parametrize(
    ("visible_gpus", "nodes", "ranks", "granted"),
    [
        (8, None, 1, 8),  # one process that has the node
        (8, None, 8, 8),
        (8, 2, 16, 16),  # two nodes, each rank sees all of its own
        (1, 2, 16, 16),  # two nodes, each rank bound to one
    ],
)
def test_an_update_on_several_nodes_counts_all_of_them(visible_gpus, nodes, ranks, granted, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", str(nodes or 4))  # a job of more nodes than the stage has
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    if nodes:
        monkeypatch.setenv(RENDEZVOUS, "file")
    else:
        monkeypatch.delenv(RENDEZVOUS, raising=False)
    assert gpu_claims._job_gpus(visible_gpus) == granted
