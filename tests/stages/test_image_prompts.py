"""Prompts with images: each image is stored once, and two prompts with the same ids and other images are two."""

import random
import shutil
from pathlib import Path

import forks
import pyarrow as pa
import pytest
import yaml
from helpers import done, mini
from PIL import Image

from rloo_pipeline.artifacts import image_store, tables
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.config import Config
from rloo_pipeline.data import images
from rloo_pipeline.demo.colours import square
from rloo_pipeline.demo.vision_model import tiny_vision_model
from rloo_pipeline.errors import UserError
from rloo_pipeline.report import samples
from rloo_pipeline.rollout.templating import Templater
from rloo_pipeline.training import round_data
from rloo_pipeline.user_code.score_table import batch_of

pytestmark = pytest.mark.slow

ROWS = """
from pathlib import Path
from PIL import Image

def rows(names):
    shown = [Image.open(Path(__file__).with_name(f"{name}.png")) for name in names]
    return [{"prompt": [{"role": "user", "content": "colour?"}], "image": one} for one in shown]
"""


ADDED = {"qwen2_5_vl": 3, "gemma3": 18}
"""How many tokens longer a prompt is for the model than for vLLM. 56 by 56 pixels are four tokens of Qwen-VL, of which
the placeholder is one, and 16 of Gemma, which has one more behind them, and an empty line.
"""
PATCHES = {"qwen2_5_vl": 16, "gemma3": 1}
"""First dimension of the pixels of an image."""


