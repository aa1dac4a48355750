"""How a completion ends: every end token counts as one, and padding with the end token hides none of them."""

import json
import shutil
from pathlib import Path

import pytest
from helpers import Round

from rloo_pipeline import runtime

pytestmark = pytest.mark.slow


@pytest.fixture
def second_end(tmp_path, tiny_model) -> tuple[Path, int]:
    """The model with a second end token in generation_config.json, as many chat models have."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "two-ends"))
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text())
    path.write_text(json.dumps(generation | {"eos_token_id": [generation["eos_token_id"], 7]}))
    return folder, 7


def test_a_completion_stops_at_a_second_end_token_and_keeps_it(second_end) -> None:
    from rloo_pipeline.generation.completions import Decoding, Request
    from rloo_pipeline.generation.sampler import Engine, Sampler

    folder, token = second_end
    sampler = Sampler(folder, Engine("float32", False, 0.5, 1, 1), max_model_len=64, seed=0)
    assert token in sampler.stop_ids
    requests = [Request([4, 5, 6], seed) for seed in range(200)]
    found = sampler.sample(requests, Decoding(1.0, 1.0, 0, None, 40), "completions")
    ended = [completion for completion in found if completion.ids[-1] == token]
    assert len(ended) > 20, "an untrained model gives every token now and then"
    assert {completion.finish_reason for completion in ended} == {"stop"}
    assert all(token not in completion.ids[:-1] for completion in found)
    assert all(len(completion.ids) == len(completion.logps) for completion in found)
    runtime.free_gpu()
    assert sampler.llm is None, "the engine has left"
    assert sampler.sample(requests[:20], Decoding(1.0, 1.0, 0, None, 40), "completions") == found[:20]


def test_a_tokenizer_that_pads_with_its_end_token_trains_the_same_policy(tmp_path, tiny_model) -> None:
    """Nothing is padded, so no end token can be taken for padding and masked."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "pad-is-eos"))
    path = folder / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text())
    assert tokenizer["pad_token"] != tokenizer["eos_token"]
    path.write_text(json.dumps(tokenizer | {"pad_token": tokenizer["eos_token"]}))
    runs = [Round(tmp_path / name, model).write(1) for name, model in (("own", tiny_model), ("eos", folder))]
    for run in runs:
        outcome = run.update()
        assert outcome.returncode == 0, outcome.stderr
    own, eos = ((run.policy(1) / "model.safetensors").read_bytes() for run in runs)
    assert own == eos
