"""The program of docs/the_round.md: it is the one in notebooks/, it runs, and it learns."""

import math
import runpy

import pytest
from helpers import ROOT

PROGRAM = ROOT / "notebooks" / "the_round.py"


def test_the_page_has_the_program_which_is_short() -> None:
    text = PROGRAM.read_text()
    assert f"```python\n{text}```" in (ROOT / "docs" / "the_round.md").read_text()
    assert len(text.splitlines()) <= 120


@pytest.mark.slow
def test_a_round_of_it_runs() -> None:
    [reward] = runpy.run_path(str(PROGRAM))["train"](rounds=1, sft_steps=2)
    assert 0 <= reward <= 1


@pytest.mark.long
def test_it_learns() -> None:
    rewards = runpy.run_path(str(PROGRAM))["train"](rounds=20)
    # relative, since the warm start gets further on some kinds of CPU: from a reward of 0.45, this is a rise of 0.1
    wrong = [1 - reward for reward in rewards]
    assert sum(wrong[-3:]) < sum(wrong[:3]) * 9 / 11
    assert all(map(math.isfinite, rewards))
