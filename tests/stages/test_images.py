"""Prompts with images: sampler and trainer hold the same model and see the same pixels, before and after an update."""

from pathlib import Path
from typing import Any

import forks
import one_model
import pytest
from one_model import Rollout, Rows
from rounding import within

from rloo_pipeline.artifacts import model_dims
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.rollout.requests import Request, SamplingConfig

pytestmark = [pytest.mark.slow, pytest.mark.long]

HOW = SamplingConfig(1.0, 1.0, 0, None, 6)
CLOSE = within(1e-3, 2e-2)
QWEN = ("qwen2_5_vl", "qwen3_vl")
KINDS = ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.long), "gemma3"]
SPREAD = {"gemma3": 0.1}
"""Standard deviation of the weights by kind: with large embeddings, Gemma repeats the last token whatever it sees."""
COLOURS = [["red"], ["blue"], ["green", "yellow"], []]
"""Squares that the prompts show: two prompts have the same ids and other pixels."""


def model(folder: Path, kind: str) -> Path:
    """A model whose completions depend on its images, with the record that the stage `warmstart` writes."""
    from rloo_pipeline.demo.vision_model import tiny_vision_model
    from rloo_pipeline.training import self_check

    tiny_vision_model(folder, 3, model_type=kind, initializer_range=SPREAD.get(kind, 0.3))
    self_check.load_or_run(Policy(folder), images=True).write(folder)
    return folder


def images() -> list[list[Any]]:
    """The images of the prompts; one is wider than high, so that height and width cannot be mixed up unseen."""
    import random

    from rloo_pipeline.demo.colours import square

    draw = random.Random(0)
    shown = [[square(name, draw) for name in names] for names in COLOURS]
    shown[2][1] = shown[2][1].resize((130, 60))
    return shown


def requests(folder: Path) -> list[Request]:
    """Two completions of each prompt."""
    from rloo_pipeline.config import Dataset
    from rloo_pipeline.data.images import encode
    from rloo_pipeline.rollout.requests import ShownImages

    folder = Policy(folder).base
    dataset = Dataset.model_validate({"train": {"path": "a.jsonl"}, "eval": {"path": "a.jsonl"}, "image_column": "x"})
    processor = Policy(folder).processor
    asked = []
    for number, pixels in enumerate(images()):
        messages = [{"role": "user", "content": "colour?"}]
        ids = encode(messages, pixels, dataset, processor, "a prompt")
        shown = ShownImages(pixels, [f"{number}-{place}" for place in range(len(pixels))], ids.placeholder_ids)
        asked += [
            Request(ids.prompt_ids, seed, HOW, shown if pixels else None) for seed in (2 * number, 2 * number + 1)
        ]
    return asked


def sequences(folder: Path, rows: Rows, change: Any = lambda image: image) -> Any:
    """The completions and the images of their prompts, which `change` changes."""
    from rloo_pipeline.training.packing import RowImages, Sequences

    policy = Policy(folder)
    shown = [[change(image) for image in of_prompt] for of_prompt in images() for _ in range(2)]
    prompts, completions = [one.prompt_ids for one in requests(folder)], [ids for ids, _ in rows]
    return Sequences(prompts, completions, images=RowImages(shown, policy.pixels, policy.image_tokens))


def turned(folder: Path, rows: Rows) -> Any:
    """The same with images upside down and without colours."""
    return sequences(folder, rows, lambda image: image.rotate(180).convert("L").convert("RGB"))


def rollout(folders: list[Path]) -> list[Rows]:
    """Completions of each policy; the first starts the engine, and the others are swapped in."""
    asked = Rollout(requests(folders[0]), 128, images=2)
    return one_model.rollout([(folder, asked) for folder in folders])[0]


def some(asked: list[Request]) -> Rows:
    """Completions that no policy has sampled, to train on before there is an engine."""
    return [([9 + (3 * row + step) % 6 for step in range(HOW.max_completion_length)], []) for row in range(len(asked))]


def apart(folder: Path, rows: Rows) -> dict[str, Any]:
    """Largest difference between sampler and trainer, nats; also, by row, where the trainer sees turned images."""
    module, same = one_model.trainer_logps(folder, sequences, rows, "float32")
    _, other = one_model.trainer_logps(folder, turned, rows, "float32")
    logps = [logps for _, logps in rows]
    largest = [max(row) for row in one_model.differences(logps, other)]
    never = set(module.never)
    return {
        "same": max(map(max, one_model.differences(logps, same))),
        "turned": largest[:6],
        "form": module.form.name,
        "placeholders": any(never & set(ids) for ids, _ in rows),
    }


def update(folder: Path, target: Path, train_vision: bool) -> float:
    """Makes some completions likelier; returns how much likelier."""
    changes = {"train_vision": train_vision, "gradient_checkpointing": not train_vision}
    return one_model.update(folder, sequences, some(requests(folder)), target, changes)


