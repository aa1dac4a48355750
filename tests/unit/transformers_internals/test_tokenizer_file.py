"""Token ids and texts are those of tokenizer.json, whatever class tokenizer_config.json names."""

import json
from pathlib import Path

import pytest
from helpers import ROOT
from tokenizers import Tokenizer, models, normalizers

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.commands.reward_test import _tokenize
from rloo_pipeline.demo.text_model import bpe_tokenizer
from rloo_pipeline.demo.vision_model import tiny_vision_model

TEXT = "Hello world, it's 1234567  lazy\n\ndogs: <think>cafe\u0301</think>"
CLASSES = [
    ("LlamaTokenizerFast", "llama"),  # as DeepSeek-R1-Distill-Llama
    ("LlamaTokenizerFast", "qwen2"),  # as DeepSeek-R1-Distill-Qwen
    ("LlamaTokenizer", "mistral"),
    ("Qwen2Tokenizer", "qwen2"),
    ("Qwen2TokenizerFast", "qwen3_moe"),
    ("GPT2Tokenizer", "gpt2"),
    ("GPTNeoXTokenizerFast", "gpt_neox"),
    ("GemmaTokenizer", "gemma2"),
    ("CohereTokenizerFast", "cohere"),
    ("PreTrainedTokenizerFast", "llama"),
]


def write(folder: Path, class_name: str, model_type: str) -> Tokenizer:
    """Writes a byte-level tokenizer whose splitting, options and normalizer are those of no class; returns that of the
    file.
    """
    tokenizer = bpe_tokenizer([TEXT * 2, "Hello lazy worlds 12 34"], 300, 256)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    backend = Tokenizer.from_file(str(file))
    assert isinstance(backend.model, models.BPE)
    backend.model.ignore_merges = True
    backend.normalizer = normalizers.Replace("lazy", "Hello")
    backend.save(str(file))
    name_class(folder, class_name)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 300}))
    return backend


def name_class(folder: Path, class_name: str) -> None:
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": class_name}))


@pytest.mark.parametrize(("class_name", "model_type"), CLASSES)
def test_ids_and_texts_are_those_of_the_file(tmp_path, class_name, model_type) -> None:
    file = write(tmp_path, class_name, model_type)
    tokenizer = Policy(tmp_path).tokenizer
    ids = file.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer(TEXT, add_special_tokens=False)["input_ids"] == ids
    assert tokenizer.decode(ids) == file.decode(ids, skip_special_tokens=False) == TEXT.replace("lazy", "Hello")
    assert tokenizer.eos_token_id == file.token_to_id(str(tokenizer.eos_token))
    assert _tokenize([TEXT], str(tmp_path)) == [ids]
    again = tmp_path / "saved"
    tokenizer.save_pretrained(again)
    assert Tokenizer.from_file(str(again / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids == ids


def test_vllm_loads_the_same_tokenizer(tmp_path) -> None:
    from vllm.tokenizers import get_tokenizer

    file = write(tmp_path, "LlamaTokenizerFast", "llama")
    assert Policy(tmp_path).tokenizer
    assert get_tokenizer(str(tmp_path)).encode(TEXT, add_special_tokens=False) == file.encode(TEXT).ids


def test_so_are_those_of_a_processor_of_images(tmp_path) -> None:
    tiny_vision_model(tmp_path, 0)
    name_class(tmp_path, "Qwen2Tokenizer")
    file = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = Policy(tmp_path).processor.tokenizer("red blue", add_special_tokens=False)["input_ids"]
    assert ids == file.encode("red blue").ids


def test_a_tokenizer_without_the_file_is_made_by_its_class(tmp_path) -> None:
    file = write(tmp_path, "Qwen2Tokenizer", "qwen2")
    file.model.save(str(tmp_path))  # vocab.json and merges.txt
    (tmp_path / "tokenizer.json").unlink()
    ids = Policy(tmp_path).tokenizer("lazy cafe\u0301", add_special_tokens=False)["input_ids"]
    assert file.decode(ids) == "lazy caf\u00e9", "the class has a normalizer of its own"


def test_every_file_that_loads_a_tokenizer_or_an_engine_prepares_first() -> None:
    files = list((ROOT / "rloo_pipeline").rglob("*.py"))
    loads = ("AutoTokenizer.from", "AutoProcessor.from", 'import_module("vllm")')
    texts = {file.name: file.read_text() for file in files if any(each in file.read_text() for each in loads)}
    assert len(texts) > 4
    assert [name for name, text in texts.items() if "tokenizer_file.prepare_tokenizers()" not in text] == []
