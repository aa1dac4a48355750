"""State and weights on a disk of the node: the same bytes as in its memory, and as in a trainer that was resumed."""

import forks
import nvme_ranks
import pytest

from rloo_pipeline.demo.character_model import tiny_qwen3

SIZES = {"hidden_size": 256, "layers": 1, "heads": 4, "key_value_heads": 2, "head_dim": 64, "intermediate_size": 4608}
"""DeepSpeed writes what has 1 MB: half a matrix of an MLP in bfloat16, but no matrix of attention."""
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("engines")]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "disk").mkdir()
    tiny_qwen3(tmp_path / "model", 0, **SIZES)
    return tmp_path


def test_a_run_on_disk_has_the_bytes_of_one_in_memory_and_of_one_that_was_resumed(folder) -> None:
    nvme_ranks.compare(folder, "float32", None)


def test_so_has_one_of_two_ranks_with_its_weights_on_disk_which_have_a_folder_each_and_leave_none(folder) -> None:
    for outcome in forks.run_ranks(nvme_ranks.__file__, [str(folder)], 2):
        assert outcome.returncode == 0, outcome.stderr[-2000:]
    assert list((folder / "disk").iterdir()) == []
