"""`rloo init --from-trl`: scripts in the shape of TRL's published examples become projects that can be checked."""

import ast
import json
import random
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import transformers
import yaml
from helpers import printed
from trl_scripts import GRPO, SMALL, project

from rloo_pipeline.commands.init import init_from_trl
from rloo_pipeline.commands.trl_script import TrlScript
from rloo_pipeline.errors import UserError
from rloo_pipeline.import_string import load as load_function

REASONING = """
import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import RLOOConfig, RLOOTrainer
from trl.rewards import accuracy_reward, think_format_reward

raise SystemExit("the script was run")


def main():
    train, held = load_dataset("parquet", data_files=FILES, split=["train", "test[:50%]"])
    SYSTEM = (
        "Reason first, "
        "then answer."
    )

    def conversation(row):
        return {"prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["problem"]}]}

    train = train.map(conversation, remove_columns=["problem"])
    held = held.map(conversation, remove_columns=["problem"])
    args = RLOOConfig(
        output_dir="out/Sums-RLOO",
        model_init_kwargs={"dtype": torch.bfloat16},
        learning_rate=1e-5,
        max_completion_length=1024,
        gradient_accumulation_steps=2,
        steps_per_generation=8,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.5,
        repetition_penalty=1.1,
        callbacks_every=len(train),
    )
    trainer = RLOOTrainer(
        model="Qwen/Qwen3-0.6B",
        args=args,
        reward_funcs=[think_format_reward, accuracy_reward],
        train_dataset=train,
        eval_dataset=held,
        peft_config=LoraConfig(),
    )
    trainer.train()
    trainer.save_model(args.output_dir)


if __name__ == "__main__":
    main()
"""
"""In the shape of examples/scripts/rloo.py."""

AGENT = '''
import re
import sqlite3
import textwrap
from contextlib import contextmanager

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser

STARS = re.compile(r"\\*(yes|no)\\*")


def right(completions, answer, **kwargs):
    """1 for the answer between stars."""
    found = [STARS.search(completion[-1]["content"]) for completion in completions]
    return [float(bool(match) and match[1] == wanted) for match, wanted in zip(found, answer)]


@contextmanager
def time_limit(seconds):
    yield


def query(command: str) -> list:
    """Runs a command of SQL.

    Args:
        command: the command.
    """
    with time_limit(5):
        return sqlite3.connect("facts.db").execute(command).fetchall()


def with_prompt(row):
    preamble = textwrap.dedent("""\\
        Use the database.
        """)
    return {"prompt": [{"role": "user", "content": preamble + row["question"]}]}


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    connection = sqlite3.connect("facts.db")
    connection.execute("CREATE TABLE facts (name TEXT)")
    dataset = Dataset.from_json(script_args.dataset_name)
    dataset = dataset.filter(
        lambda row: row["question"].startswith("Does")
    )
    dataset = dataset.map(with_prompt, remove_columns=["question"])
    eval_dataset = None
    training_args.chat_template_kwargs = {"enable_thinking": False}
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        train_dataset=dataset,
        eval_dataset=eval_dataset,
        tools=[query],
        reward_funcs=[right],
        args=training_args,
    )
    trainer.train()
'''
"""In the shape of examples/scripts/grpo_agent.py."""


RECIPE = """
from dataclasses import dataclass, field
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config


@dataclass
class Arguments(ScriptArguments):
    system_prompt: str = field(default=None)
    column: str = field(default="problem", metadata={"help": "the column with the question"})


def right(completions, solution, **kwargs):
    return [float(one[-1]["content"] == answer) for one, answer in zip(completions, solution)]


def short(completions, **kwargs):
    return [-float(len(one[-1]["content"])) for one in completions]


def main(script_args, training_args, model_args):
    dataset = load_dataset("json", data_files=script_args.dataset_name)

    def conversation(row, column: str = script_args.column):
        system = {"role": "system", "content": script_args.system_prompt}
        return {"prompt": [system, {"role": "user", "content": row[column]}]}

    dataset = dataset.map(conversation)
    training_args.model_init_kwargs = dict(
        revision=model_args.model_revision,
        attn_implementation=model_args.attn_implementation,
        use_cache=False if training_args.gradient_checkpointing else True,
        rope_scaling=make(),
    )
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[right, short],
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset["train"] if training_args.eval_strategy != "no" else None,
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)


if __name__ == "__main__":
    parser = TrlParser((Arguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    main(script_args, training_args, model_args)
"""
"""In the shape of open-r1: the options are parsed outside of the function that makes the trainer."""

