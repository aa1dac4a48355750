"""tools/setup.sh, as far as it installs nothing."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from helpers import ROOT, executable


def copied(folder: Path) -> Path:
    """A folder with what it reads."""
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    (folder / "tools").mkdir()
    for name in ("tools/setup.sh", "pyproject.toml"):
        shutil.copyfile(ROOT / name, folder / name)
    return folder


def set_up(folder: Path) -> str:
    """What it says where it finds no Python."""
    environment = os.environ | {"PYTHON": "/no/python", "ACCELERATOR": "cpu"}
    outcome = subprocess.run(["sh", "tools/setup.sh"], cwd=folder, env=environment, capture_output=True, text=True)
    assert outcome.returncode == 1
    return outcome.stderr


@pytest.mark.parametrize("state", ["cpu 3.11 {} 0123456789abcdef", "unfinished cpu {}"])
def test_an_environment_of_another_folder_is_not_made_anew_through_a_link(tmp_path, state) -> None:
    here, shared = copied(tmp_path / "here"), tmp_path / "shared"
    shared.mkdir()
    (here / ".venv").symlink_to(shared)
    assert "PYTHON=/no/python is no Python" in set_up(here)
    (shared / ".setup").write_text(state.format(f"{here}-too"))
    assert ".venv is a link to the environment of another folder: remove the link" in set_up(here)
    (shared / ".setup").write_text(state.format(here))
    assert "PYTHON=/no/python is no Python" in set_up(here)


def test_for_gpus_torch_is_pypis_build_and_compilers_find_the_libraries_of_cudas_wheels(tmp_path) -> None:
    here = copied(tmp_path / "here")
    (here / ".venv").mkdir()
    executable(here / ".venv" / "bin", "python", "[ $1 != -ISc ] || echo 3.11")
    libraries = here / ".venv/lib/python3.11/site-packages/nvidia/cu13/lib"
    libraries.mkdir(parents=True)
    (libraries / "libcudart.so.13").touch()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON"} | {"ACCELERATOR": "cuda"}
    subprocess.run(["sh", "tools/setup.sh"], cwd=here, env=environment, check=True, capture_output=True)
    installed = (here / ".venv" / "packages.txt").read_text().splitlines()
    assert [line.count("=") for line in installed if line.startswith(("torch=", "vllm="))] == [3, 2]
    assert (libraries.with_name("lib64") / "libcudart.so").exists()


def test_a_wheel_asks_for_what_the_pinned_lists_have() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = (ROOT / "requirements" / "stages.in").read_text().splitlines()
    ours = {line for line in lines if line[0].isalpha()} - {"six"}  # which vLLM's wheel asks for
    assert {each for each in extras["stages"] if not each.startswith("torch==")} == ours
