"""Ranks that torchrun starts."""

import pytest

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