ARGPARSE = """
import argparse
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl import RLOOConfig, RLOOTrainer


def length(completions, **kwargs): return [float(len(text)) for text in completions]


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=3e-6, dest="learning_rate")
    parser.add_argument("--normalize", action="store_true")
    parser.add_argument("--file", default="train.jsonl")
    return parser.parse_args()


def train(name: str = "org/model", steps: int = 12):
    args = options()
    data = load_dataset("json", data_files=args.file, split="train").rename_column("question", "prompt")
    model = AutoModelForCausalLM.from_pretrained(name)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=RANK))
    config = RLOOConfig("out", learning_rate=args.learning_rate, normalize_advantages=args.normalize, max_steps=steps,
        model_init_kwargs={"quantization_config": BitsAndBytesConfig(load_in_4bit=True), "device_map": here()})
    RLOOTrainer(model, length, config, data).train()


train(steps=24)
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_reasoning_example_keeps_batch_rewards_adapter_and_data(monkeypatch) -> None:
    import pandas as pd

    rows = [{"problem": f"{n}+{n}", "solution": str(2 * n)} for n in range(4)]
    files = {name: str(Path(f"{name}.parquet").resolve()) for name in ("train", "test")}
    for file in files.values():
        pd.DataFrame(rows).to_parquet(file)
    config, output = project(REASONING.replace("FILES", repr(files)))
    assert config["run"] == "Sums-RLOO"
    assert config["model"] == {"name_or_path": "Qwen/Qwen3-0.6B", "dtype": "bfloat16"}
    assert config["rollout"] == {"num_generations": 2, "max_completion_length": 1024, "generation_batch_size": 64}
    assert config["algorithm"] == {"preset": "trl", "steps_per_generation": 4}
    assert config["update"]["lora"] == {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    assert config["correct"] == {"reward": "math_reward"}
    missing = output[output.index("Without a counterpart") : output.index("Next:")]
    assert "repetition_penalty: 1.1" in missing
    assert "callbacks_every: len(train)" in missing
    assert missing.count("line ") == missing.count("line 8: raise SystemExit") == 1, "other lines are taken"
    assert "`repetition_penalty`: 1.1 | – |" in Path("project/README.md").read_text()
    monkeypatch.chdir("project")
    message = {"role": "system", "content": "Reason first, then answer."}
    rows_here = load_function("data.py:train")()
    assert rows_here[3] == {"solution": "6", "prompt": [message, {"role": "user", "content": "3+3"}]}
    assert len(load_function("data.py:held_out")()) == 2


def test_the_agent_example_keeps_its_tool_and_the_options_that_it_is_called_with(monkeypatch) -> None:
    questions = [{"question": f"Does {n} exist?", "answer": "yes"} for n in range(10)] + [{"question": "Why?"}]
    Path("facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    words = f"--model_name_or_path Qwen/Qwen3-1.7B --max_steps 400 --use_vllm --dataset_name {Path.cwd()}/facts.jsonl"
    config, output = project(AGENT, words)
    assert (config["rounds"], config["model"]["name_or_path"]) == (400, "Qwen/Qwen3-1.7B")
    assert config["rollout"]["tools"] == ["tools.py:query"]
    assert config["dataset"]["chat_template_kwargs"] == {"enable_thinking": False}
    loss = {"advantage": "grpo", "loss_agg_mode": "token_mean", "importance_sampling_level": "token", "beta": 0.0}
    assert config["algorithm"].items() >= loss.items()
    assert config["algorithm"]["mismatch"] == {"correction": "sequence_mis", "max": 3.0}
    assert output.count("line ") == 2, "the lines that make the data base"
    monkeypatch.chdir("project")
    rows = [*load_function("data.py:train")(), *load_function("data.py:held_out")()]
    assert len(rows) == 10
    assert rows[0]["prompt"][0]["content"].startswith("Use the database.\nDoes")
    reward = load_function("rewards.py:right")
    assert reward([[{"role": "assistant", "content": "*yes*"}]], answer=["yes"]) == [1.0]
    assert callable(load_function("tools.py:query"))
    assert "sqlite3" not in Path("rewards.py").read_text(), "only what the function needs"


def test_options_that_another_function_parses_are_those_of_the_command_line_or_their_defaults(monkeypatch) -> None:
    Path("train.jsonl").write_text("".join(f'{{"problem": "{n}", "solution": "{n}"}}\n' for n in range(4)))
    Path("recipe.yaml").write_text(
        "model_name_or_path: org/model\nmodel_revision: abc\nuse_peft: true\nlora_r: 32\nuse_dora: true\n"
        "dataset_name: train.jsonl\nsystem_prompt: Think.\nlearning_rate: 2e-5\nmax_prompt_length: 300\n"
        "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}\nreward_weights: [1, 0.5]\n"
        "push_to_hub: true\n"
    )
    config, output = project(RECIPE, "--config recipe.yaml --chat_template_kwargs '{\"enable_thinking\": false}'")
    assert config["model"] == {"name_or_path": "org/model", "revision": "abc"}
    assert (
        config["dataset"].items()
        >= {"max_prompt_length": 300, "chat_template_kwargs": {"enable_thinking": False}}.items()
    )
    rate = {"learning_rate": 2e-5, "min_lr_ratio": 0.1, "lr_scheduler_type": "cosine", "lr_horizon_rounds": 100}
    assert config["update"].items() >= rate.items()
    lora = {"r": 32, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": ["q_proj", "v_proj"]}
    assert config["update"]["lora"] == lora, "the defaults of TRL's ModelConfig"
    assert config["rewards"][1] == {"function": "rewards.py:short", "weight": 0.5}
    assert "push_to_hub: true" in output
    missing = output[output.index("Without a counterpart") : output.index("Next:")]
    assert [line.split(":")[0] for line in missing.splitlines()[1:-1]] == ["rope_scaling", "peft_config.use_dora"]
    monkeypatch.chdir("project")
    system = {"role": "system", "content": "Think."}
    assert load_function("data.py:train")()[3]["prompt"] == [system, {"role": "user", "content": "3"}]


def test_argparse_parameters_adapter_and_relative_files_of_a_script_are_read(monkeypatch) -> None:
    Path("train.jsonl").write_text("".join(f'{{"question": "{n}"}}\n' for n in range(5)))
    config, output = project(ARGPARSE)
    assert (config["model"], config["rounds"]) == ({"name_or_path": "org/model", "quantization": "nf4"}, 24)
    assert config["algorithm"]["normalize_advantages"] is False
    assert config["update"]["learning_rate"] == 3e-6
    assert config["update"]["lora"] == {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    assert "peft_config.lora_alpha: RANK" in output[output.index("Without a counterpart") :]
    config, _ = project(ARGPARSE, "--lr 1e-5 --normalize", "other")
    assert (config["update"]["learning_rate"], config["algorithm"]["normalize_advantages"]) == (1e-5, True)
    monkeypatch.chdir("project")
    assert {row["prompt"] for row in load_function("data.py:train")()} < {"0", "1", "2", "3", "4"}


@pytest.mark.parametrize(
    ("condition", "rank"), [("True", 8), ("False", None), ("cuda()", "the script does not show a LoraConfig")]
)
def test_an_adapter_under_a_condition_is_taken_left_out_or_listed(condition, rank) -> None:
    script = SMALL.format(options="").replace(
        'split="test"))', f'split="test"), peft_config=LoraConfig() if {condition} else None)'
    )
    config, output = project(script)
    assert config["update"].get("lora", {}).get("r") == (rank if rank == 8 else None)
    assert ("the script does not show a LoraConfig" in output) is isinstance(rank, str)


NOTEBOOK = """
import random
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from unsloth import FastModel

get_ipython().system("pip install unsloth")
RANK = 16
model, tokenizer = FastModel.from_pretrained(
    model_name="org/model", load_in_4bit=True, fast_inference=True, max_seq_length=512
)
model = FastModel.get_peft_model(
    model,
    r=RANK,
    lora_alpha=(
        RANK * 2
    ),
    bias="all",
    random_state=3407,
)


def part(text):
    return text.split("=")[-1]


def right(completions, answer, **kwargs):
    return [float(part(one[-1]["content"]) == wanted) for one, wanted in zip(completions, answer)]


