"""In bfloat16 two ranks take the same steps as one, to the last bit: gradients are reduced in float32."""

import forks
import pytest
import torch
import two_ranks

from rloo_pipeline.demo.character_model import tiny_qwen3

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("engines")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    tiny_qwen3(folder, 0, hidden_size=32, layers=2, heads=2, key_value_heads=1, head_dim=32, intermediate_size=64)
    return folder


@pytest.fixture(scope="module")
def results(model, tmp_path_factory):
    """Gradient norms and weights of two ranks, in one launch for all cases."""
    output = tmp_path_factory.mktemp("ranks") / "found.pt"
    for outcome in forks.run_ranks(two_ranks.__file__, [str(model), str(output)], 2):
        assert outcome.returncode == 0, outcome.stderr[-2000:]
    return torch.load(output)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_processes_take_the_steps_of_one(model, results, stage) -> None:
    norms, weights = two_ranks.steps(model, stage, "float32")
    assert results[stage, "float32"][0] == norms
    for name, values in results[stage, "float32"][1].items():
        assert torch.equal(values, weights[name]), name


def test_sums_in_the_models_format_are_different(results) -> None:
    """Otherwise the test above would show nothing."""
    exact, rounded = (results[1, dtype] for dtype in ("float32", "model"))
    assert exact[0] != rounded[0]
    assert any(not torch.equal(values, exact[1][name]) for name, values in rounded[1].items())
