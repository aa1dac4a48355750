"""How an optimizer step is split into micro-batches and ranks changes neither its loss nor its gradient."""

from pathlib import Path

import forks
import pytest
import torch
from gradients import CASES

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).with_name("gradients.py")


def losses_and_gradients(folder: Path, model: Path, processes: int) -> dict:
    """Loss and gradient of every case, by how it was split."""
    output = folder / f"{processes}.pt"
    outcomes = forks.run_ranks(PROGRAM, [str(model), str(output)], processes)
    assert output.exists(), [outcome.stderr for outcome in outcomes]
    return torch.load(output)


@pytest.fixture(scope="module")
def cuts(tmp_path_factory, tiny_model) -> dict:
    folder = tmp_path_factory.mktemp("gradients")
    return {processes: losses_and_gradients(folder, tiny_model, processes) for processes in (1, 2)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("processes", "size"), [(1, 4), (1, 1), (2, 8), (2, 4), (2, 1)])
def test_loss_and_gradient_are_those_of_one_micro_batch_in_one_process(cuts, case, processes, size) -> None:
    loss, gradient = cuts[1][case, 8]
    other_loss, other_gradient = cuts[processes][case, size]
    assert gradient.norm() > 0
    assert other_loss == pytest.approx(loss, rel=1e-6, abs=1e-7)
    assert (other_gradient - gradient).norm() <= 1e-6 * gradient.norm()


def test_the_cases_differ_from_each_other(cuts) -> None:
    """Otherwise the test above would compare equal things."""
    gradients = [cuts[1][case, 8][1] for case in CASES]
    for i, gradient in enumerate(gradients):
        assert all((gradient - other).norm() > 1e-3 * gradient.norm() for other in gradients[:i])
