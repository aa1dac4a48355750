"""A small model and a finished run."""

from pathlib import Path

import pytest
from helpers import Project


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """An untrained model of a few thousand weights with its tokenizer."""
    from rloo_pipeline.demo.model import tiny_qwen3

    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_qwen3(folder, 3, hidden_size=32, layers=2, heads=2, key_value_heads=1, head_dim=32, intermediate_size=64)
    return folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Project:
    """A project with the finished run `mini`; tests must leave its files as they found them."""
    project = Project(tmp_path_factory.mktemp("finished") / "project")
    outcome = project.snakemake("--cores", "2")
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return project