text = tokenizer.apply_chat_template([{"role": "user", "content": "1+1"}])
print(text)
rows = Dataset.from_list([{"prompt": f"{n}", "answer": f"{n}"} for n in range(5)])
rows = rows.shuffle(seed=1)
rows[0]
SFTTrainer(model=model, train_dataset=rows).train()
args = GRPOConfig(
    per_device_train_batch_size=1,
    num_generations=6,
    num_train_epochs=1,
    warmup_ratio=0.1,
    generation_kwargs={"temperature": 0.7, "stop": ["#"]},
)
trainer = GRPOTrainer(model=model, processing_class=tokenizer, reward_funcs=[right], args=args, train_dataset=rows)
trainer.train()
rows = rows.map(broken)
text = model.generate("1+1")
"""
"""In the shape of a notebook that trains an adapter with Unsloth."""


def test_a_notebook_of_unsloth_keeps_its_4_bit_weights_adapter_and_whole_groups(monkeypatch) -> None:
    padding = "if tokenizer.pad_token is None: tokenizer.pad_token = tokenizer.eos_token"
    config, output = project(NOTEBOOK.replace("rows[0]", padding))
    assert config["model"] == {"name_or_path": "org/model", "quantization": "nf4"}
    assert config["update"]["lora"] == {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
    assert config["rollout"] == {
        "num_generations": 6,
        "max_completion_length": 512,
        "temperature": 0.7,
        "generation_kwargs": {"stop": ["#"]},
        "generation_batch_size": 6,
    }
    words = " ".join(output.split())
    assert "1 × 1 × 6 processes, the fewest that make whole groups of 6" in words
    assert "; update.lr_horizon_rounds and update.warmup_steps too" in words
    missing = output[output.index("Without a counterpart") : output.index("Next:")].splitlines()[1:]
    names = [line.split(":")[0] for line in missing if line]
    assert names == ["max_seq_length", "peft_config.bias", "line 31", "line 36"], (
        "not what is copied or done afterwards"
    )
    assert "trains first: set model.name_or_path to the model that it saves" in words
    monkeypatch.chdir("project")
    assert "model" not in Path("data.py").read_text() + Path("rewards.py").read_text(), "text is a local name"
    assert load_function("rewards.py:right")([[{"content": "1+1=2"}]], answer=["2"]) == [1.0]
    assert len(load_function("data.py:train")()) == 4


@pytest.mark.parametrize(
    ("given", "quantization"),
    [
        ("", "nf4"),
        (", full_finetuning=False", "nf4"),
        (", load_in_4bit=False", None),
        (", load_in_16bit=True", None),
        (", full_finetuning=True", None),
    ],
)
def test_unsloth_loads_4_bits_unless_it_is_told_otherwise(given, quantization) -> None:
    config, output = project(NOTEBOOK.replace(", load_in_4bit=True", given))
    assert config["model"].get("quantization") == quantization
    assert ("load_in_4bit: true (Unsloth's default)" in output) == (quantization is not None)


def test_a_copy_that_needs_the_tokenizer_of_unsloth_loads_no_model(monkeypatch) -> None:
    head = "def right(completions, answer, **kwargs):\n"
    script = NOTEBOOK.replace(head, f"tokenizer.chat_template = MARKED\n\n\n{head}    tokenizer.eos_token\n")
    script = script.replace("rows[0]\n", "".join(f"model.change({number})\n" for number in range(9)))
    output = " ".join(project('MARKED = "{{ messages }}"\n' + script)[1].split())
    assert "tokenizer.chat_template = MARKED save the tokenizer into a copy of the model's folder" in output
    assert "lines of the script, which README.md shows" in output, "the others"
    copied = Path("project/rewards.py").read_text()
    assert "FastModel" not in copied
    loaded = mock.Mock(side_effect=lambda name: SimpleNamespace(name=name, eos_token="</s>"))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", loaded)
    names: dict = {}
    exec(copied, names)
    assert (names["tokenizer"].name, names["tokenizer"].chat_template) == ("org/model", "{{ messages }}")


HELPERS = """
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import RLOOConfig, RLOOTrainer
import argparse


class Settings:
    RATE = 3e-6
    batch: int = 16


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bits", type=int, default=16)
    parser.add_argument("--lora", action="store_true")
    return parser.parse_args()


