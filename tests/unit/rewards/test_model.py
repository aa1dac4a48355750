"""reward_model returns the scores that transformers gives for one conversation at a time."""

import random
import re
from pathlib import Path
from typing import Any

import pytest

from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards import model as rewards
from rloo_pipeline.rewards.model import reward_model
from rloo_pipeline.user_code import reward_call


def write(folder: Path, labels: int = 1, **settings: Any) -> Path:
    """A small random reward model with the demo's tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    from rloo_pipeline.demo.character_model import character_tokenizer

    tokenizer = character_tokenizer(256)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    names = {"pad_token_id": tokenizer.pad_token_id, "num_labels": labels, "initializer_range": 0.2} | settings
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Qwen3ForSequenceClassification(Qwen3Config(vocab_size=len(tokenizer), **shape, **heads, **names))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("reward") / "model"))


def conversations(count: int) -> tuple[list[Any], list[Any]]:
    rng = random.Random(0)
    text = ["".join(rng.choices("0123456789+=", k=rng.randrange(1, 60))) for _ in range(count)]
    work = ["".join(rng.choices("0123456789+=", k=rng.randrange(0, 90))) for _ in range(count)]
    prompts = [[{"role": "user", "content": t}] for t in text]
    return prompts, [[{"role": "assistant", "content": f"<think>{w}</think>{len(w)}"}] for w in work]


def one_by_one(folder: str, texts: list[str]) -> Any:
    """Logits by transformers alone, without padding."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.stack(
            [model(**tokenizer(t, add_special_tokens=False, return_tensors="pt")).logits[0] for t in texts]
        )


def texts_of(folder: str, prompts: list[Any], completions: list[Any]) -> list[str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer.apply_chat_template(p + c, tokenize=False) for p, c in zip(prompts, completions, strict=True)]


@pytest.mark.parametrize("tokens", [1, 300, 4000, 10**9])
def test_batches_change_no_score(folder: str, tokens: int) -> None:
    prompts, completions = conversations(40)
    expected = one_by_one(folder, texts_of(folder, prompts, completions))[:, 0].tolist()
    assert max(expected) - min(expected) > 0.1
    assert reward_model(prompts, completions, folder, max_tokens_per_batch=tokens) == pytest.approx(expected, abs=1e-5)


def test_batches_have_similar_lengths_and_stay_below_the_limit() -> None:
    ids = {row: [0] * length for row, length in enumerate([3, 50, 4, 49, 5, 200])}
    longest = ids.pop(5)
    assert list(rewards._batches(ids, 100)) == [[1, 3], [4, 2, 0]]
    assert list(rewards._batches({5: longest, 1: ids[1]}, 100)) == [[5], [1]]
    assert list(rewards._batches({}, 100)) == []


def test_the_model_is_loaded_once_per_process(folder: str) -> None:
    rewards._load.cache_clear()
    for _ in range(3):
        reward_model(*conversations(2), folder)
    assert rewards._load.cache_info().misses == 1


def test_strings_are_continued_and_thinking_can_be_stripped(folder: str) -> None:
    prompts, completions = ["1+2=", "7+"], ["<think>1</think>3", "8=15"]
    expected = one_by_one(folder, ["1+2=<think>1</think>3", "7+8=15"])[:, 0].tolist()
    assert reward_model(prompts, completions, folder) == pytest.approx(expected, abs=1e-5)
    expected = one_by_one(folder, ["1+2=3", "7+8=15"])[:, 0].tolist()
    assert reward_model(prompts, completions, folder, strip_thinking=True) == pytest.approx(expected, abs=1e-5)


def test_the_model_reads_all_messages_of_an_episode(folder: str) -> None:
    prompts, completions = conversations(3)
    episodes = [[completion[0], {"role": "tool", "content": "2+3"}, *completion] for completion in completions]
    expected = one_by_one(folder, texts_of(folder, prompts, episodes))[:, 0].tolist()
    assert reward_model(prompts, episodes, folder) == pytest.approx(expected, abs=1e-5)
    for episode in episodes:
        episode[-1] = {"role": "assistant", "content": episode[-1]["content"].rpartition("</think>")[2]}
    expected = one_by_one(folder, texts_of(folder, prompts, episodes))[:, 0].tolist()
    whole = [[*episode[:-1], *completion] for episode, completion in zip(episodes, completions, strict=True)]
    assert reward_model(prompts, whole, folder, strip_thinking=True) == pytest.approx(expected, abs=1e-5)


def test_the_model_reads_the_text_of_a_prompt_with_images(folder: str) -> None:
    prompts, completions = conversations(2)
    parts = [
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": p["content"]}]}] for [p] in prompts
    ]
    marked = [[p | {"content": "[image]" + p["content"]}] for [p] in prompts]
    expected = one_by_one(folder, texts_of(folder, marked, completions))[:, 0].tolist()
    assert reward_model(parts, completions, folder) == pytest.approx(expected, abs=1e-5)


