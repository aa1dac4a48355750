"""What `rloo doctor` says of GPUs, on a machine whose driver is a script."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import executable, mini

from rloo_pipeline.before_run import gpu_kernels, gpus
from rloo_pipeline.config import Config
from rloo_pipeline.runtime import devices, environment
from rloo_pipeline.training import formats

SMI = """case "$*" in
-L) printf 'GPU 0: NVIDIA H200 (UUID: GPU-a)\\nGPU 1: NVIDIA H200 (UUID: GPU-b)\\n' ;;
*=name\\ *) echo 'NVIDIA H200' ;;
topo*) printf 'GPU0 X NV18 0-15\\nGPU1 NV18 X 0-15\\n' ;;
*) printf 'NVIDIA H200, 143771, 9.0, 580.95.05, Default\\nNVIDIA H200, 143771, 9.0, 580.95.05, Default\\n' ;;
esac"""


@pytest.fixture
def h200(tmp_path, monkeypatch):
    """A machine with two of them, and the packages for GPUs."""
    executable(tmp_path, "nvidia-smi", SMI)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setattr(devices, "packages_are_for_gpus", lambda: True)
    monkeypatch.setattr(gpus.importlib.metadata, "version", {"nvidia-cuda-runtime": "13.0.96"}.__getitem__)
    monkeypatch.setattr(gpus.image, "driver", lambda: (13, 0))
    return tmp_path


def messages(in_image: bool = False) -> dict[str, str]:
    return {finding.subject: finding.message for finding in gpus.findings(Config(**mini()), in_image)}


def test_a_machine_with_gpus_is_described_and_each_kernel_is_run(h200, monkeypatch) -> None:
    command = f"{sys.executable} -c"
    executable(h200, "python", f"echo $3 runs; [ $3 != nvcc ] || {command} 'raise OSError(\"no gcc\")'")
    monkeypatch.setattr(sys, "executable", str(h200 / "python"))
    found = list(gpus.findings(Config(**mini()), in_image=False))
    by_subject = {finding.subject: finding.message for finding in found}
    assert by_subject["GPU"] == "NVIDIA H200, 150.8 GB, compute capability 9.0"
    assert by_subject["GPUs"] == "2 for this process, so as many stages can run at once: 0, 1"
    assert by_subject["links"] == "NVLink between GPUs (NV18)"
    assert by_subject["driver"] == "580.95.05, for CUDA 13.0"
    assert (by_subject["Triton"], by_subject["nvcc"]) == ("Triton runs", "does not run: OSError: no gcc")
    assert [finding.subject for finding in found if not finding.ok] == ["nvcc"]
    assert "vllm/torch_compile_cache takes 73 s to its first token" in by_subject["vLLM's start"]


def test_in_the_image_its_own_kernels_are_not_those_of_this_environment(h200) -> None:
    assert messages(in_image=True).keys() == {"GPU", "GPUs", "links", "vLLM's start"}


def test_the_packages_for_cpus_and_an_old_driver_are_problems(h200, monkeypatch) -> None:
    monkeypatch.setattr(devices, "packages_are_for_gpus", lambda: False)
    *_, packages = gpus.findings(Config(**mini()), in_image=False)
    assert not packages.ok
    assert packages.fix == "run `make setup ACCELERATOR=cuda`"
    old = gpus.driver("525.60", (12, 0))
    assert not old.ok
    assert old.fix.startswith(
        "ask for driver 580 or newer; on data center GPUs it may be enough to put the folder `compat` of CUDA 13"
    )


def test_a_job_that_has_no_gpu_is_told_so_and_a_machine_without_one_nothing(h200, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (finding,) = gpus.findings(Config(**mini()), in_image=False)
    assert not finding.ok
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    assert not list(gpus.findings(Config(**mini()), in_image=False))


@pytest.mark.parametrize(
    ("capability", "dtype", "fix"),
    [
        ("7.0", "float16", f"use {formats.NEWER_GPU}"),
        ("7.5", "bfloat16", f"set model.dtype to float16 or float32, or use {formats.NEWER_GPU}"),
        ("7.5", "float16", ""),
        ("8.0", "bfloat16", ""),
    ],
)
def test_a_gpu_that_is_too_old_for_the_packages_or_for_bfloat16_is_a_problem(h200, capability, dtype, fix) -> None:
    executable(h200, "nvidia-smi", SMI.replace("9.0", capability))
    first, *_ = gpus.findings(Config(**mini(model={"dtype": dtype})), in_image=True)
    assert first.subject == "GPU"
    assert (first.ok, first.ok or first.fix) == (not fix, fix or True)


def test_a_slice_of_a_gpu_has_its_own_memory(h200, monkeypatch) -> None:
    executable(h200, "nvidia-smi", SMI.replace("GPU-b)", "GPU-b)\\n  MIG 1g.18gb     Device  0: (UUID: MIG-c)"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-c")
    assert messages(in_image=True)["GPU"] == "NVIDIA H200 1g.18gb, compute capability 9.0"


def test_warm_engines_cannot_share_a_gpu_in_exclusive_mode_and_what_the_driver_leaves_out_is_no_problem(h200) -> None:
    executable(h200, "nvidia-smi", SMI.replace("Default", "Exclusive_Process"))
    problems = [finding for finding in gpus.findings(Config(**mini()), in_image=True) if not finding.ok]
    assert [problem.fix for problem in problems] == ["set `workers: never`, or ask for the compute mode Default"]
    assert all(finding.ok for finding in gpus.findings(Config(**mini(workers="never")), in_image=True))
    executable(h200, "nvidia-smi", SMI.replace("Default", "[N/A]").replace("143771", "[N/A]"))
    findings = [*gpus.findings(Config(**mini()), in_image=True)]
    assert all(finding.ok for finding in findings)
    assert findings[0].message == "NVIDIA H200, memory shared with the host, compute capability 9.0"


def test_the_call_of_flash_attention_fits_its_operator(monkeypatch) -> None:
    """Traced without values; the GPU computes them."""
    compared = []
    monkeypatch.setattr(torch.testing, "assert_close", lambda *pair, **_: compared.append(pair))
    assert gpu_kernels.flash_attention("meta") == "forward and backward"
    ((out, ones),) = compared
    assert out.shape == ones.shape == (48, 4, 64)


def test_without_a_compiler_the_message_says_what_to_do(monkeypatch) -> None:
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    with pytest.raises(FileNotFoundError, match="ACCELERATOR=cuda`, or load the CUDA 13 module"):
        gpu_kernels.nvcc()


def test_the_compiler_is_that_of_the_wheels_that_setup_has_linked(tmp_path, monkeypatch) -> None:
    wheels = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(environment.importlib.util, "find_spec", {"nvidia": wheels}.get)
    monkeypatch.setenv("CUDA_HOME", "")  # so that it is removed after the test
    monkeypatch.delenv("CUDA_HOME")
    (tmp_path / "cudnn" / "lib64").mkdir(parents=True)
    (tmp_path / "cu13" / "lib").mkdir(parents=True)
    environment._use_cuda_of_wheels()
    assert "CUDA_HOME" not in os.environ, "not linked"
    (tmp_path / "cu13" / "lib64").symlink_to("lib")
    environment._use_cuda_of_wheels()
    assert os.environ["CUDA_HOME"] == str(tmp_path / "cu13")


def test_a_driver_whose_library_cannot_be_linked_is_told(tmp_path, monkeypatch) -> None:
    """FlashInfer's kernels are linked with -lcuda; containers often have libcuda.so.1 alone."""
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    executable(tmp_path / "bin", "nvcc", "#!/bin/sh\necho 'ld: cannot find -lcuda: No such file' >&2\nexit 1\n")
    with pytest.raises(FileNotFoundError, match=r"no libcuda\.so to link FlashInfer's kernels with; .*LIBRARY_PATH"):
        gpu_kernels.nvcc()
