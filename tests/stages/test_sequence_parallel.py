"""Ranks that share the tokens of a micro-batch compute what one process computes, in float32."""

import forks
import pytest
import sequence_memory
import sequence_ranks
import torch
from cases import PACKED, write
from sequence_ranks import CASES, measured

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("engines")]
KINDS = {"qwen3": {"num_key_value_heads": 2}, **{kind: PACKED[kind] for kind in ("gpt_oss", "gemma2")}}
TOLERANCES = {
    **dict.fromkeys(("log-probs", "scored", "entropies", "likeliest"), 1e-6),
    **dict.fromkeys(("loss", "record", "experts", "gradient"), 1e-5),
}
"""Relative differences by rounding."""


def require_equal(cases: list[str], processes: int, folder) -> None:
    """Asserts that ranks get what this process gets."""
    for kind in {CASES[case][0] for case in cases}:
        write(folder / kind, kind, KINDS[kind])
    output = folder / "found.pt"
    for outcome in forks.run_ranks(sequence_ranks.__file__, [str(folder), str(output), *cases], processes):
        assert outcome.returncode == 0, outcome.stderr[-3000:]
    found = torch.load(output)
    for case in cases:
        expected = measured(folder, case, split=False)
        for name, values in expected.items():
            difference = found[case][name] - values
            assert difference.norm() <= TOLERANCES[name] * values.norm(), (case, name, float(difference.abs().max()))
        assert expected["gradient"].norm() > 0
        assert expected["record"].norm() > 0


def test_four_ranks_take_the_step_of_one_process(tmp_path) -> None:
    require_equal(["dense over 4", "windows, sinks and experts over 4", "an adapter over 2"], 4, tmp_path)


@pytest.mark.long
def test_two_ranks_take_the_step_of_one_process(tmp_path) -> None:
    require_equal(["dense over 2", "soft caps over 2", "an adapter over 2"], 2, tmp_path)


@pytest.mark.long
def test_two_pairs_of_ranks_take_the_step_of_one_process(tmp_path) -> None:
    require_equal(["dense over 2", "soft caps over 2", "split weights over 2"], 4, tmp_path)


@pytest.mark.long
def test_a_rank_takes_its_share_of_the_memory_of_one_process(tmp_path) -> None:
    """16,384 tokens, beyond weights and inputs."""
    peaks = {}
    for ranks in (1, 2, 4):
        output = tmp_path / str(ranks)
        for outcome in forks.run_ranks(sequence_memory.__file__, [str(output), "16384"], ranks):
            assert outcome.returncode == 0, outcome.stderr[-3000:]
        peaks[ranks] = max(int(file.read_text()) for file in tmp_path.glob(f"{ranks}.*"))
    for ranks in (2, 4):
        assert peaks[ranks] <= 1.25 / ranks * peaks[1], peaks
