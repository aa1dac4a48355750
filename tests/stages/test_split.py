"""Under ZeRO 3 on several ranks no rank holds all weights, and the policy is that of one rank."""

import json
from pathlib import Path

import forks
import model_folders
import pytest
import split_ranks
import torch
import yaml
from helpers import mini
from safetensors.torch import load_file, save_file
from trainers import trainer_settings

from rloo_pipeline.artifacts import files, model_files
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.errors import UserError
from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.reward_engine import RewardEngine

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("engines")]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def test_two_ranks_write_the_policy_of_one_in_shards(tmp_path, tiny_model) -> None:
    split_ranks.run(tiny_model, tmp_path / "one", 2)  # not closed: a sampler of this process has the group too
    for outcome in forks.run_ranks(split_ranks.__file__, [str(tiny_model), str(tmp_path / "two"), "2", "20000"], 2):
        assert outcome.returncode == 0, outcome.stderr[-2000:]
    Policy(tmp_path / "two").weights
    assert len(list((tmp_path / "two").glob("*.safetensors"))) > 2
    expected, start = tensors(tmp_path / "one"), tensors(tiny_model)
    written = tensors(tmp_path / "two")
    assert written.keys() == expected.keys()
    for name, value in expected.items():
        length = (value - start[name]).norm()
        assert (written[name] - value).norm() < 1e-3 * length, name
    others = {file.name for file in (tmp_path / "one").iterdir() if file.suffix != ".safetensors"}
    assert {file.name for file in (tmp_path / "two").iterdir() if file.suffix != ".safetensors"} == others | {
        model_files.INDEX
    }
    whole = split_ranks.logps(tmp_path / "two", split=False)
    for number, (computed, reference) in enumerate(
        zip(torch.load(tmp_path / "two.logps", weights_only=False), whole, strict=True)
    ):
        values = split_ranks.TOP_K if number > 1 else 1
        assert [len(row) for row in computed] == [(split_ranks.LENGTH - 6) * values] * 7
        torch.testing.assert_close(torch.tensor(computed), torch.tensor(reference), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("engine", "kind"), [(Engine, "falcon_h1"), (RewardEngine, "qwen3_next")])
def test_an_engine_refuses_layers_whose_weights_zero_3_does_not_gather(tmp_path, engine, kind) -> None:
    model = model_folders.build(tmp_path / "model", 0, kind)
    with pytest.raises(UserError, match="zero_stage: 3 cannot be used with"):
        engine(Policy(model), trainer_settings(zero_stage=3), 0)


def test_weights_that_another_rank_writes_as_soon_as_it_can_stay(tmp_path, tiny_model, monkeypatch) -> None:
    """transformers removes files of weights that it finds."""
    engine = Engine(Policy(tiny_model), trainer_settings(), 0)
    early = "model-00002-of-00002.safetensors"

    def tell(value: object) -> object:
        if isinstance(value, Path):
            save_file({"of another rank": torch.ones(1)}, value / early)
        return value

    monkeypatch.setattr(engine, "from_first", tell)
    engine.save_policy(tmp_path / "policy")
    assert "of another rank" in tensors(tmp_path / "policy")


@pytest.mark.long
def test_checks_on_two_ranks_find_what_one_finds(finished, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(finished.folder)  # assets.json names the model as seen from there
    run, output = finished.folder / "results" / "mini", tmp_path / "checks.json"
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(mini(deepspeed={"processes": 2, "zero_stage": 3})))
    inputs = {"assets": "assets", "prompts": "prompts", "policy": "policies/00000", "probe": "warmstart/probe.parquet"}
    arguments = [word for name, path in inputs.items() for word in (f"--{name}", str(run / path))]
    arguments = ["checks", "--configfile", str(config), *arguments, "--output", str(output)]
    for outcome in forks.run_ranks("rloo_pipeline", arguments, 2):
        assert outcome.returncode == 0, outcome.stderr[-2000:]
    own, expected = (json.loads(file.read_text()) for file in (output, run / "warmstart" / "checks.json"))
    for found in (own, expected):
        del found[files.SEAL]
        for verdict in found["checks"]:
            verdict["value"] = pytest.approx(verdict["value"], rel=1e-4, abs=1e-5)
            del verdict["shown"]
    assert own == expected
