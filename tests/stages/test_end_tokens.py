"""How a completion ends: every end token counts, and padding with the end token hides none of them."""

import json
import shutil
from pathlib import Path

import forks
import pytest
from helpers import Round, mini, succeeded

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.runtime import devices

pytestmark = pytest.mark.slow


@pytest.fixture
def second_end(tmp_path, tiny_model) -> tuple[Path, int]:
    """A model with a second end token in generation_config.json, like many chat models."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "two-ends"))
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text())
    path.write_text(json.dumps(generation | {"eos_token_id": [generation["eos_token_id"], 7]}))
    return folder, 7


def sampled(folder: Path, token: int) -> None:
    """Samples in an engine and ends it, since this process also trains."""
    from rloo_pipeline.rollout.engine_arguments import EngineSettings
    from rloo_pipeline.rollout.requests import Request, SamplingConfig
    from rloo_pipeline.rollout.sampler import Sampler

    sampler = Sampler(Policy(folder), EngineSettings("float32", 0.5, 1, 1), max_model_len=64, seed=0)
    assert token in sampler.stop_ids
    requests = [Request([4, 5, 6], seed, SamplingConfig(1.0, 1.0, 0, None, 40)) for seed in range(200)]
    samples = sampler.sample(requests, "completions")
    stopped = [completion for completion in samples if completion.ids[-1] == token]
    assert len(stopped) > 20, "an untrained model samples every token sometimes"
    assert {completion.finish_reason for completion in stopped} == {"stop"}
    assert all(token not in completion.ids[:-1] for completion in samples)
    assert all(len(completion.ids) == len(completion.logps) for completion in samples)
    devices.free_gpu()
    assert sampler.llm is None, "the engine was closed"
    assert sampler.sample(requests[:20], "completions") == samples[:20]


def test_a_completion_stops_at_a_second_end_token_and_keeps_it(second_end) -> None:
    forks.call(sampled, *second_end)


def padding_with(token: str | None, tiny_model: Path, folder: Path) -> Path:
    """The model with a tokenizer that has another PAD token, or none."""
    shutil.copytree(tiny_model, folder)
    path = folder / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text())
    assert tokenizer.pop("pad_token") not in (None, tokenizer["eos_token"])
    path.write_text(json.dumps(tokenizer if token is None else tokenizer | {"pad_token": tokenizer[token]}))
    return folder


def test_a_tokenizer_that_pads_with_its_end_token_or_not_at_all_trains_the_same_policy(tmp_path, tiny_model) -> None:
    """Nothing is padded, so no end token can be mistaken for padding and masked."""
    models = {
        "own": tiny_model,
        "eos": padding_with("eos_token", tiny_model, tmp_path / "pad-is-eos"),
        "none": padding_with(None, tiny_model, tmp_path / "no-pad"),
    }
    runs = [Round(tmp_path / name, model).write(1) for name, model in models.items()]
    for run in runs:
        succeeded(run.update())
    own, eos, none = ((run.policy(1) / "model.safetensors").read_bytes() for run in runs)
    assert own == eos == none


def test_an_end_token_replaces_a_missing_pad_token_and_the_checks_say_so(tmp_path, tiny_model) -> None:
    from rloo_pipeline.config import Config
    from rloo_pipeline.judging.token_facts import token_facts

    rows = [{"prompt": "1+1", "prompt_ids": [4, 5]}]
    config = Config(**mini())
    for token, pad in (("eos_token", 2), (None, None)):
        folder = padding_with(token, tiny_model, tmp_path / f"{token}")
        tokenizer = Policy(folder).tokenizer
        assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
        assert token_facts(config, Policy(folder), rows).pad == pad
    own = Policy(tiny_model).tokenizer
    assert own.pad_token_id == token_facts(config, Policy(tiny_model), rows).pad == 0


def test_an_end_token_that_is_ordinary_text_is_named_like_that_of_another_model(second_end, tiny_model) -> None:
    from rloo_pipeline.config import Config
    from rloo_pipeline.judging.token_facts import token_facts

    rows = [{"prompt": "1+1", "prompt_ids": [4, 5]}]
    own, other = (
        token_facts(Config(**mini()), Policy(folder), rows).ordinary for folder in (tiny_model, second_end[0])
    )
    assert (own, other) == ((), (Policy(tiny_model).tokenizer.decode([second_end[1]]),))


def test_a_prompt_opens_the_answer_unless_the_template_would_begin_it_with_more(tmp_path, tiny_model) -> None:
    from rloo_pipeline.config import Config
    from rloo_pipeline.judging.token_facts import token_facts

    config, messages = Config(**mini()), [{"role": "user", "content": "1+1"}]
    for name, begin, opened in (("mistral", "", 1), ("ignored", "<|im_start|>", 0)):
        folder = shutil.copytree(tiny_model, tmp_path / name)
        answer = f"{begin}{{{{ m['content'] }}}}<|im_end|>"
        turn = f"{{% if m['role'] == 'user' %}}{{{{ m['content'] }}}}={{% else %}}{answer}{{% endif %}}"
        (folder / "chat_template.jinja").write_text(f"{{% for m in messages %}}{turn}{{% endfor %}}")
        facts = token_facts(config, Policy(folder), [{"prompt": messages, "prompt_ids": [4, 5]}])
        assert (facts.chats, facts.opened) == (1, opened)
