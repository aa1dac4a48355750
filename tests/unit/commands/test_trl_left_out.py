"""`rloo init --from-trl`: what a script does to its model, tokenizer or trainer, and a run does not, is listed."""

import json
from pathlib import Path

import pytest
from trl_scripts import SMALL, project

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
    """What is printed under "Without a counterpart" for a script that passes its tokenizer to the trainer."""
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


def test_a_changed_chat_template_is_listed_even_if_the_data_need_it() -> None:
    """data.py has the line, too, but the run has the tokenizer of the model."""
    line = "tokenizer.chat_template = '{{ messages }}'"
    data = '.filter(lambda row: len(tokenizer.apply_chat_template(row["prompt"])) < 9)'
    assert left_out(line, data=data) == f"line 10: {line}"
    assert line in Path("project/data.py").read_text()


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


@pytest.mark.parametrize("file", ["own.py", "package/own.py"])
def test_what_only_trls_trainer_passes_to_functions_of_other_files_is_listed(file) -> None:
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text("def late(completions, **kwargs): return [kwargs.get('trainer_state')] * len(completions)\n")
    module = file.removesuffix(".py").replace("/", ".")
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
