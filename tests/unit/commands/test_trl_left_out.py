"""`rloo init --from-trl`: what a script does to its model, tokenizer or trainer, and a run does not, is listed."""

import json
from pathlib import Path

import pytest
from helpers import printed
from trl_scripts import SMALL, project

from rloo_pipeline.commands.init import init_from_trl
from rloo_pipeline.commands.trl_script import TrlScript

LOADED = """
import argparse
from transformers import AutoModelForCausalLM, AutoTokenizer
parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--weights", default="weights.pt")
options = parser.parse_args()
model = AutoModelForCausalLM.from_pretrained("org/model")
tokenizer = AutoTokenizer.from_pretrained("org/model")
{lines}
"""


def left_out(lines: str, script: str = SMALL, data: str = "") -> str:
    """The printed part "Without a counterpart" for a script that passes its tokenizer to the trainer."""
    script = script.replace('"org/model"', "model", 1).replace("COMMON = dict(temperature=0.7)\n", "")
    script = LOADED.replace("{lines}", lines) + script.replace("{options}", "")
    script = script.replace('split="train")', f'split="train"){data}')
    script = script.replace('split="test")).', 'split="test"), processing_class=tokenizer).')
    _, output = project(script)
    return " ".join(output.partition("NOT in this project")[2].partition("Next:")[0].split())


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def test_a_function_that_plays_episodes_is_listed_with_what_takes_its_place() -> None:
    script = SMALL.replace('split="test")).', 'split="test"), rollout_func=play).')
    assert "rollout_func: play make its episodes a class in rollout.environment" in left_out("", script)


def test_a_tokenizer_and_a_model_that_are_only_loaded_are_taken() -> None:
    assert left_out("tokenizer.pad_token = tokenizer.eos_token") == ""


@pytest.mark.parametrize(
    "line",
    [
        "model.load_state_dict(torch.load(options.weights))",
        "for layer in model.model.layers[: options.layers]: layer.requires_grad_(False)",
        "if options.layers: freeze(model)",
        "tokenizer.add_tokens(options.weights.split())",
        "tokenizer.add_special_tokens({'eos_token': '<end>'})",
    ],
)
def test_a_line_that_changes_the_model_is_listed_even_if_it_reads_an_option(line) -> None:
    assert left_out(line).startswith("line 10:")


@pytest.mark.parametrize("line", ["tokenizer.chat_template = '{{ messages }}'", "tokenizer.eos_token = '<end>'"])
def test_a_changed_tokenizer_is_listed_even_if_the_data_need_it(line) -> None:
    """data.py has the line, too, but the run has the tokenizer of the model."""
    data = '.filter(lambda row: len(tokenizer.apply_chat_template(row["prompt"])) < 9)'
    advice = "save the tokenizer into a copy of the model's folder, and set model.name_or_path to it"
    assert left_out(line, data=data) == f"line 10: {line} {advice}"
    assert line in Path("project/data.py").read_text()


def test_a_changed_tokenizer_that_only_the_data_need_is_not_listed() -> None:
    lines = "judge = AutoTokenizer.from_pretrained('org/judge')\njudge.chat_template = '{{ messages }}'"
    data = '.filter(lambda row: len(judge.apply_chat_template(row["prompt"])) < 9)'
    assert left_out(lines, data=data) == ""
    assert "judge.chat_template" in Path("project/data.py").read_text()


@pytest.mark.parametrize(
    "lines",
    [
        "tokenizer = None",
        "tokenizer = AutoTokenizer.from_pretrained('./org/model')",
        "tokenizer = AutoTokenizer.from_pretrained('org/model', use_fast=False) if unknown() else None",
        "model, tokenizer = FastLanguageModel.from_pretrained('org/model', full_finetuning=True)",
        "model, tokenizer = FastLanguageModel.from_pretrained('org/model', full_finetuning=True)\n"
        "model = FastLanguageModel.get_peft_model(model, r=8)",
    ],
)
def test_a_tokenizer_that_is_the_models_is_taken_in_each_form(lines) -> None:
    assert "processing_class" not in left_out(lines)


def test_the_trainer_without_a_tokenizer_has_the_models() -> None:
    script = SMALL.replace('split="test")).', 'split="test"), processing_class=None).')
    assert "processing_class" not in left_out("", script)


def test_arguments_that_change_the_tokenizer_as_it_is_loaded_are_listed() -> None:
    line = (
        "tokenizer = AutoTokenizer.from_pretrained('org/model', use_fast=False, chat_template=read(), eos_token=None)"
    )
    told = "processing_class.chat_template: read() the tokenizer is that of the model line 9"
    assert left_out(line).startswith(told)


def test_a_tokenizer_beside_a_model_that_only_the_command_names_is_compared_with_that() -> None:
    script = SMALL.replace('"org/model"', "hidden()", 1).replace(
        'split="test")', 'split="test"), processing_class=other'
    )
    script = "other = AutoTokenizer.from_pretrained('org/other')\n" + script.replace("{options}", "")
    for name, is_listed in {"org/model": True, "org/other": False}.items():
        Path("script.py").write_text(script)
        output = printed(init_from_trl, Path(name), "script.py", name, False)
        assert ("processing_class: org/other" in " ".join(output.split())) is is_listed


