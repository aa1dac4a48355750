"""The GPUs that a process may use, by the environment and by what the driver shows."""

import os

import pytest
from helpers import executable

from rloo_pipeline.errors import UserError
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


def test_a_slice_is_a_part_of_the_gpu_that_is_listed_before_it(driver) -> None:
    driver("GPU 0: NVIDIA H100 (UUID: GPU-d)\n" + A100.replace("GPU 0", "GPU 1"))
    devices.gpu_of_slice.cache_clear()
    assert [devices.gpu_of_slice(name) for name in ("MIG-bbbb", "MIG-cccc")] == [1, 1]
    devices.gpu_of_slice.cache_clear()


def test_a_slice_that_the_driver_does_not_list_is_an_error_until_it_does(driver) -> None:
    devices.gpu_of_slice.cache_clear()
    driver("Failed to initialize NVML\n")
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES: `nvidia-smi -L` does not list MIG-bbbb; set it to"):
        devices.gpu_of_slice("MIG-bbbb")
    driver("GPU 0: NVIDIA H100 (UUID: GPU-d)\n" + A100.replace("GPU 0", "GPU 1"))
    assert devices.gpu_of_slice("MIG-bbbb") == 1
    devices.gpu_of_slice.cache_clear()


@pytest.mark.parametrize(
    ("variable", "names"),
    [("3, 1", ["3", "1"]), ("GPU-a", ["GPU-a"]), ("", []), ("-1", []), ("0,-1,1", ["0"]), ("NoDevFiles", [])],
)
def test_slurm_and_the_user_name_gpus_in_the_variable(driver, monkeypatch, variable, names) -> None:
    driver("GPU 0: NVIDIA H200 (UUID: GPU-a)\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert devices.visible_gpus() == names


@pytest.mark.parametrize(("variable", "option"), [("3, 1", "-i 3,1 "), ("MIG-bbbb", ""), ("", ""), (None, "")])
def test_facts_are_those_of_the_gpus_that_the_variable_names(tmp_path, monkeypatch, variable, option, driver) -> None:
    executable(tmp_path, "nvidia-smi", 'echo "$*"')
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert devices.gpu_facts("name") == [f"{option}--query-gpu=name --format=csv,noheader,nounits"]


@pytest.mark.parametrize(
    ("variable", "gpus"),
    [("MIG-cccc", "1"), ("MIG-cccc,MIG-bbbb", "1"), ("0,MIG-bbbb", "0,1"), ("MIG-cccc,MIG-unknown", None)],
)
def test_facts_about_slices_are_those_of_their_gpu(tmp_path, monkeypatch, driver, variable, gpus) -> None:
    listed = "GPU 0: NVIDIA V100 (UUID: GPU-d)\n" + A100.replace("GPU 0", "GPU 1")
    executable(tmp_path, "nvidia-smi", f"[ $1 = -L ] && printf '{listed}' || echo \"$*\"")
    devices.gpu_of_slice.cache_clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    option = f"-i {gpus} " if gpus else ""
    assert devices.gpu_facts("name") == [f"{option}--query-gpu=name --format=csv,noheader,nounits"]
    devices.gpu_of_slice.cache_clear()


def test_an_engine_has_what_the_other_warm_ones_leave_of_its_gpu(monkeypatch) -> None:
    monkeypatch.delenv(devices.WARM, raising=False)
    assert devices.idle_bytes("sampler") == 0
    monkeypatch.setenv(devices.WARM, "logprobs sampler trainer")
    assert devices.idle_bytes("sampler") == devices.IDLE["logprobs"] + devices.IDLE["trainer"]


def test_the_memory_of_a_machine_is_what_its_cgroups_allow(tmp_path) -> None:
    own, old = tmp_path / "own", tmp_path / "memory" / "job"
    (tmp_path / "slurm" / "step").mkdir(parents=True)
    old.mkdir(parents=True)
    (tmp_path / "slurm" / "memory.max").write_text("4096\n")
    (tmp_path / "slurm" / "step" / "memory.max").write_text("max\n")
    (tmp_path / "memory.max").write_text("8192\n")
    (old / "memory.limit_in_bytes").write_text("2048\n")
    own.write_text("0::/slurm/step\n")
    assert [*devices._cgroup_limits(tmp_path, own)] == [4096, 8192]
    own.write_text("0::/not/mounted\n")
    assert [*devices._cgroup_limits(tmp_path, own)] == [8192], "a container's own"
    own.write_text("5:memory:/job\n3:cpu,cpuacct:/job\n")
    assert [*devices._cgroup_limits(tmp_path, own)] == [2048]
    assert [*devices._cgroup_limits(tmp_path, tmp_path / "none")] == []
