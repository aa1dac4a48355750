"""A refusal of a stage that depends on configuration, data and model alone is given by `rloo check` before a run.

The table lists every `UserError` of the packages that stages are made of: how `check` gives it, or why it cannot.
"""

import ast
import base64
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import model_folders
import pytest
from helpers import ROOT, merged, mini

from rloo_pipeline import import_string
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.before_run import data_trial, model_trial
from rloo_pipeline.before_run.findings import RunInputs
from rloo_pipeline.config import Config

PACKAGES = ("artifacts", "checks", "data", "rollout", "stages", "training", "transformers_internals")
DATA = (data_trial.datasets, data_trial.enough)
MODEL, WEIGHTS, TOKENIZER, MACHINE, SAMPLING = (
    (function,)
    for function in (
        *(model_trial.model, model_trial.weights, model_trial.tokenizer, model_trial.machine),
        model_trial.sampling,
    )
)
ROWS = [{"question": f"{n}+{n}", "answer": str(2 * n)} for n in range(20)]
DEMONSTRATIONS = {"demonstrations": {"path": "train.jsonl"}, "completion_column": "answer"}
PROMPTS = {"user_prompt": None, "prompt_column": "prompt"}
ASKED = [{"role": "user", "content": "?"}]
PIXEL = {
    "bytes": base64.b64decode("R0lGODlhAQABAIAAAP///wAAACwAAAAAAQABAAACAkQBADs="),
    "path": None,
}
DELTA = {"linear_num_value_heads": 4, "linear_key_head_dim": 96}
COMPILED = {"update": {"torch_compile": True}}
REPLAY = {"rollout": {"router_replay": True}}
LORA = {"target_modules": ["q_proj"]}


class Case(NamedTuple):
    """An input that a stage refuses."""

    message: str
    """Part of the message, or several parts."""
    rows: Any = ROWS
    """Training rows: objects, the content of the file, or a function that a generator is."""
    config: Mapping[str, Any] = {}
    """Changes of the configuration."""
    model: Callable[[Path], object] = os.fspath
    """Changes the folder of the model."""
    checks: tuple[Callable[[RunInputs], Iterator[Any]], ...] = DATA
    name: str = "train.jsonl"
    """Of the file with training rows."""
    gpu: bool = False
    """The machine has a GPU."""


def values(message: str, *extra: Any) -> Case:
    """A generator with these values in a column."""
    return Case(f"the generator made:rows, {message}", lambda: [ROWS[0] | {"extra": value} for value in extra])


def prompts(message: str, prompt: Any, **config: Any) -> Case:
    """Rows with a prompt of their own."""
    return Case(message, [{"prompt": prompt, "answer": "1"}], {"dataset": PROMPTS | config})


def pair(message: str, dataset: Mapping[str, Any] | None = None, **columns: Any) -> Case:
    """A row of preferences for a reward model."""
    rewards = [{"function": "rloo_pipeline.rewards.model:reward_model"}, *mini()["rewards"]]
    config = {"reward_model": {"train": {"path": "train.jsonl"}}, "rewards": rewards, "dataset": dataset or {}}
    return Case(message, [ROWS[0] | columns], config)


def images(message: str, row: dict[str, Any], **config: Any) -> Case:
    """Rows of a run with images."""
    return Case(message, lambda: [ROWS[0] | row], {"dataset": {"image_column": "image", **config}})


def edited(name: str, **keys: Any) -> Callable[[Path], object]:
    """Changes keys of a JSON file of the model."""

    def edit(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | keys))

    return edit