def load(name, args):
    loading = {"device_map": "auto"}
    if args.bits == 4:
        loading["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True)
    model = AutoModelForCausalLM.from_pretrained(name, **loading).to("cuda")
    tokenizer.chat_template = TEMPLATE
    return model, None


def config(steps, dtype="bfloat16"):
    made = RLOOConfig(learning_rate=Settings.RATE, per_device_train_batch_size=Settings().batch, max_steps=steps)
    made.beta = 0.2 if dtype == "bfloat16" else 0.1
    made.temperature = {"high": 1.2}["high"]
    made.run_name = f"{len('abc')}".strip().upper()
    return made


def data():
    rows = Dataset.from_list([{"prompt": f"{n}"} for n in range(20)])
    return rows, rows


def train(rows, held):
    model, tokenizer = load("org/model", args)
    peft = None
    if args.lora:
        peft = LoraConfig(r=4, target_modules=["q_proj"])
    trainer = RLOOTrainer(model=model, reward_funcs=length, args=config(steps=(
        30 or None
    )), train_dataset=rows, eval_dataset=held, peft_config=peft)
    trainer.train()


def length(completions, **kwargs):
    args = {"weight": 1.0}
    return [args["weight"] * len(text) for text in completions]


args = options()
rows, held = data()
train(rows, held)
"""


def test_a_notebook_is_read_as_the_script_of_its_cells(monkeypatch) -> None:
    """Without commands of IPython and of a shell, and with the lines that it leaves out in the README."""
    lines = [*SMALL.format(options="beta=0.3").splitlines(keepends=True)]
    shown = [f"show(rows[{number}])\n" for number in range(9)]
    cells = [("code", ["%%capture\n", "!pip install \\\n", "  trl\n", "import re"]), ("markdown", ["# A (title"])]
    cells += [("code", ["%%bash\n", "ls -l"]), ("code", lines[:4]), ("code", shown), ("code", lines[4:])]
    notebook = {"cells": [{"cell_type": kind, "source": source} for kind, source in cells], "nbformat": 4}
    Path("grpo.ipynb").write_text(json.dumps(notebook))
    output = printed(init_from_trl, Path("project"), "grpo.ipynb", None, False)
    assert "10 lines of the script, which README.md shows" in output
    assert "show(rows[8])" in Path("project/README.md").read_text()
    monkeypatch.chdir("project")
    assert yaml.safe_load(Path("config/config.yaml").read_text())["algorithm"]["beta"] == 0.3
    assert load_function("rewards.py:length")(["abc"]) == [3.0]


def test_lines_of_a_notebook_that_only_look_like_commands_stay() -> None:
    text = "RULE = '''\n%d of\n!important\n'''\nrest = (3\n% 2)\n"
    cells = ["\n%%HTML\n<b>\n", f"%pip install 'x\n{text}if rest:\n    !ls\n", SMALL.format(options="")]
    notebook = {"cells": [{"cell_type": "code", "source": source} for source in cells]}
    Path("grpo.ipynb").write_text(json.dumps(notebook))
    assert TrlScript("grpo.ipynb").text.startswith(f"pass\n{text}if rest:\n    pass\n")


def test_texts_inside_a_block_keep_their_lines_and_names_that_the_script_lacks_are_told(monkeypatch) -> None:
    block = """
if True:
    RULE = f'''
  short{MARK}
end'''  # the rule
    def length(completions, **kwargs):
        '''One
    line.'''
        # a comment
        return [float(len(RULE)) for _ in completions]
"""
    _, output = project(SMALL.format(options="").replace("\ndef length", f"{block}\ndef unused"))
    assert "name: MARK the script does not define it; define it in rewards.py" in " ".join(output.split())
    copy = Path("project/rewards.py")
    assert "# a comment" in copy.read_text()
    copy.write_text("MARK = '!'\n" + copy.read_text())
    monkeypatch.chdir("project")
    length = load_function("rewards.py:length")
    assert length(["abc"]) == [len("\n  short!\nend")]
    assert "'''One\n    line.'''" in Path("rewards.py").read_text()  # Python 3.13 dedents `__doc__`


def test_a_model_that_another_module_loads_is_the_one_of_the_options() -> None:
    script = AGENT.replace("model=model_args.model_name_or_path", "model=get_model(model_args)")
    config, output = project("from models import get_model\n" + script, "--model_name_or_path org/m --dataset_name a/b")
    assert config["model"]["name_or_path"] == "org/m"
    missing = " ".join(output.partition("Without a counterpart")[2].split())
    assert "the project has only its name, from the option" in missing


def test_functions_classes_and_conditions_of_a_script_are_followed(monkeypatch) -> None:
    config, output = project(HELPERS)
    assert config["model"] == {"name_or_path": "org/model"}
    assert config["update"].items() >= {"learning_rate": 3e-6}.items()
    assert "lora" not in config["update"]
    assert (config["rounds"], config["rollout"]["generation_batch_size"]) == (30, 16)
    assert (config["algorithm"]["beta"], config["rollout"]["temperature"]) == (0.2, 1.2)
    missing = output[output.index("Without a counterpart") :]
    assert "tokenizer.chat_template = TEMPLATE" in missing
    assert missing.count("line ") == 1
    config, output = project(HELPERS, "--bits 4 --lora", "other")
    assert config["model"] == {"name_or_path": "org/model", "quantization": "nf4"}
    assert "bnb_4bit_quant_type" in output[output.index("Without a counterpart") :], "fp4 by default"
    nf4 = HELPERS.replace("load_in_4bit=True", "load_in_4bit=True, bnb_4bit_quant_type='nf4'")
    assert "bnb_4bit_quant_type" not in project(nf4, "--bits 4 --lora", "nf4")[1]
    assert config["update"]["lora"]["r"] == 4
    monkeypatch.chdir("other")
    assert len(load_function("data.py:held_out")()) == 20
    assert load_function("rewards.py:length")(["abc"]) == [3.0], "its variable has the name of the options"


def test_reward_functions_that_a_call_makes_are_made_in_the_project_too(monkeypatch) -> None:
    makes = """
from functools import partial
LEAST = 2

def scaled(weight):
    def inner(completions, **kwargs):
        return [weight * len(text) for text in completions]
    return inner

def reward(completions, least=0, **kwargs):
    return [float(len(text) >= least) for text in completions]

long = partial(reward, least=LEAST)
"""
    functions = "[scaled(0.5), lambda completions, **kwargs: [1.0] * len(completions), long, reward]"
    script = SMALL.format(options="").replace(", length,", f", {functions},")
    config, _ = project(script.replace("RLOOTrainer(", makes + "RLOOTrainer(", 1))
    names = [entry["function"] for entry in config["rewards"]]
    assert names == [f"rewards.py:{name}" for name in ("scaled_1", "reward_2", "long", "reward")]
    assert config["rewards"][3]["name"] == "reward_function", "reward is the name of the sum"
    monkeypatch.chdir("project")
    assert [load_function(name)(["a", "bcd"]) for name in names] == [[0.5, 1.5], [1.0, 1.0], [0.0, 1.0], [1.0, 1.0]]


def test_the_adapter_of_a_model_config_that_the_script_makes_is_taken() -> None:
    makes = 'made = ModelConfig(model_name_or_path="org/m", use_peft=True, lora_r=4)\n'
    script = SMALL.format(options="").replace("RLOOTrainer(", makes + "RLOOTrainer(", 1)
    config, _ = project(script.replace('split="test"))', 'split="test"), peft_config=get_peft_config(made))'))
    assert config["update"]["lora"].items() >= {"r": 4, "lora_alpha": 32}.items()


def test_defaults_that_differ_from_those_of_trl_are_told() -> None:
    words = " ".join(project(SMALL.format(options=""))[1].split())
    assert "max_prompt_length: null (TRL's default) dataset.max_prompt_length 512 by default" in words
    assert "disable_dropout: false (TRL's default) update.disable_dropout true by default" in words


def test_a_batch_of_all_processes_is_not_said_to_grow_with_them() -> None:
    _, output = project(SMALL.format(options="generation_batch_size=64, gradient_accumulation_steps=2"))
    assert "of all processes" in output
    assert "4, in optimizer steps: 8 micro-steps / 2, on 1 process; with N processes, divided by N" in " ".join(
        output.split()
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("multi_objective_aggregation='normalize_then_sum'", {"advantage": "reinforce_pp"}),
        ("vllm_importance_sampling_cap=2.5, use_vllm=True", {"mismatch": {"correction": "sequence_mis", "max": 2.5}}),
    ],
)
def test_options_of_grpo_become_their_keys(options, expected) -> None:
    config, output = project(GRPO.format(options=options))
    assert expected.items() <= config["algorithm"].items()
    assert options.partition("=")[0] not in output[output.index("Without a counterpart") :]


def test_compiled_layers_become_compiled_layers() -> None:
    config, output = project(SMALL.format(options="torch_compile=True"))
    assert config["update"]["torch_compile"] is True
    assert "torch_compile" not in output[output.index("Without a counterpart") :]


def test_a_constant_rate_has_no_warm_up_as_in_transformers() -> None:
    config, output = project(SMALL.format(options="lr_scheduler_type='constant', warmup_steps=5"))
    assert "warmup_steps" not in config["update"]
    assert "lr_scheduler_type constant has no warm-up" in output


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        ("max_steps=100, eval_strategy='steps', eval_steps=0.1", "evaluation.every", 10),
        ("top_k=-1", "rollout.top_k", 0),
        ("generation_kwargs='{\"top_k\": 5}'", "rollout.top_k", 5),
        ("max_grad_norm=0.0", "update.max_grad_norm", 1e9),
        ("max_grad_norm=None", "update.max_grad_norm", 1e9),
        ("generation_kwargs={'stop_strings': ['#'], 'x': here()}", "rollout.generation_kwargs", {"stop": ["#"]}),
        ("reward_weights=[2.0]", "rewards", [{"function": "rewards.py:length", "weight": 2.0}]),
        ("model_init_kwargs={'revision': 'abc', 'device_map': here()}", "model.revision", "abc"),
        ("max_steps=12, steps_per_generation=2", "rounds", 6),
        ("max_steps=12, num_iterations=3", "rounds", 4),
        ("max_steps=12, gradient_accumulation_steps=4", "rollout.generation_batch_size", 32),
        ("steps_per_generation=2, gradient_accumulation_steps=4", "rollout.generation_batch_size", 32),
        ("max_steps=10, warmup_ratio=0.5", "update.warmup_steps", 5),
        ("optim='paged_adamw_32bit'", "update.optimizer", "adamw"),
        ("optim='adamw_bnb_8bit'", "update.optimizer", "adamw_8bit"),
        ("bf16=False", "model.dtype", "float32"),
        ("lr_scheduler_type='constant_with_warmup'", "update.lr_scheduler_type", "constant"),
        ("max_steps=10, eval_strategy='steps', eval_steps=5", "evaluation.every", 5),
        ("report_to='wandb'", "report_to", ["wandb"]),
        ("report_to=['tensorboard', 'mlflow', 'trackio']", "report_to", ["mlflow"]),
        ("**COMMON", "rollout.temperature", 0.7),
    ],
)
def test_an_option_becomes_its_key(options, key, value) -> None:
    config, _ = project(SMALL.format(options=options))
    for name in key.split("."):
        config = config[name]
    assert config == value


def test_what_changes_the_result_and_cannot_be_taken_is_listed() -> None:
    options = "use_vllm=True, top_k=20, generation_kwargs={'stop': ['.']}, repetition_penalty=1.2, sync_ref_model=False"
    config, output = project(GRPO.format(options=options))
    assert config["rollout"]["generation_kwargs"] == {"stop": ["."]}
    assert "mismatch" not in config["algorithm"]
    missing = output[output.index("Without a counterpart") :]
    assert "vllm_importance_sampling_mode: sequence_mask (TRL's default)  not with top_k" in " ".join(
        missing.split(" ")
    )
    assert "repetition_penalty: 1.2" in missing
    assert "sync_ref_model" not in output, "it is off on both sides"


def test_arguments_that_only_trls_trainer_passes_are_listed() -> None:
    script = SMALL.format(options="")
    takes = script.replace("(completions, **kwargs)", "(completions, trainer_state=None, **kwargs)")
    assert "argument: trainer_state" in project(takes)[1]
    reads = script.replace("): return", "): kwargs.get('log_metric'); return")
    assert "argument: log_metric" in project(reads, folder="other")[1]
    assert "argument: " not in project(script, folder="neither")[1]


def test_a_number_of_tool_calls_without_tools_has_no_effect_as_in_trl() -> None:
    config, output = project(GRPO.format(options="max_tool_calling_iterations=5"))
    assert "max_tool_calling_iterations" not in {**config["rollout"]}
    assert "max_tool_calling_iterations" not in output


def test_what_another_value_stands_for_is_told() -> None:
    options = "max_grad_norm=None, generation_kwargs={'do_sample': False}, activation_checkpointing=True"
    _, output = project(SMALL.format(options=options))
    assert "update.max_grad_norm" in output
    assert "activation_checkpointing: true" in output[: output.index("Without a counterpart")], "of transformers 5.24"
    assert "1e+09: no clipping" in output
    assert "completions are always sampled here" in output


def test_parameters_of_vllm_are_taken_where_an_update_can_account_for_them() -> None:
    parameters = "SamplingParams(temperature=0.7, stop=['#'], min_tokens=4, seed=1, include_stop_str_in_output=True)"
    options = f"use_vllm=True, vllm_sampling_params={parameters}, generation_kwargs=dict(repetition_penalty=1.1)"
    config, output = project(GRPO.format(options=options))
    assert config["rollout"]["temperature"] == 0.7
    assert config["rollout"]["generation_kwargs"] == {"stop": ["#"], "min_tokens": 4}
    missing = output[output.index("Without a counterpart") :]
    assert "generation_kwargs.repetition_penalty: 1.1" in missing
    assert "generation_kwargs.seed: 1" in missing
    assert "include_stop_str_in_output" not in output, "so it is here"
    config, output = project(SMALL.format(options=f"vllm_sampling_params={parameters}"), folder="without-weights")
    assert config["rollout"]["generation_kwargs"] == {"stop": ["#"]}
    assert "generation_kwargs.min_tokens: 4" in output[output.index("Without a counterpart") :]


def test_reward_models_are_read_in_each_form_with_the_options_of_the_chat_template() -> None:
    Path("here").mkdir()
    script = "rm = AutoModelForSequenceClassification.from_pretrained('org/rm', num_labels=1, revision='abc')\n"
    script += "from trl.rewards import accuracy_reward, get_soft_overlong_punishment, reasoning_accuracy_reward\n"
    script += SMALL.format(options="chat_template_kwargs={'enable_thinking': False}")
    rewards = "[rm, 'here', AutoModelForSequenceClassification.from_pretrained('org/b'), accuracy_reward,"
    rewards += (
        " reasoning_accuracy_reward, get_soft_overlong_punishment(soft_punish_cache=20, max_completion_len=100)],"
    )
    config, _ = project(script.replace(" length,", f" {rewards}"))
    template = {"chat_template_kwargs": {"enable_thinking": False}}
    assert [one.get("options") for one in config["rewards"]] == [
        {"model": "org/rm", "revision": "abc"} | template,
        {"model": str(Path("here").resolve())} | template,
        {"model": "org/b"} | template,
        *(None, {"after_thinking": True}),  # TRL's gives 0 to thinking that does not end
        {"longest": 100, "cache": 20},
    ]
    names = [one.get("name") for one in config["rewards"]]
    assert names == [None, "reward_model_2", "reward_model_3", None, "math_reward_5", None]


def test_a_penalty_of_length_is_no_right_answer_and_a_function_of_ones_own_is_not_trls() -> None:
    script = "from trl.rewards import get_soft_overlong_punishment, think_format_reward\n" + SMALL.format(options="")
    script = script.replace("def length", "def my_math_reward")
    rewards = "get_soft_overlong_punishment(100, 20)"
    config, output = project(script.replace(" length,", f" [{rewards}, think_format_reward],"))
    assert config["correct"] == {"reward": "think_format_reward"}
    config, output = project(script.replace(" length,", f" [{rewards}, my_math_reward],"), folder="own")
    assert config["correct"] == {"reward": "my_math_reward"}
    assert "by value" not in output


@pytest.mark.parametrize(
    ("factory", "is_rewarded", "is_told"),
    [
        ("Game", True, False),
        ("{'a': Game, 'b': Silent}", True, False),
        ("Child", True, False),
        ("Silent", False, False),
        ("Imported", False, True),
    ],
)
def test_an_environment_that_gives_rewards_adds_one_as_in_trl(factory, is_rewarded, is_told) -> None:
    classes = "from games import Imported\nclass Silent:\n    def reset(self, **row): ...\n"
    classes += "class Game(Silent):\n    def get_reward(self): return 1.0\nclass Child(Game):\n    pass\n"
    script = classes + GRPO.format(options="reward_weights=[0.5]")
    config, output = project(script.replace('split="test")', f'split="test"), environment_factory={factory}'))
    rewards = [(one["function"].rpartition(":")[2], one.get("weight")) for one in config["rewards"]]
    assert rewards == [("length", 0.5)] + [("environment_reward", None)] * is_rewarded
    assert ("if the environment has get_reward" in " ".join(output.split())) == is_told


def test_rows_that_a_function_of_the_script_loads_are_read_in_a_function_too(monkeypatch) -> None:
    Path("train.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(5)))
    loads = "rows = 'train.jsonl'\n"
    loads += 'def loaded(file): return load_dataset("json", data_files=file, split="train")\ntrain = loaded(rows)\n'
    script = SMALL.format(options="").replace('load_dataset("org/data", split="train")', "train")
    project(
        script.replace("RLOOTrainer(", loads + "RLOOTrainer(").replace(
            'load_dataset("org/data", "main", split="test")', "None"
        )
    )
    monkeypatch.chdir("project")
    assert len(load_function("data.py:train")()) == 4


def test_rows_that_a_loop_collects_and_a_condition_chooses_are_those_of_the_script(monkeypatch) -> None:
    Path("train.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(5)))
    collects = """rows = []
with open(os.path.join(os.path.dirname(__file__), "train.jsonl")) as file:
    for line in file:
        rows.append(json.loads(line))
rows = Dataset.from_list(rows)
"""
    script = SMALL.format(options="").replace('load_dataset("org/data", split="train")', "rows if full else rows[:2]")
    held_out = 'None if os.environ.get("FAST") else rows.select(range(3))'
    project(
        "import json, os\nfrom datasets import Dataset\nfull = True\ndef log(): rows = []; rows.append(1)\n"
        + script.replace("RLOOTrainer(", collects + "RLOOTrainer(").replace(
            'load_dataset("org/data", "main", split="test")', held_out
        )
    )
    monkeypatch.chdir("project")
    assert [len(load_function(f"data.py:{name}")()) for name in ("train", "held_out")] == [5, 3]
    assert "log" not in Path("data.py").read_text(), "its rows are its own"


def test_a_random_split_that_has_no_seed_gets_one(monkeypatch) -> None:
    Path("train.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(40)))
    makes = 'rows = load_dataset("json", data_files="train.jsonl", split="train").shuffle()\n'
    makes += "parts = rows.train_test_split(0.5)\n"
    script = SMALL.format(options="").replace("RLOOTrainer(", makes + "RLOOTrainer(")
    script = script.replace('load_dataset("org/data", "main", split="test")', 'parts["test"]')
    project(script.replace('load_dataset("org/data", split="train")', 'parts["train"]'))
    monkeypatch.chdir("project")
    train, held_out = (load_function(f"data.py:{name}")() for name in ("train", "held_out"))
    assert len({row["prompt"] for row in train + held_out}) == 40


@pytest.mark.parametrize("seeds", ["random.seed(3)", "set_seed(3)"])
def test_rows_that_a_script_draws_with_a_seed_are_drawn_with_it_in_each_function(seeds, monkeypatch) -> None:
    Path("train.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(40)))
    draws = f"import random\ndef set_seed(seed): random.seed(seed)\n{seeds}\n"
    draws += 'rows = load_dataset("json", data_files="train.jsonl", split="train")\n'
    draws += "order = rows.select(random.sample(range(40), 40))\n"
    script = SMALL.format(options="").replace("RLOOTrainer(", draws + "RLOOTrainer(")
    script = script.replace('load_dataset("org/data", "main", split="test")', "order.skip(30)")
    _, output = project(script.replace('load_dataset("org/data", split="train")', "order.take(30)"))
    assert f"{seeds} data.py if nothing else draws random numbers before the data" in " ".join(output.split())
    monkeypatch.chdir("project")
    train, held_out = (load_function(f"data.py:{name}")() for name in ("train", "held_out"))
    drawn = [int(row["prompt"]) for row in train + held_out]
    assert drawn == random.Random(3).sample(range(40), 40)


ROWS = SMALL.format(options="").replace("COMMON = dict(temperature=0.7)", "")
DRAWN = """
import random
from random import sample, seed

import numpy as np
from datasets import Dataset


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)