def test_special_tokens_come_from_the_template_and_not_from_prompt_or_completion(folder: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    special = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
    end = tokenizer.eos_token

    def count(prompt: Any, completion: Any) -> int:
        shown = rewards.shown(prompt, completion, False)
        return sum(id_ in special for id_ in rewards.ids_of(tokenizer, shown, "model", {}))

    honest = count([{"role": "user", "content": "1+1"}], "2")
    assert honest > 0
    assert count([{"role": "user", "content": f"1{end}1"}], f"0{end}{tokenizer.pad_token}2") == honest
    assert count("1+", "2") == count(f"1+{end}", f"2{end}") == 0  # a text gets none, as in TRL


def test_a_completion_that_the_tokenizer_cannot_write_as_text_gets_no_score_and_stops_no_run(
    folder, monkeypatch
) -> None:
    loaded = rewards._load(folder, None, (), None, None, False)
    monkeypatch.setattr(loaded.tokenizer, "chat_template", loaded.tokenizer.chat_template + "{{ '\ufdd0' }}")
    monkeypatch.setattr(rewards, "_load", lambda *_: loaded)
    prompts, notes = [[{"role": "user", "content": "1"}]] * 2, reward_call.collect_notes()
    first, second = reward_model(prompts, ["2", f"2{loaded.tokenizer.eos_token}"], folder)
    assert first is not None
    assert second == min(0.0, first)
    assert "cannot read the conversation: " in notes[1]
    assert "spells the special token" in notes[1]


def test_a_conversation_over_the_limit_gets_no_more_than_its_siblings(folder: str) -> None:
    prompts = [[{"role": "user", "content": "1"}]] * 3
    completions = ["2", "3" * 300, "4"]
    scores = reward_model(prompts, completions, folder)
    assert scores[1] == min(0.0, scores[0], scores[2])
    notes = reward_call.collect_notes()
    assert reward_model(prompts, completions, folder, max_length=3) == [None] * 3
    assert sorted(notes) == [0, 1, 2]
    assert "its limit is 3" in notes[0]


def test_the_option_output_selects_one_of_several_outputs(tmp_path: Path) -> None:
    path = str(write(tmp_path / "two", labels=2))
    prompts, completions = conversations(4)
    expected = one_by_one(path, texts_of(path, prompts, completions))
    assert reward_model(prompts, completions, path, output=1) == pytest.approx(expected[:, 1].tolist(), abs=1e-5)
    shares = expected.softmax(dim=1)[:, 0].tolist()
    assert reward_model(prompts, completions, path, output=0, probability=True) == pytest.approx(shares, abs=1e-5)
    for wrong in (None, 2, ["a"] * 4):
        with pytest.raises(
            UserError, match=rf"has 2 outputs, and output is {re.escape(str(wrong))}; set the option out"
        ):
            reward_model(prompts, completions, path, output=wrong)


def test_probability_of_one_output_is_its_sigmoid(folder: str) -> None:
    prompts, completions = conversations(3)
    expected = one_by_one(folder, texts_of(folder, prompts, completions))[:, 0].sigmoid().tolist()
    assert reward_model(prompts, completions, folder, probability=True) == pytest.approx(expected, abs=1e-5)


def test_a_model_without_a_padding_token_gets_one_conversation_at_a_time(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = write(tmp_path / "model", pad_token_id=None)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(path)
    prompts, completions = conversations(5)
    expected = one_by_one(str(path), texts_of(str(path), prompts, completions))[:, 0].tolist()
    assert reward_model(prompts, completions, str(path)) == pytest.approx(expected, abs=1e-5)


def test_a_model_that_cannot_score_is_an_error_and_nothing_is_downloaded(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(UserError, match=r"'nobody/no-such-model' cannot be loaded .* hf download nobody/no-such-model"):
        reward_model(["1"], ["2"], "nobody/no-such-model")
    with pytest.raises(UserError, match=r"would be random or ignored: score.weight is missing"):
        reward_model(["1"], ["2"], str(tiny_model))
    with pytest.raises(UserError, match="dtype must be"):
        reward_model(["1"], ["2"], str(tiny_model), dtype="int8")


def test_a_model_that_has_left_its_gpu_returns_for_the_next_call(folder: str) -> None:
    """On a CPU both places are host memory."""
    import torch

    prompts, completions = conversations(4)
    before = reward_model(prompts, completions, folder)
    loaded = rewards._load(folder, None, rewards._files(folder, None), None, None, False)
    loaded.leave_gpu()
    assert all(weights.untyped_storage().nbytes() for weights in loaded.model.parameters()), "on a CPU it stays"
    for weights in loaded.model.parameters():
        weights.data = weights.data.clone()  # they are mapped from the file; on a GPU they are not
    on_cpu, loaded.device = loaded.device, torch.device("cuda")
    for _ in range(2):
        loaded.leave_gpu()
        assert not any(weights.untyped_storage().nbytes() for weights in loaded.model.parameters())
    loaded.device = on_cpu
    assert reward_model(prompts, completions, folder) == before


def test_a_model_whose_files_change_is_loaded_again(tmp_path: Path) -> None:
    prompts, completions = conversations(2)
    folder = str(write(tmp_path / "model"))
    before = reward_model(prompts, completions, folder)
    write(tmp_path / "model", initializer_range=0.4)
    assert reward_model(prompts, completions, folder) != before
