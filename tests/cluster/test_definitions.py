"""The definitions of the images, built without the packages of their %post: files, arguments, labels, help, shell
syntax.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT
from slurm_project import missing

from rloo_pipeline.before_run.image import DRIVERS

ARGUMENTS = {"bootstrap": "localimage", "version": "9.9", "lock": "0123456789ab", "commit": "c0ffee"}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """An almost empty system with an sh that only prints its environment."""
    folder = tmp_path_factory.mktemp("base")
    for name in ("bin", "dev", "etc", "proc", "root", "sys", "tmp", "usr", "var"):
        (folder / name).mkdir()
    (folder / "main.c").write_text(
        "#include <stdio.h>\nextern char **environ;\nint main(void) { while (*environ) puts(*environ++); return 0; }\n"
    )
    subprocess.run(["gcc", "-static", "-o", folder / "bin" / "sh", folder / "main.c"], check=True)
    return folder


@pytest.mark.parametrize("name", ["rloo-cuda", "rloo-cpu", "reward-sandbox"])
def test_a_definition_is_whole(name, base, tmp_path) -> None:
    if shutil.which("apptainer") is None:
        missing("no Apptainer here: run `make cluster-up` (Debian 12, as root)")
    options = [f"--build-arg={key}={value}" for key, value in {**ARGUMENTS, "base": str(base)}.items()]
    image_folder = tmp_path / "image"
    outcome = subprocess.run(
        ["apptainer", "build", "--fakeroot", "--notest", "--sandbox", *options, image_folder, f"containers/{name}.def"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    about = image_folder / ".singularity.d"
    labels = json.loads((about / "labels.json").read_text())
    assert labels["org.opencontainers.image.version"] == ARGUMENTS["version"]
    assert labels["org.opencontainers.image.revision"] == ARGUMENTS["commit"]
    assert labels["rloo.lock"] == ARGUMENTS["lock"]
    filled = (about / "Singularity").read_text()
    assert not re.search(r"\{\{ \w+ \}\}", filled.replace("fills in {{ }}", ""))
    post = filled.split("\n%post\n")[1].split("\n%")[0]
    assert subprocess.run(["sh", "-n"], input=post, text=True, check=False).returncode == 0
    if name == "reward-sandbox":
        return
    assert "bubblewrap" in post, "code_reward finds no other sandbox inside an image"
    assert 'exec rloo "$@"' in (about / "runscript").read_text()
    assert (image_folder / "opt/rloo/lock.txt").read_bytes() == (ROOT / f"requirements/{name[5:]}.txt").read_bytes()
    assert (image_folder / "opt/rloo/src/rloo_pipeline/cli/main.py").exists()
    assert (image_folder / "opt/rloo/check").exists()
    of_host = dict.fromkeys(("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH"), "/of/host")
    if name == "rloo-cuda":
        of_host |= dict.fromkeys(("CC", "CXX", "CUDA_HOME"), "/of/host")
    inside = subprocess.run(
        ["apptainer", "exec", image_folder, "sh"], env=os.environ | of_host, capture_output=True, text=True, check=True
    ).stdout
    assert "PYTHONNOUSERSITE=1\n" in inside
    assert "/of/host" not in inside


def test_the_image_for_gpus_compiles_for_the_cuda_of_torch_and_names_the_driver() -> None:
    definition, listed = ((ROOT / file).read_text() for file in ("containers/rloo-cuda.def", "requirements/cuda.txt"))
    pins = dict(line.partition(" ;")[0].split("==") for line in listed.splitlines() if "==" in line)
    runtime = pins["nvidia-cuda-runtime"].split(".")[:2]
    for part in ("cuda-toolkit", "nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-cuda-cccl", "nvidia-nvvm"):
        assert pins[part].split(".")[:2] == runtime, "DeepSpeed refuses a compiler of another CUDA than torch's"
    major = int(runtime[0])
    assert f"nvidia/cu{major}\n" in definition
    assert f"must be of CUDA {major}: {DRIVERS[major]} or newer" in definition.split("%help")[1]