data = Dataset.from_list([{{"prompt": str(number)}} for number in range(40)])
{lines}
"""


@pytest.mark.parametrize(
    ("lines", "train", "held_out"),
    [
        ("order = data.select(random.sample(range(40), 40))", "order.take(30)", "order.skip(30)"),
        (
            "a = data.select(random.sample(range(40), 10))\nb = data.select(random.sample(range(40), 10))",
            *("a", "b"),
        ),
        (
            "b = data.select(random.sample(range(40), 10))\na = data.select(random.sample(range(40), 10))",
            *("a", "b"),
        ),
        ("", "data.select(random.sample(range(40), 10))", "data.select(random.sample(range(40), 10))"),
        ("places = sample(range(40), 10)\na = data.select(sample(range(40), 10))", "data.select(places)", "a"),
        ("places = list(range(40))\nrandom.shuffle(places)", "data.select(places[:30])", "data.select(places[30:])"),
        (
            "own = random.Random(5)\na = data.select(own.sample(range(40), 9))",
            "a",
            "data.select(own.sample([1], 1))",
        ),
        ('a = data.map(lambda row: {"prompt": """1\n2""" + f"""{random.random()}\n 3"""})', "a", "a.skip(1)"),
        ("a = data.select(np.random.permutation(40))", "a.take(30)", "a.skip(30)"),
    ],
)
@pytest.mark.parametrize("seeds", ["seed(a=3)", "set_seed(seed=3)"])
def test_rows_that_a_script_draws_with_a_seed_are_those_of_the_script(
    lines, train, held_out, seeds, monkeypatch
) -> None:
    if "np.random" in lines and seeds == "seed(a=3)":
        seeds = "np.random.seed(seed=3)"
    script = DRAWN.format(lines=f"{seeds}\n{lines}")
    exec(f"{script}\ntrain, held_out = {train}, {held_out}", names := dict[str, Any]())
    calls = ROWS.replace('load_dataset("org/data", split="train")', train)
    _, output = project(script + calls.replace('load_dataset("org/data", "main", split="test")', held_out))
    assert "line " not in output[output.find("Without a counterpart") :]
    monkeypatch.chdir("project")
    for name in ("train", "held_out", "train"):
        assert load_function(f"data.py:{name}")() == [*names[name]]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("set_seed(3)\nrows = data.shuffle()", "seed=0, not with the script's seed"),
        ("set_seed(3)\nrows = data.train_test_split(0.5, seed=None)['train']", "seed=0, not with the script's seed"),
        ("rows = data.select(sample(range(40), 10))", None),
        ("seed(time())\nrows = data.select(sample(range(40), 10))", "seed(time())"),
        ("set_seed(3)\nrows = data.train_test_split(0.5, shuffle=False)['train']", "set_seed(3)"),
        ("rows = data.shuffle()", None),
        (
            "def part():\n    set_seed(3)\n    return data.shuffle()\nrows = part()",
            "seed=0, not with the script's seed",
        ),
        ("set_seed(3)\nrows = data.shuffle(seed=3).select(np.arange(10))", None),
        ("rows = data.select(np.random.default_rng().permutation(9))", "default_rng() train and held_out draw anew"),
        ("own = random.Random(x=None)\nrows = data.select(own.sample(range(9), 3))", "give it a seed in data.py"),
        ("own = np.random.RandomState(seed=0)\nrows = data.select(own.permutation(9))", None),
    ],
)
def test_rows_that_are_drawn_in_another_way_than_in_the_script_are_listed(lines, told) -> None:
    calls = ROWS.replace('load_dataset("org/data", split="train")', "rows")
    calls = calls.replace('load_dataset("org/data", "main", split="test")', "None")
    output = project(DRAWN.format(lines=lines) + calls)[1]
    missing = output[output.find("Without a counterpart") : output.index("Next:")]
    assert (told or "") in " ".join(missing.split())
    assert ("line " in missing) == bool(told)


def test_a_seed_that_the_script_does_not_show_is_listed_and_rewards_are_not_seeded() -> None:
    seeds = "import os, random\nrandom.seed(os.environ['SEED'])\nrandom.seed(5)\n"
    script = seeds + SMALL.format(options="").replace("return [", "random.random(); return [")
    assert "random.seed(os.environ['SEED'])" in project(script)[1]
    assert "seed" not in Path("project", "rewards.py").read_text()


def test_an_option_under_a_condition_a_callback_and_a_change_of_the_trainer_are_listed() -> None:
    changes = "    trainer.add_callback(Stop())\n    trainer.sampling_params.stop_token_ids = [5]\n    trainer.train()"
    script = AGENT.replace("    trainer.train()", changes)
    script = script.replace("    trainer = ", "    if small():\n        training_args.beta = 0.1\n    trainer = ")
    _, output = project(script, "--model_name_or_path m --dataset_name facts.jsonl")
    assert "if small(): training_args.beta = 0.1" in output
    assert "trainer.add_callback(Stop())" in output
    assert "trainer.sampling_params.stop_token_ids = [5]" in output
    assert "trainer.train()" not in output


def test_a_sum_with_an_option_that_has_no_value_is_listed() -> None:
    parser = "parser = ArgumentParser()\nparser.add_argument('--root')\nargs = parser.parse_args()\n"
    _, output = project(parser + SMALL.format(options="logging_dir=args.root + '/logs'"))
    assert "logging_dir: args.root + '/logs'" in output[output.index("Without a counterpart") :]


@pytest.mark.parametrize(
    ("line", "rate", "taken"),
    [
        ("RATES = {0: 2e-6}", "RATES[0]", 2e-6),
        ("RATES = {('small', 1): 2e-6}", "RATES['small', 1]", None),
        ("RATES = {'small': 2e-6}", "RATES['small', 1]", None),
        ("rate = None", "-rate", None),
        ("class Settings: rate = 1e-5\nsettings = Settings()\nsettings.rate = 2e-6", "settings.rate", 2e-6),
        ("*_, rate = 1, 2, 2e-6", "rate", None),
        ("PAIR = 1, 2e-6\n_, rate = (*PAIR,)", "rate", None),
    ],
)
def test_a_value_is_the_one_that_python_would_compute_or_is_listed(line, rate, taken) -> None:
    config, output = project(f"{line}\n" + SMALL.format(options=f"learning_rate={rate}"))
    assert config["update"]["learning_rate"] == (taken or 1e-6)  # TRL's default
    assert (f"learning_rate: {rate}" in output) == (taken is None)


def test_an_option_is_read_beside_one_whose_arguments_are_not_shown() -> None:
    parser = "parser = ArgumentParser()\nparser.add_argument('--debug', **shared)\n"
    parser += "parser.add_argument('--rate', default=2e-6)\nargs = parser.parse_args()\n"
    config, _ = project(parser + SMALL.format(options="learning_rate=args.rate"))
    assert config["update"]["learning_rate"] == 2e-6


def test_a_plain_data_set_is_named_without_a_copy() -> None:
    config, _ = project(SMALL.format(options=""))
    assert config["dataset"]["train"] == {"name": "org/data", "split": "train"}
    assert config["dataset"]["eval"] == {"name": "org/data", "config_name": "main", "split": "test"}
    assert not Path("project/data.py").exists()
    ast.parse(Path("project/rewards.py").read_text())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            "loss_type='sapo', sapo_temperature_neg=1.1, vespo_k_pos=1.5, epsilon=0.1",
            {"clip": "sapo", "loss_agg_mode": "sequence_mean_token_mean", "sapo_temperature_neg": 1.1},
        ),
        (
            "loss_type='cispo', epsilon=0.1, epsilon_high=5.0, delta=2.0, optim='adafactor', adam_beta2=0.9",
            {"clip": "cispo", "loss_agg_mode": "token_mean", "epsilon_high": 4.0},
        ),
        (
            "loss_type='vespo', vespo_k_pos=1.5, use_vllm=True, vllm_importance_sampling_mode='token_truncate'",
            {"clip": "vespo", "loss_agg_mode": "token_mean", "vespo_k_pos": 1.5, "old_logps": "sampler"},
        ),
    ],
)
def test_soft_losses_become_their_clip_with_the_parameters_that_they_have(options, expected) -> None:
    config, _ = project(GRPO.format(options=options))
    assert expected.items() <= config["algorithm"].items()
    unused = {"mismatch", "vespo_k_pos", "sapo_temperature_neg", "delta", "epsilon"} - {*expected}
    assert not unused & {*config["algorithm"]}


@pytest.mark.parametrize(("words", "name"), [("", "'a.json'"), ("--dataset_name b.json", "'b.json' or 'a.json'")])
def test_data_that_stand_in_for_an_option_are_those_without_it(words, name) -> None:
    project(AGENT.replace(".dataset_name", ".dataset_name or 'a.json'"), f"--model_name_or_path m {words}")
    assert f"Dataset.from_json({name})" in Path("project/data.py").read_text()


def test_data_do_not_stand_in_for_an_option_whose_default_the_script_hides() -> None:
    script = AGENT.replace(".dataset_name", ".dataset_name or 'a.json'")
    hidden = "class Own(ScriptArguments):\n    dataset_name: str = os.environ.get('DATA', 'b.json')\n"
    with pytest.raises(UserError, match="give the option dataset_name"):
        project(hidden + script, "--model_name_or_path m")


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        (
            "from trl import DPOTrainer\nDPOTrainer('m')",
            "",
            r"one call of RLOOTrainer or GRPOTrainer .* DPOTrainer \(line 2\)",
        ),
        ("def f(:", "", r"script\.py: not valid Python .*\(script\.py, line 1\)"),
        (
            SMALL.format(options="").replace('"org/model"', "PeftModel.from_pretrained(base, path)"),
            "",
            "line 6: the script trains this adapter further; merge it .* with --model",
        ),
        (
            SMALL.format(options="").replace('"test"))', '"test"), reward_model=m)'),
            "",
            "the trainer's reward_model belongs",
        ),
        (GRPO.format(options="loss_type='mine'"), "", "loss_type mine: has no counterpart; there are grpo"),
        (
            GRPO.format(options="importance_sampling_level='sequence_token'"),
            "",
            "importance_sampling_level sequence_token: has no counterpart; there are token, sequence",
        ),
        (GRPO.format(options="loss_type='cispo'"), "", "the bound of ratios is then 0.2, which scales the loss"),
        (
            GRPO.format(options="loss_type='vespo', use_vllm=True, vllm_importance_sampling_mode='token_mask'"),
            "",
            "loss_type vespo with vllm_importance_sampling_mode token_mask: has no counterpart",
        ),
        (SMALL.format(options="steps_per_generation=3, gradient_accumulation_steps=2"), "", "make one a multiple"),
        (AGENT, "", r"does not show the model .*--model, or .* 'script\.py --model_name_or_path …'"),
        (
            AGENT,
            "--model_name_or_path m",
            r"line 46: give the option dataset_name: --from-trl 'script\.py --dataset_name",
        ),
        (AGENT, "sft", "'sft' does not belong to an option"),
        (AGENT, "--model_name_or_path 'm", r"'script\.py .* 'm': cannot be split into words \(No closing quotation\)"),
        (SMALL.format(options="").replace(", length,", ", make(),"), "", "its reward functions cannot be read"),
        (SMALL.format(options="num_generations=3, generation_batch_size=8"), "", "generation_batch_size"),
        (
            SMALL.format(options="").replace('load_dataset("org/data", "main", split="test")', "{'a': DATA}"),
            "",
            "line 7: eval_dataset: a project has one held-out set",
        ),
        (
            SMALL.format(options="").replace('load_dataset("org/data", split="train")', "rows()")
            + "def rows(): return load_dataset('json', split='train')",
            "",
            "line 8: data.py has a function rows of its own; rename this one",
        ),
        (SMALL.format(options="num_train_epochs=None"), "", "num_train_epochs None: has no counterpart; give a value"),
        (
            SMALL.format(options="eval_strategy='steps', logging_steps=None"),
            "",
            "eval_strategy steps without eval_steps; set one",
        ),
        (
            GRPO.format(options="use_vllm=True, vllm_importance_sampling_mode=None"),
            "",
            "vllm_importance_sampling_mode None: has no counterpart; there are token_truncate, ",
        ),
        (SMALL.format(options="reward_weights=[1, 2]"), "", "has 2 numbers, but the script shows 1 reward functions"),
        (
            "def main():\n    calls = 0"
            + indent(SMALL.format(options="").replace("kwargs): ", "kwargs):\n    nonlocal calls\n    "), "    "),
            "",
            r"line 6: .*\(nonlocal\); move both to the top level",
        ),
    ],
)
def test_what_cannot_be_translated_is_one_sentence_and_nothing_is_written(script, words, message) -> None:
    with pytest.raises(UserError, match=message):
        project(script, words)
    assert not Path("project").exists()


@pytest.mark.parametrize(
    ("file", "advice"),
    [
        ("grpo.yaml", "trl grpo --config FILE"),
        ("grpo.ipynb", "not a notebook of format 4; save it as a Python script"),
        ("trl sft", "'trl sft': only the commands trl rloo and trl grpo"),
    ],
)
def test_another_file_than_a_script_is_said_to_be_one(file, advice) -> None:
    Path(file).write_text("{}")
    with pytest.raises(UserError, match=advice):
        init_from_trl(Path("project"), file, None, False)