def update_adapter(folder: Path, target: Path) -> float:
    """As `update`, of an adapter on all linear layers of the language model."""
    from rloo_pipeline.config import Lora

    changes = {"lora": Lora(r=4), "rate": 0.005}
    return one_model.update(folder, sequences, some(requests(folder)), target, changes)


def changed(first: Path, second: Path) -> dict[str, bool]:
    """Whether weights of the vision encoder, and whether others, differ between two policies."""
    from safetensors.torch import load_file

    before, after = (load_file(folder / "model.safetensors") for folder in (first, second))
    different = [name for name in before if not before[name].equal(after[name])]
    of_vision = [bool(model_dims.VISION.search(name)) for name in different]
    return {"vision": any(of_vision), "text": not all(of_vision)}


@pytest.mark.parametrize("kind", KINDS)
def test_sampler_and_trainer_are_one_model_of_images(kind, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = forks.call(model, tmp_path / "first", kind)
    folders = {"language": tmp_path / "language", "whole": tmp_path / "whole"}
    for name, folder in folders.items():
        assert forks.call(update, first, folder, name == "whole") > 0
    assert changed(first, folders["language"]) == {"vision": False, "text": True}
    assert changed(first, folders["whole"]) == {"vision": True, "text": True}
    *each, again = forks.call(rollout, [first, *folders.values(), first])
    assert again == each[0] != each[1], "a swap back samples the same"
    for folder, sampled in zip([first, *folders.values()], each, strict=True):
        outcome = forks.call(apart, folder, sampled)
        assert outcome["same"] < CLOSE
        assert min(outcome["turned"]) > 10 * CLOSE, "other pixels would be seen"
        assert outcome["form"] == "padded"
        assert not outcome["placeholders"]


@pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=pytest.mark.long) for kind in QWEN), "gemma3"])
def test_an_adapter_of_a_model_of_images_is_one_of_its_language_model(kind, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    base, first, second = (tmp_path / name for name in ("base", "first", "second"))
    forks.call(model, base, kind)
    assert forks.call(update_adapter, base, first) > 0
    assert forks.call(update_adapter, first, second) > 0
    assert len(linear_layers(second)) == 14, "seven linear layers in each of two layers"
    assert not any(model_dims.VISION.search(f"{name}.") for name in linear_layers(second))
    sampled = forks.call(rollout, [first, second])
    for folder, completions in zip([first, second], sampled, strict=True):
        outcome = forks.call(apart, folder, completions)
        assert outcome["same"] < CLOSE
        assert min(outcome["turned"]) > 10 * CLOSE, "other pixels would be seen"
        assert outcome["form"] == "padded"
    without = forks.call(apart, base, sampled[1])
    assert without["same"] > 10 * CLOSE, "the adapter is not nothing"


def linear_layers(adapter: Path) -> set[str]:
    """Names of the layers that an adapter changes."""
    from safetensors import safe_open

    with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
        return {name.partition(".lora_")[0] for name in file.keys()}  # noqa: SIM118


def text_requests() -> list[Request]:
    """Two completions of each of three prompts of different length, without images."""
    return [Request([1, *range(9, 9 + length), 2], 2 * length + seed, HOW) for length in (3, 7, 4) for seed in range(2)]


def rollout_texts(folders: list[Path]) -> list[Rows]:
    """As `rollout`, in an engine that takes no images."""
    return one_model.rollout([(folder, Rollout(text_requests(), 128)) for folder in folders])[0]


def text_sequences(_: Path, rows: Rows) -> Any:
    """The completions of `text_requests`."""
    from rloo_pipeline.training.packing import Sequences

    return Sequences([one.prompt_ids for one in text_requests()], [ids for ids, _ in rows])


def update_texts(folder: Path, target: Path) -> float:
    """As `update`, without images."""
    return one_model.update(folder, text_sequences, some(text_requests()), target, {})


def text_distance(folder: Path, rows: Rows) -> one_model.Distance:
    """Between sampler and trainer."""
    return one_model.distance(folder, text_sequences, rows)


@pytest.mark.parametrize("kind", [*QWEN, "gemma3"])
@pytest.mark.long
def test_a_run_of_such_a_model_without_images_is_packed(kind, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = forks.call(model, tmp_path / "first", kind), tmp_path / "second"
    (first / "self_check.json").unlink()
    assert forks.call(update_texts, first, second) > 0
    assert changed(first, second) == {"vision": False, "text": True}
    for folder, sampled in zip([first, second], forks.call(rollout_texts, [first, second]), strict=True):
        outcome = forks.call(text_distance, folder, sampled)
        assert outcome.form == "packed"
        assert outcome.largest < CLOSE
