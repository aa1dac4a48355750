"""In bfloat16 two ranks take the same steps as one, to the last bit: gradients are reduced in float32."""

import json
import shutil
from pathlib import Path

import forks
import pytest
import torch
import two_ranks
from safetensors.torch import load_file

from rloo_pipeline.artifacts import manifest, node_files
from rloo_pipeline.artifacts.model_files import WEIGHTS
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.demo.character_model import tiny_qwen3
from rloo_pipeline.errors import UserError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("engines")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    tiny_qwen3(folder, 0, hidden_size=32, layers=2, heads=2, key_value_heads=1, head_dim=32, intermediate_size=64)
    return folder


@pytest.fixture(scope="module")
def output(model, tmp_path_factory):
    """A folder with the files of two ranks, which are started once for all cases."""
    output = tmp_path_factory.mktemp("ranks")
    for outcome in forks.run_ranks(two_ranks.__file__, [str(model), str(output)], 2):
        assert outcome.returncode == 0, outcome.stderr[-2000:]
    return output


def of_rank(output: Path, number: int, case: str) -> tuple[list[float], list[str]]:
    return json.loads((output / f"{number}.json").read_text())[case]


def contents(folder: Path) -> dict[str, bytes]:
    """Of all files of a policy but its manifest, which has its name."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != manifest.MANIFEST}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_processes_take_the_steps_of_one_and_write_its_policy_together(model, output, tmp_path, stage) -> None:
    case = two_ranks.name(stage, "float32")
    norms, written = two_ranks.steps(model, stage, "float32", tmp_path)
    (norms_of_two, by_first), (_, by_second) = (of_rank(output, number, case) for number in (0, 1))
    assert norms_of_two == norms
    assert contents(output / case) == contents(tmp_path / case)
    assert sorted(by_first + by_second) == sorted(written), "each file is written once"
    assert abs(len(by_first) - len(by_second)) < 2 < len(written)


def test_sums_in_the_models_format_are_different(output) -> None:
    """Otherwise the test above would show nothing."""
    exact, rounded = (two_ranks.name(1, dtype) for dtype in ("float32", "model"))
    assert of_rank(output, 0, exact)[0] != of_rank(output, 0, rounded)[0]
    assert contents(output / exact) != contents(output / rounded)


@pytest.mark.parametrize("stage", [2, 3])
def test_sums_that_are_taken_beside_the_backward_pass_are_the_same(output, stage) -> None:
    beside, after = (two_ranks.name(stage, way) for way in ("overlap", "float32"))
    assert of_rank(output, 0, beside)[0] == of_rank(output, 0, after)[0]
    ours, theirs = contents(output / beside), contents(output / after)
    weights = [file for file in theirs if file.endswith(".safetensors")]
    assert [ours[file] for file in weights] == [theirs[file] for file in weights] != []


def test_ranks_with_different_memory_recompute_activations_all_or_none(output) -> None:
    assert [of_rank(output, number, "recomputes") for number in (0, 1)] == [True, True]


def test_each_node_has_a_policy_that_goes_through_its_own_disk(model, output) -> None:
    """The run's folder has links to the files of the first rank's node."""
    policy = output / "policies" / "00001"
    digest = Policy(policy).digest
    files = node_files.links(policy)
    assert len(files) > 2
    assert {file.readlink().parts[len(output.parts)] for file in files} == {"node 0"}
    for file in files:
        [twin] = (output / "node 1").rglob(file.name)
        assert twin.read_bytes() == file.read_bytes()
    weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert all(torch.equal(tensor, weights[name]) for name, tensor in load_file(model / WEIGHTS).items())
    shutil.rmtree(output / "node 0")
    with pytest.raises(UserError, match="safetensors: not on this machine: it is on another node's disk"):
        Policy(policy).verify()
    assert not node_files.fill(policy)
    [copy] = (output / "node 1").rglob(".00001.*.tmp")
    assert node_files.fill(policy, copy)
    assert not node_files.links(policy)
    assert Policy(policy).digest == digest