@pytest.mark.parametrize("line", ["makedirs(options.weights + MODEL)", "wandb.init(config=vars(options), name=MODEL)"])
def test_a_line_that_reads_the_models_name_does_not_change_the_model(line) -> None:
    script = SMALL.replace('"org/model"', "AutoModel.from_pretrained(MODEL)").replace("{options}", "")
    lines = f"import argparse\nMODEL = 'org/model'\noptions = argparse.ArgumentParser().parse_args()\n{line}\n"
    assert line not in project(lines + script)[1]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("tokenizer = get_chat_template(tokenizer, chat_template='gemma-3')", "tokenizer"),
        ("tokenizer = AutoTokenizer.from_pretrained('org/other')", "org/other"),
        ("_, tokenizer = FastLanguageModel.from_pretrained(model_name='org/other')", "org/other"),
    ],
)
def test_a_tokenizer_that_is_not_the_models_is_listed(line, shown) -> None:
    told = f"processing_class: {shown} the tokenizer is that of the model, with its chat template"
    assert left_out(line).startswith(told)


@pytest.mark.parametrize(
    ("line", "module"),
    [("from own import RLOOTrainer", "own"), ("class RLOOTrainer(Base): pass", "the script")],
)
def test_a_trainer_that_is_not_trls_is_listed(line, module) -> None:
    script = SMALL.replace("import RLOOConfig, RLOOTrainer", f"import RLOOConfig\n{line}")
    assert left_out("", script) == f"class: RLOOTrainer is that of {module}; the run does what TRL's does"


@pytest.mark.parametrize("loop", ["for beta in (0.0, 0.1):", "while unfinished():"])
def test_a_loop_around_the_trainer_is_listed(loop) -> None:
    script = SMALL.replace("RLOOTrainer(", f"{loop}\n    RLOOTrainer(").replace(
        "    load_dataset", "        load_dataset"
    )
    assert left_out("", script) == f"line 15: {loop} the run trains once"


@pytest.mark.parametrize(
    ("lines", "is_listed"),
    [
        ("trainer.train()", True),
        ("trainer.model.train()", False),
    ],
)
def test_a_loop_that_trains_several_times_is_listed(lines, is_listed) -> None:
    script = SMALL.replace('RLOOTrainer("', 'trainer = RLOOTrainer("')
    script = script.replace(".train()", f"\nfor epoch in range(3):\n    {lines}\n")
    assert ("for epoch in range(3): the run trains once" in left_out("", script)) is is_listed


def test_a_file_of_functions_is_read_in_its_encoding_or_not_at_all() -> None:
    late = "def late(completions, **kwargs): return [kwargs['trainer_state']] * len(completions)  # \u00e9\n"
    for text, is_listed in {f"# coding: latin-1\n{late}": True, late: False, late + "print 1": False}.items():
        Path("own.py").write_text(text, encoding="latin-1")
        script = "from own import late\n" + SMALL.format(options="").replace(" length,", " late,")
        Path("script.py").write_text(script)
        output = printed(init_from_trl, Path("latin", str(len(text))), "script.py", None, False)
        assert ("argument: trainer_state" in output) is is_listed


@pytest.mark.parametrize("file", ["own.py", "package/own.py", "package/own/__init__.py"])
def test_what_only_trls_trainer_passes_to_functions_of_other_files_is_listed(file) -> None:
    Path(file).parent.mkdir(exist_ok=True, parents=True)
    Path(file).write_text("def late(completions, **kwargs): return [kwargs.get('trainer_state')] * len(completions)\n")
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    told = f"argument: trainer_state {Path(file).resolve()} reads it, but only TRL's trainer passes it"
    assert told in left_out(f"from {module} import late", SMALL.replace(" length,", " late,"))


def test_an_adapters_dropout_that_the_script_does_not_show_is_listed() -> None:
    adapter = SMALL.replace('split="test")', 'split="test"), peft_config=LoraConfig(lora_dropout=hidden())')
    config, output = project(adapter)
    assert "lora_dropout" not in config["update"]["lora"]
    assert "peft_config.lora_dropout: hidden()" in " ".join(output.split())


def test_a_command_of_several_lines_in_a_notebook_is_left_out_if_a_later_one_is_not_python() -> None:
    command = "!pip install -q \\\n        trl \\\n        git+https://x.y@0add68"
    cells = [f"if True:\n    {command}\nelse:\n    !ls\n", "a = 1"]
    cells.append(SMALL.format(options=""))
    notebook = {"cells": [{"cell_type": "code", "source": source} for source in cells]}
    Path("grpo.ipynb").write_text(json.dumps(notebook))
    assert TrlScript("grpo.ipynb").text.startswith("if True:\n    pass\nelse:\n    pass\n\n\na = 1")
