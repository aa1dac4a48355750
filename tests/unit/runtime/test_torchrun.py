"""Ranks that torchrun starts."""

import os

import forks
import pytest
import torch

from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import ranks


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (f'printf "my.yaml: a key; drop it" > "${ranks.FAILED}"; exit 1', "my.yaml: a key; drop it"),
        ("exit 3", "exit code 3"),
    ],
)
def test_the_error_of_the_first_rank_that_fails_is_the_stages(monkeypatch, script, why) -> None:
    monkeypatch.setattr(ranks, "torchrun_command", lambda *_: ["sh", "-c", script])
    with pytest.raises(UserError, match=f"^one of the 2 ranks failed: {why}"):
        ranks.torchrun(2, ["update"])


def connect_alone() -> tuple[str, int]:
    """The port that is named before a process connects to itself, and the number of ranks then."""
    for name in ("RANK", "MASTER_PORT"):
        os.environ.pop(name, None)
    ranks.use_single_process()
    torch.distributed.init_process_group("gloo")
    return os.environ["MASTER_PORT"], torch.distributed.get_world_size()


def test_a_process_alone_takes_the_port_that_is_free_when_it_listens() -> None:
    assert forks.call(connect_alone) == ("0", 1)