def of_kind(kind: str) -> Callable[[Path], object]:
    """Writes a model of another class."""
    return lambda folder: model_folders.build(folder, 0, kind)


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def written(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Changes the weights of the model."""

    def save(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return save


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def a_pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe.json")


def raising() -> list[dict[str, Any]]:
    raise KeyError("boom")


def machine(message: str, dtype: str = "float32", **keys: Any) -> Case:
    """What the sampler refuses on CPUs; a note, as stages may run on a machine with a GPU."""
    return Case(message, config={"model": {"dtype": dtype}}, model=edited("config.json", **keys), checks=MACHINE)


def sampling(message: str, **keys: Any) -> Case:
    """Keys of `rollout.generation_kwargs`."""
    config = {"rollout": {"generation_kwargs": keys}, "algorithm": {"mismatch": {"correction": "sequence_tis"}}}
    return Case(f"rollout.generation_kwargs: {message}", config=config, checks=SAMPLING)


STAGES_FILE = "about a file that a stage wrote"
SAMPLED = "needs sampled completions or their scores"
BY_HAND = "about an option of a stage that rules always give"
TOOLS = "tests/unit/commands/test_episode_trial.py"
IMAGES = "tests/stages/test_image_prompts.py"
WEIGHTS_IN_MEMORY = "needs all weights in memory, which `warmstart` reads"
NODE = "about the node that the stage runs on"

TABLE: dict[str, str | tuple[Case | str, ...]] = {
    "artifacts.assets": STAGES_FILE,
    "artifacts.episodes": STAGES_FILE,
    "artifacts.fence": "about a second start of a stage",
    "artifacts.files": STAGES_FILE,
    "artifacts.function_copies": STAGES_FILE,
    "artifacts.image_store.decode": (images("PIL cannot read the image", {"image": PIXEL | {"bytes": b"x"}}),),
    "artifacts.image_store.ImageStore.file": STAGES_FILE,
    "artifacts.lineage": STAGES_FILE,
    "artifacts.manifest": STAGES_FILE,
    "artifacts.model_dims.read": "about a plan; stages go on without the dimensions",
    "artifacts.model_dims.check_types": (
        Case(
            "config.json: rope_parameters is 'x', not an object; fetch",
            model=edited("config.json", rope_parameters="x"),
            checks=MODEL,
        ),
    ),
    "artifacts.model_files.check_files": (Case("pipe.json: a pipe, socket or device", model=a_pipe, checks=MODEL),),
    "artifacts.model_files.check": (
        Case("no config.json, so this is no", model=lambda folder: (folder / "config.json").unlink(), checks=WEIGHTS),
        Case(
            "b.safetensors: missing, though",
            model=edited("model.safetensors.index.json", weight_map={"a": "b.safetensors"}),
            checks=WEIGHTS,
        ),
        Case("no weights", model=lambda folder: (folder / "model.safetensors").unlink(), checks=WEIGHTS),
        Case("only pickled weights (pytorch_model.bin)", model=pickled, checks=WEIGHTS),
    ),
    "artifacts.model_files.tensors_in": (
        Case("model.safetensors: truncated or damaged", model=cut, checks=WEIGHTS),
        Case("model.safetensors: only a pointer of Git LFS", model=pointer, checks=WEIGHTS),
    ),
    "artifacts.model_files.check_loading_info": (
        Case("model.norm.weight is missing", model=tensors(lambda held: held.pop("model.norm.weight")), checks=WEIGHTS),
    ),
    "artifacts.model_files.adapter_modules": STAGES_FILE,
    "artifacts.model_files.check_finite": (
        Case(
            "model.norm.weight has values that are not finite",
            model=tensors(lambda held: held["model.norm.weight"].fill_(float("nan"))),
            checks=WEIGHTS,
        ),
    ),
    "artifacts.node_files": NODE,
    "artifacts.policy.Policy.verify": NODE,
    "artifacts.policy.chosen_of": STAGES_FILE,
    "artifacts.policy.Policy.transformers_config": (
        Case("transformers cannot read this", model=edited("config.json", hidden_size="x"), checks=MODEL),
    ),
    "artifacts.policy.Policy.vocabulary": (
        Case("config.json: has no vocab_size", model=edited("config.json", vocab_size=None), checks=WEIGHTS),
    ),
    "artifacts.policy.Policy.tokenizer": (
        Case("no tokenizer can be loaded", model=written("tokenizer.json", "{}"), checks=TOKENIZER),
        Case("no tokenizer (no tokenizer.json)", model=without_tokenizer, checks=TOKENIZER),
        Case("no EOS token", model=edited("tokenizer_config.json", eos_token=None), checks=TOKENIZER),
    ),
    "artifacts.policy._object": (
        Case(
            "holds [], not an object with keys; fetch or write the model again",
            model=written("generation_config.json", "[]"),
            checks=TOKENIZER,
        ),
    ),
    "artifacts.policy.Policy.generation_ends": (
        Case(
            "eos_token_id has 1e+308, which is not a token id",
            model=edited("generation_config.json", eos_token_id=[2, 1e308]),
            checks=TOKENIZER,
        ),
    ),
    "artifacts.policy.Policy.stop_ids": (
        Case(
            "the end token 9999 has no row in the model's embedding",
            model=edited("generation_config.json", eos_token_id=[2, 9999]),
            checks=TOKENIZER,
        ),
    ),
    "artifacts.prompt_set.PromptSet": STAGES_FILE,
    "artifacts.prompt_set.as_dataset": (
        Case("made:rows: column 'extra' cannot be stored", lambda: [row | {"extra": Decimal("1e999")} for row in ROWS]),
    ),
    "artifacts.round_tables": STAGES_FILE,
    "artifacts.tables": STAGES_FILE,
    "artifacts.vision.load_processor": (
        IMAGES,
        Case("has no preprocessor_config.json", config={"dataset": {"image_column": "image"}}, checks=TOKENIZER),
        IMAGES,
    ),
    "data.building.build": (
        Case(
            "model.build_options do not fit",
            rows=raising,
            config={"model": {"build": "made:rows", "build_options": {"size": 1}}},
            checks=MODEL,
        ),
        Case(
            "model.build: made:rows raised KeyError: 'boom'",
            rows=lambda folder, seed: raising(),
            config={"model": {"build": "made:rows"}},
            checks=MODEL,
        ),
    ),
    "data.building.named_in_errors": "tests/unit/training/test_model_support.py",
    "data.images._bytes_of": (
        images("column 'image' holds 3; an image is", {"image": 3}),
        images("the image /no.png cannot be read", {"image": {"bytes": None, "path": "/no.png"}}),
    ),
    "data.images._parts": (
        images(
            "a message has the content ['x']",
            {"prompt": [{"role": "user", "content": ["x"]}], "image": None},
            **PROMPTS,
        ),
    ),
    "data.images.with_parts": (
        images("must be messages", {"prompt": "a", "image": None}, **PROMPTS),
        images("needs a user message", {"prompt": [{"role": "system", "content": "a"}], "image": PIXEL}, **PROMPTS),
        images(
            "places for 1 images but the row has 0",
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "image": None},
            **PROMPTS,
        ),
    ),
    "data.images.check_named": (
        Case(
            "column 'image' has images that no prompt would show",
            lambda: [ROWS[0] | {"image": PIXEL}],
            model=edited("config.json", model_type="qwen2_5_vl"),
        ),
    ),
    "data.images.encode": (IMAGES, IMAGES, IMAGES, IMAGES),
    "data.text_rows.read": (Case("train.jsonl: is empty", "\n\n"),),
    "data.text_rows._decoded": (Case("line 1: not UTF-8", b'{"question": "\xe9"}'),),
    "data.text_rows._parsed": (
        Case("line 1: an object has the key 'a' twice", '{"a": 1, "a": 2}'),
        Case("line 1: not JSON", '{"question": '),
        Case("line 1: lists or objects are nested too deeply", f'{{"a": {"[" * 100_000}{"]" * 100_000}}}'),
        Case("line 1: a number has more than 4,300 digits", f'{{"a": {"1" * 100_000}}}'),
    ),
    "data.text_rows._located": (
        Case("line 1: holds a list, not an object with columns; write one object per row", "[1]"),
    ),
    "data.text_rows.of_table": (
        Case("line 2: 3 fields for 2 columns", "question,answer\n1,2,3\n", name="train.csv"),
        Case("line 2: not .csv (unexpected end of data)", 'question,answer\n"1,2\n', name="train.csv"),
        Case("line 1: two columns have the name 'answer'", "answer,answer\n1,2\n", name="train.csv"),
    ),
    "data.kinds._plain": (
        values("row 1: column 'extra' holds a set", None, {1}),
        values("row 0: column 'extra' has a number of 16,610 bits", 10**5000),
        values("row 1: column 'extra' holds text ('1') and a number in row 0", 1, "1"),
        Case("nested more than 100 levels", f'{{"a": {"[" * 200}{"]" * 200}}}'),
    ),
    "data.kinds._key": (values("row 0: column 'extra' has the key 1", {1: 2}),),
    "data.kinds._text": (Case("line 1: column 'question' has half of a character", '{"question": "\\ud83d"}'),),
    "data.kinds._float": (Case("line 2: column 'a' holds the integer", f'{{"a": 0.5}}\n{{"a": {2**53 + 1}}}'),),
    "data.plain_text.PlainText": "tests/unit/data/test_plain_text.py",
    "data.preferences.preferences": (
        pair("row 0: chosen and rejected are equal", chosen="a", rejected="a"),
        pair(
            "row 0: one of chosen and rejected is a string",
            chosen="a",
            rejected=[{"role": "assistant", "content": "b"}],
        ),
        pair("row 0: column 'prompt' holds 3", chosen="a", rejected="b", prompt=3),
    ),
    "data.preferences._completion": (pair("row 0: column 'rejected' holds ''", chosen="a", rejected=""),),
    "data.preferences._with_system": (
        pair("row 0: dataset.system_prompt needs messages", {"system_prompt": "Add."}, chosen="a", rejected="b"),
    ),
    "data.preferences._margin": (pair("row 0: column 'margin' holds 'x'", chosen="a", rejected="b", margin="x"),),
    "data.prompting._ids_of_string": (prompts("row 0: a prompt that is a string spells", "<|im_end|>"),),
    "data.prompting.check_embedded": (
        Case("has no row in the model's embedding (4 rows)", model=edited("config.json", vocab_size=4)),
    ),
    "data.prompting._check_length": (prompts("row 0: a prompt has 10,000,001 characters", "1" * 10_000_001),),
    "data.prompting.check_names": (
        Case("column 'seconds' is a name of the run's own tables", [ROWS[0] | {"seconds": 1}]),
    ),
    "data.prompting.check_column": (Case("no column 'question'", [{"qestion": "1"}]),),
    "data.prompting.prompt_of": (
        Case("row 0: column 'question' is null", [{"question": None}]),
        Case(
            "row 0: dataset.user_prompt does not fit the row ('str' object has no attribute 'first'); correct one of "
            "them (a value inside a column is {column[key]})",
            config={"dataset": {"user_prompt": "{question.first}"}},
        ),
        prompts("row 0: column 'prompt' holds 3", 3),
        prompts("row 0: column 'prompt' ends with a message of the assistant", [{"role": "assistant", "content": "a"}]),
    ),
    "data.prompting._check_contents": (
        prompts("row 0: a message of the role 'user' has no content", [{"role": "user", "content": None}]),
        prompts("row 0: a message has a part of the type 'image'", [{"role": "user", "content": [{"type": "image"}]}]),
    ),
    "data.prompting.completion_messages": (
        Case("row 0: column 'answer'", [ROWS[0] | {"answer": 1}], {"warmstart": {"sft": DEMONSTRATIONS}}),
        Case(
            "'answer' (warmstart.sft.completion_column) ends with an empty text",
            [ROWS[0] | {"answer": " "}],
            {"warmstart": {"sft": DEMONSTRATIONS}},
        ),
    ),
    "data.prompting.encode": (
        "tests/unit/data/test_prompting.py",
        prompts("row 0: a prompt has no tokens", ""),
    ),
    "data.prompting.check_question": (
        Case("row 0: the last message of a prompt is empty", [{"question": "", "answer": "1"}]),
    ),
    "data.prompting.render": (
        Case("row 0: the prompt is messages, but", model=lambda folder: (folder / "chat_template.jinja").unlink()),
        Case("row 0: the chat template failed", model=written("chat_template.jinja", "{{ raise_exception('no') }}")),
    ),
    "data.prompts_of_round.prompts_of_round": SAMPLED,
    "data.prompts_of_round.require_enough": (
        Case(
            "19 kept, 1 duplicates): 19 training prompts, but a round needs 20; lower rollout.generation_batch_size, "
            "or add prompts that differ",
            [*ROWS[:19], ROWS[0]],
        ),
    ),
    "data.prompts_of_round._of_policy_0": SAMPLED,
    "data.prompts_of_round._latest": BY_HAND,
    "data.rows.read_rows": (Case("made:rows: the dataset is empty", list),),
    "data.rows._generated": (
        Case("the generator made:rows raised KeyError", raising),
        Case("the generator made:rows yielded a str as row 0", lambda: ["a"]),
        Case("options of the generator made:rows do not fit it", lambda size: size),
    ),
    "data.rows._loaded": (Case("train.parquet: truncated or damaged", "hello", name="train.parquet"),),
    "data.rows._check_shards": "tests/unit/data/test_rows.py",
    "data.rows._check_formats": "tests/unit/data/test_rows.py",
    "data.rows.check_file": (
        Case("dataset files can be", "a,b\n", name="train.txt"),
        Case("train.jsonl: is empty", ""),
    ),
    "data.tool_template": TOOLS,
    "rollout.vllm_internals": "counts the modules that a started engine applies",
    "rollout.engine_arguments._check_delta_net": (
        machine("DeltaNet layers (linear_num_value_heads) in bfloat16 only", **DELTA),
        machine("and linear_key_head_dim is 96", "bfloat16", **DELTA),
    ),
    "rollout.engine_arguments._check_experts": (machine("and hidden_size is 40", num_experts=4, hidden_size=40),),
    "rollout.engine_arguments._check_head": (
        "config.json does not tell whether vLLM computes latent attention",
        machine("attention heads of 32, 64", head_dim=48),
    ),
    "rollout.engine_arguments.check_invariant": (
        Case(
            "vLLM has no batch-invariant kernels for the model's recurrent layers",
            config={"reproducible": True},
            model=edited("config.json", mamba_n_heads=4),
            checks=MACHINE,
            gpu=True,
        ),
        Case(
            "with fp8_per_tensor, vLLM rounds the inputs of experts by the largest of the batch",
            config={
                "reproducible": True,
                "model": {"dtype": "bfloat16"},
                "rollout": {"quantization": "fp8_per_tensor"},
            },
            model=edited("config.json", num_experts=4),
            checks=MACHINE,
            gpu=True,
        ),
    ),
    "rollout.engine_arguments.check_on_cpu": (
        Case("rollout.router_replay: vLLM returns the experts", config=REPLAY, checks=MACHINE),
        Case(
            "fp8_per_block needs a GPU; on CPUs set fp8_per_channel",
            config={"model": {"dtype": "bfloat16"}, "rollout": {"quantization": "fp8_per_block"}},
            checks=MACHINE,
        ),
    ),
    "rollout.engine_arguments": NODE,
    "rollout.engine_arguments.context_length": (
        Case("the longest prompt (", config={"rollout": {"max_completion_length": 250}}),
    ),
    "rollout.episode_loop": TOOLS,
    "rollout.groups": SAMPLED,
    "rollout.partial": BY_HAND,
    "rollout.parallel_sampler": NODE,
    "rollout.resets": TOOLS,
    "rollout.sampler.refusals_told": (
        sampling("vLLM refuses a value (token_id(s) [10000] in stop_token_ids", stop_token_ids=[10_000]),
    ),
    "rollout.sampler._experts_of": SAMPLED,
    "rollout.sampler.completion_of": SAMPLED,
    "rollout.swap_check": SAMPLED,
    "rollout.templating": TOOLS,
    "rollout.templating.PromptParts.kept": (
        Case(
            "(4 also in eval); training prompts must not be held-out ones, so give train other prompts than eval (a "
            "number in the text",
            [{"question": f"{n}?"} for n in range(4)],
        ),
    ),
    "rollout.tool_calls": TOOLS,
    "stages.checks": SAMPLED,
    "stages.difficulty": BY_HAND,
    "stages.evaluate_chosen": STAGES_FILE,
    "stages.gate": SAMPLED,
    "stages.harness.section_of": BY_HAND,
    "stages.harness.load_tasks": "reads the data of the tasks, which the stage stage-harness fetches",
    "stages.held_out": BY_HAND,
    "stages.reward_model": "tests/stages/test_reward_model.py",
    "stages.score": BY_HAND,
    "stages.select": STAGES_FILE,
    "stages.stage_assets": "needs the network",
    "stages.teacher": STAGES_FILE,
    "stages.track": "about a finished run",
    "training.batch": SAMPLED,
    "training.batch.call_own": "tests/unit/before_run/test_loss_trial.py",
    "training.batch.check_keys_of_estimator": "tests/unit/before_run/test_loss_trial.py",
    "training.batch.load_estimator": "tests/unit/before_run/test_loss_trial.py",
    "training.batch.of_shape": "tests/unit/before_run/test_loss_trial.py",
    "training.objective": "tests/unit/before_run/test_loss_trial.py",
    "training.selection": STAGES_FILE,
    "training.deepspeed_internals.deepspeed_config": STAGES_FILE,
    "training.demonstrations.tokenized": (
        "tests/unit/training/test_demonstrations.py",
        Case(
            "no demonstration is left to train on; lower warmstart.sft.held_out",
            config={"warmstart": {"sft": DEMONSTRATIONS | {"held_out": 20}}},
        ),
    ),
    "training.demonstrations._check_turns": (
        Case(
            "row 0: a completion (warmstart.sft.completion_column) spells",
            [ROWS[0] | {"answer": "1<|im_end|>2"}],
            {"warmstart": {"sft": DEMONSTRATIONS}},
        ),
    ),
    "training.engine": "about the gradient of a step",
    "training.formats": "tests/unit/commands/test_check.py",
    "training.kernels.attention": "tests/unit/training/test_self_check.py",
    "training.logprobs": "`model_support.check_model` says it of prompts and completions of the longest length",
    "training.model_support.check_dtype_on_gpu": (
        Case(
            "model.dtype: float32 cannot be used with update.lora on a GPU",
            config={"update": {"lora": LORA}},
            checks=MACHINE,
            gpu=True,
        ),
    ),
    "training.model_support.check_lora": (
        Case(
            "vLLM serves no LoRA adapters for GPT2LMHeadModel",
            config={"update": {"lora": LORA}},
            model=edited("config.json", architectures=["GPT2LMHeadModel"]),
            checks=MODEL,
        ),
    ),
    "training.model_support.check_heads": (
        Case(
            "2 attention heads cannot be divided among the 3 processes",
            config={"deepspeed": {"processes": 3, "sequence_parallel": 3}},
            checks=MODEL,
        ),
    ),
    "training.model_support.check_run": (
        "`model_inputs.local_model` says it before",
        Case("adapter_config.json: this is an adapter", model=written("adapter_config.json", "{}"), checks=MODEL),
        Case(
            "the weights are in 4 bits (NF4)",
            model=edited("config.json", quantization_config={"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
            checks=MODEL,
        ),
        Case("the model has no experts; set rollout.router_replay: false", config=REPLAY, checks=MODEL),
        Case(
            "vLLM takes the embedding of lfm2 as its LM head; copy the embedding over the LM head",
            model=edited("config.json", model_type="lfm2", tie_word_embeddings=False),
            checks=MODEL,
        ),
    ),
    "training.model_support.check_model": (
        Case(
            "has num_hidden_layers 1000000000, more than 10,000",
            model=edited("config.json", num_hidden_layers=10**9),
            checks=MODEL,
        ),
        Case(
            "attn_implementation is a/b, which is code from the Hub",
            model=edited("config.json", attn_implementation="a/b"),
            checks=MODEL,
        ),
        Case(
            "a rotary embedding (dynamic) that changes beyond 64 tokens",
            model=edited(
                "config.json",
                rope_parameters={"rope_type": "dynamic", "original_max_position_embeddings": 64, "rope_theta": 10_000},
            ),
            checks=MODEL,
        ),
    ),
    "training.faster_kernels._refusal": (
        Case("it is a mixture of experts", config=COMPILED, model=of_kind("qwen3_moe"), checks=MODEL),
    ),
    "training.deepspeed_internals.nvme": NODE,
    "training.plain_model.load_plain": WEIGHTS_IN_MEMORY,
    "training.plain_model.check_gathered": "tests/unit/training/test_policy_model.py",
    "training.plain_model.load_nf4": WEIGHTS_IN_MEMORY,
    "training.plain_model.from_pretrained": "`self_check` says it before",
    "training.plain_model.load_adapter": STAGES_FILE,
    "training.policy_model._with_adapter": (
        Case(
            "PEFT cannot make an adapter for nothing",
            config={"update": {"lora": {"target_modules": "nothing"}}},
            checks=MODEL,
        ),
    ),
    "training.policy_model._check_architecture": (
        Case(
            "an adapter would be for Qwen3ForCausalLM, the language model alone",
            config={"update": {"lora": LORA}, "warmstart": {"sft": None}},
            model=edited("config.json", architectures=["Qwen3VLForConditionalGeneration"]),
            checks=MODEL,
        ),
    ),
    "training.policy_model._check_targets": (
        Case("no layer 'q_poj'", config={"update": {"lora": {"target_modules": ["q_poj"]}}}, checks=MODEL),
    ),
    "training.preference_pairs": "tests/stages/test_reward_model.py",
    "training.quantized": WEIGHTS_IN_MEMORY,
    "training.retraining": STAGES_FILE,
    "training.reward_engine": WEIGHTS_IN_MEMORY,
    "training.round_data": STAGES_FILE,
    "transformers_internals.router_replay.RouterReplay.use": STAGES_FILE,
    "transformers_internals.router_replay.RouterReplay.require": (
        Case("trains in padded batches, but replay", config=REPLAY, model=of_kind("granitemoehybrid"), checks=MODEL),
        Case("has no routers that can be replaced", config=REPLAY, model=of_kind("deepseek_v3"), checks=MODEL),
    ),
    "training.round_data.images_of": BY_HAND,
    "training.sampler_proof": SAMPLED,
    "training.self_check.__init__.run": (
        "tests/unit/training/test_self_check.py",
        Case("no form of batch gives", model=edited("config.json", num_attention_heads=0), checks=MODEL),
    ),
    "training.sequence_group.SequenceGroup": "counts the tokens of a micro-batch",
    "training.sequence_group.refusal": "tests/unit/before_run/test_long_sequences.py",
    "training.trainer_state": STAGES_FILE,
    "training.weight_files": NODE,
}
CASES = {
    f"{place} {number}": case
    for place, entry in TABLE.items()
    for number, case in enumerate(entry if isinstance(entry, tuple) else ())
    if isinstance(case, Case)
}


def refusals() -> Counter[str]:
    """How often each function of the packages raises a UserError."""
    found: Counter[str] = Counter()

    def visit(node: ast.AST, place: str) -> None:
        for child in ast.iter_child_nodes(node):
            inside = isinstance(child, ast.FunctionDef | ast.ClassDef)
            if isinstance(child, ast.Call) and getattr(child.func, "id", "") in {"UserError", "RefusedPolicyError"}:
                found[place] += 1
            visit(child, f"{place}.{child.name}" if inside else place)

    package = ROOT / "rloo_pipeline"
    for file in (file for name in PACKAGES for file in sorted((package / name).rglob("*.py"))):
        visit(ast.parse(file.read_text()), ".".join(file.relative_to(package).with_suffix("").parts))
    return found


def entry_of(place: str) -> str:
    """The longest key of the table that a function belongs to."""
    return max((key for key in TABLE if f"{place}.".startswith(f"{key}.")), key=len, default="")


def test_every_refusal_of_a_stage_is_in_the_table() -> None:
    found = refusals()
    assert {place for place in found if not entry_of(place)} == set(), "add how `check` gives them, or why it cannot"
    unused = TABLE.keys() - {entry_of(place) for place in found}
    assert unused == set()
    counts = {place: len(entry) for place, entry in TABLE.items() if isinstance(entry, tuple)}
    raised = {place: sum(count for other, count in found.items() if entry_of(other) == place) for place in counts}
    assert counts == raised


def test_the_tests_that_the_table_names_exist() -> None:
    entries = [one for entry in TABLE.values() for one in (entry if isinstance(entry, tuple) else (entry,))]
    named = {entry for entry in entries if isinstance(entry, str) and entry.startswith("tests/")}
    assert {name for name in named if not (ROOT / name).is_file()} == set()


@pytest.mark.parametrize("name", CASES)
def test_check_gives_the_refusal(name, tmp_path, tiny_model, monkeypatch) -> None:
    case = CASES[name]
    if case.checks is MACHINE:
        monkeypatch.setattr(model_trial.devices, "has_gpu", lambda: case.gpu)
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    case.model(folder)
    source: dict[str, Any] = {"path": case.name}
    if callable(case.rows):
        monkeypatch.setattr(import_string, "load", lambda _: case.rows)
        source = {"generator": "made:rows"}
    elif isinstance(case.rows, list):
        (tmp_path / case.name).write_text("".join(json.dumps(row) + "\n" for row in case.rows))
    else:
        (tmp_path / case.name).write_bytes(case.rows if isinstance(case.rows, bytes) else case.rows.encode())
    held_out = [{"question": f"{n}?", "prompt": ASKED, "answer": "1", "image": None} for n in range(4)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    base = mini() | {"dataset": {"train": source, "eval": {"path": "test.jsonl"}, "user_prompt": "{question}"}}
    base |= {"model": {"name_or_path": str(folder), "dtype": "float32"}, "data_dir": str(tmp_path), "warmstart": {}}
    base["rollout"] |= {"generation_batch_size": 80, "shards": 1}
    changes = case.config
    if "build" in changes.get("model", {}):
        del base["model"]["name_or_path"]
    config = Config(**merged(base, changes))
    with ExitStack() as stack:
        inputs = RunInputs(config, tmp_path / "scratch", stack, Policy(folder))
        if case.checks is DATA:
            processor = SimpleNamespace(tokenizer=Policy(folder).tokenizer, image_token_id=-1, image_token_ids=[])
            monkeypatch.setattr(Policy, "processor", processor)
        findings = [finding for check in case.checks for finding in check(inputs)]
    given = [finding.message for finding in findings if not finding.ok or (case.checks is MACHINE and finding.note)]
    assert any(case.message in message for message in given), given or findings