@pytest.fixture(scope="module", params=["qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.long)])
def kind(request) -> str:
    """Type of the model."""
    return str(request.param)


@pytest.fixture(scope="module")
def run(kind, tmp_path_factory):
    """Prompts of a run: three training rows, of which one has the image of a held-out row."""
    folder = tmp_path_factory.mktemp("images")
    tiny_vision_model(folder / "model", 0, model_type=kind)
    draw = random.Random(0)
    for name in ("red", "green", "blue"):
        square(name, draw).save(folder / f"{name}.png")
    (folder / "mine.py").write_text(ROWS)
    parts = {"train": ["red", "green", "red"], "eval": ["blue", "green"]}
    rows = f"{folder}/mine.py:rows"
    source = {name: {"generator": rows, "options": {"names": names}} for name, names in parts.items()}
    config = mini() | {"model": {"name_or_path": str(folder / "model"), "dtype": "float32"}}
    config |= {"dataset": {**source, "image_column": "image", "max_prompt_length": 64}}
    del config["warmstart"]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    for words in (("stage-assets",), ("prompts", "--assets", folder / "assets")):
        done(*words, "--output", folder / words[0].replace("stage-", ""))
    return folder


def test_prompts_with_the_same_ids_and_other_images_are_two(run, kind) -> None:
    train, held_out = PromptSet(run / "prompts" / "train"), PromptSet(run / "prompts" / "eval")
    assert (len(train), len(held_out)) == (1, 2), "one training row is a duplicate, and one a held-out row"
    first, second = held_out.rows([0, 1])
    assert first["prompt_ids"] == second["prompt_ids"]
    assert first["prompt_id"] != second["prompt_id"]
    assert len(first["prompt_ids"]) == len(first["placeholder_ids"]) + ADDED[kind]


def test_an_image_that_the_model_cannot_take_is_named_by_its_row(run, kind) -> None:
    if kind == "gemma3":
        pytest.skip("takes every form")
    model, dataset = Policy(run / "model"), Config(**mini()).dataset
    with pytest.raises(UserError, match=r"^row 7: the model's processor refuses an image \(absolute aspect ratio"):
        images.encode(
            [{"role": "user", "content": "?"}], [Image.new("RGB", (4000, 2))], dataset, model.processor, "row 7"
        )


def test_a_question_about_an_image_that_is_empty_is_named_by_its_row(run) -> None:
    dataset = Config(**mini()).dataset.model_copy(update={"image_column": "image", "user_prompt": None})
    row = {"prompt": [{"role": "user", "content": " "}], "image": square("red", random.Random(0))}
    with pytest.raises(UserError, match=r"^mine, row 0: the last message of a prompt is empty; write it, or drop"):
        list(Templater(dataset, Policy(run / "model")).prompt_rows([row], "mine"))


def test_each_image_is_stored_once_and_comes_back_as_it_was(run) -> None:
    held_out = PromptSet(run / "prompts" / "eval")
    assert held_out.images is not None
    assert len(held_out.images._table) == 3
    [blue] = held_out.rows([0])
    with Image.open(run / "blue.png") as image:
        assert blue["image"].tobytes() == image.tobytes()
    with pytest.raises(UserError, match="no image abc"):
        held_out.images.image("abc")


def rollouts(run, ids: list[list[str]] | None = None) -> pa.Table:
    """Two completions of each held-out prompt."""
    rows = PromptSet(run / "prompts" / "eval").rows([0, 1])
    return pa.Table.from_pylist(
        [
            {"prompt_id": row["prompt_id"], "sample": sample, "prompt_ids": row["prompt_ids"], "completion_ids": [10]}
            | {"completion": "red", "sampling_logps": [-1.0], "finish_reason": "stop", "seed": 0}
            | {image_store.IDS: row[image_store.IDS]}
            for row in rows
            for sample in range(2)
        ],
        schema=tables.WITH_IMAGES,
    )


def test_reward_functions_get_the_pixels(run) -> None:
    batch = batch_of(rollouts(run), PromptSet(run / "prompts" / "eval"))
    assert [image.size for image in batch.columns["image"]] == [(56, 56)] * 4
    assert batch.columns["image"][0].tobytes() != batch.columns["image"][2].tobytes()
    assert not {"image_ids", "placeholder_ids", image_store.PIXELS} & batch.columns.keys()


def test_the_trainer_gets_the_images_of_each_row(run, kind) -> None:
    images = round_data.images_of(rollouts(run), run / "prompts", Policy(run / "model"))
    assert images is not None
    both, second = images.pick([0, 2]), images.pick([3])
    assert both is not None
    assert second is not None
    assert both.arguments.keys() == {"pixel_values", *(["image_grid_thw"] if kind == "qwen2_5_vl" else [])}
    if kind == "qwen2_5_vl":
        assert both.arguments["image_grid_thw"].tolist() == [[1, 4, 4]] * 2
    assert both.arguments["pixel_values"][PATCHES[kind] :].equal(second.arguments["pixel_values"])
    with pytest.raises(UserError, match="--prompts"):
        round_data.images_of(rollouts(run), None, Policy(run / "model"))


def policy_0(model: Path, folder: Path) -> Path:
    """The model with the record that the stage `warmstart` writes."""
    from rloo_pipeline.training import self_check

    shutil.copytree(model, folder)
    self_check.load_or_run(Policy(folder), images=True).write(folder)
    return folder


def test_reference_log_probs_are_of_a_model_that_sees_the_images(run) -> None:
    folder = forks.call(policy_0, run / "model", run / "policy")
    facts = {"run": "mini", "round": 1, "shard": 0, "seed": 1, "policy": Policy(folder).digest, "policy_round": 0}
    shard, written = run / "rollouts.parquet", run / "reference.parquet"
    tables.write(shard, rollouts(run), tables.WITH_IMAGES, "rollouts", **facts)
    inputs = (
        "--configfile",
        run / "config.yaml",
        "--policy",
        folder,
        "--prompts",
        run / "prompts",
        "--rollouts",
        shard,
    )
    done("reference", *inputs, "--output", written)
    first, again, other, _ = tables.read(written, "reference")["reference_logps"].to_pylist()
    assert first == pytest.approx(again, abs=1e-6)
    assert abs(first[0] - other[0]) > 1e-5, "another image and the same ids"


def test_the_page_has_small_images_and_asks_nobody_for_them(run) -> None:
    [row] = PromptSet(run / "prompts" / "eval").rows([0])
    large = row["image"].resize((3000, 2000))
    [message] = samples._messages({**row, image_store.PIXELS: [large] * 6})
    assert message["content"] == "[2 more images]\ncolour?"
    assert len(message["images"]) == samples.IMAGES
    assert all(image.startswith("data:image/webp;base64,") and len(image) < 10_000 for image in message["images"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rollout": {"tools": ["rloo_pipeline.environments.tools:calculator"]}},
            "image_column: image cannot be used with rollout.tools",
        ),
        ({"model": {"quantization": "nf4"}}, "image cannot be used with model.quantization: nf4"),
        (
            {"model": {"train_vision": True}, "update": {"lora": {}}},
            "model.train_vision cannot be used with update.lora",
        ),
        ({"deepspeed": {"zero_stage": 3}}, "image cannot be used with deepspeed.zero_stage: 3"),
        ({"evaluation": {"harness": {"tasks": ["gsm8k"]}}}, "image cannot be used with evaluation.harness"),
        ({"warmstart": mini()["warmstart"]}, "image cannot be used with warmstart.sft"),
        (
            {"model": {"train_vision": True}, "deepspeed": {"processes": 2}},
            "model.train_vision cannot be used with deepspeed.processes: 2",
        ),
        (
            {"dataset": {"image_column": None}, "model": {"train_vision": True}},
            "model.train_vision: there are no images",
        ),
    ],
)
def test_what_does_not_go_with_images_gives_a_one_line_error(changes, message) -> None:
    base = {**mini(), "warmstart": {}}
    for section, keys in ({"dataset": {"image_column": "image"}} | changes).items():
        base[section] = {**base.get(section, {}), **keys}
    with pytest.raises(ValueError, match=message):
        Config(**base)
