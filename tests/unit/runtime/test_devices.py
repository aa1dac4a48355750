"""The GPUs that a process may use, by the environment and by what the driver shows."""

import os

import pytest
from helpers import executable

from rloo_pipeline.runtime import devices

A100 = (
    "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-aaaa)\n"
    "  MIG 3g.40gb     Device  0: (UUID: MIG-bbbb)\n"
    "  MIG 3g.40gb     Device  1: (UUID: MIG-cccc)\n"
)


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A machine with a GPU, whose nvidia-smi prints a text."""
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda text: executable(tmp_path, "nvidia-smi", f"printf '{text}'")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("GPU 0: NVIDIA H200 (UUID: GPU-a)\nGPU 1: NVIDIA H200 (UUID: GPU-b)\n", ["0", "1"]),
        (A100, ["MIG-bbbb", "MIG-cccc"]),
        (A100 + "GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-d)\n", ["MIG-bbbb", "MIG-cccc", "1"]),
        ("No devices found.\n", []),
    ],
)
def test_without_the_variable_gpus_and_slices_are_those_that_the_driver_shows(driver, text, names) -> None:
    driver(text)
    assert devices.visible_gpus() == names


@pytest.mark.parametrize(
    ("variable", "names"),
    [("3, 1", ["3", "1"]), ("GPU-a", ["GPU-a"]), ("", []), ("-1", []), ("0,-1,1", ["0"]), ("NoDevFiles", [])],
)
def test_slurm_and_the_user_name_gpus_in_the_variable(driver, monkeypatch, variable, names) -> None:
    driver("GPU 0: NVIDIA H200 (UUID: GPU-a)\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert devices.visible_gpus() == names


def test_an_engine_has_what_the_other_warm_ones_leave_of_its_gpu(monkeypatch) -> None:
    monkeypatch.delenv(devices.WARM, raising=False)
    assert devices.idle_bytes("sampler") == 0
    monkeypatch.setenv(devices.WARM, "logprobs sampler trainer")
    assert devices.idle_bytes("sampler") == devices.IDLE["logprobs"] + devices.IDLE["trainer"]
