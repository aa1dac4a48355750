"""`rloo init --from-trl`: commands of TRL's command line become projects as its scripts do."""

import shlex
from pathlib import Path

import pytest
import yaml
from helpers import printed

from rloo_pipeline.commands import trl_cli
from rloo_pipeline.commands.init import init_from_trl
from rloo_pipeline.errors import UserError
from rloo_pipeline.import_string import load as load_function


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


COMMAND = """
model_name_or_path: org/model
dataset_name: org/data
reward_funcs: [accuracy_reward, get_soft_overlong_punishment, trl_rewards.short]
reward_weights: [1.0, 0.5, 0.1]
learning_rate: 1e-5
use_peft: true
lora_target_modules: [q_proj]
eval_strategy: epoch
optim: sgd
"""
"""Options of `trl grpo`."""


@pytest.mark.parametrize("command", ["trl grpo", "accelerate launch --num_processes 8 -m trl.scripts.grpo"])
def test_a_command_of_trl_is_read_like_its_script(command) -> None:
    Path("grpo.yaml").write_text(COMMAND)
    Path("trl_rewards.py").write_text("")
    output = printed(init_from_trl, Path("project"), f"{command} --config grpo.yaml --beta 0.1", None, False)
    config = yaml.safe_load(Path("project/config/config.yaml").read_text())
    assert f"`rloo init --from-trl '{command} --config grpo.yaml --beta 0.1'`" in Path("project/README.md").read_text()
    assert config["model"] == {"name_or_path": "org/model"}
    assert config["dataset"] == {part: {"name": "org/data", "split": name} for part, name in SPLITS.items()}
    assert [(Path(one["function"]).name.rpartition(".")[2], one.get("weight")) for one in config["rewards"]] == [
        ("math:math_reward", None),
        ("length:overlong_reward", 0.5),
        ("py:short", 0.1),
    ]
    assert config["rewards"][1]["options"] == {"longest": 1280, "cache": 256}
    assert config["update"]["lora"] == {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": ["q_proj"]}
    assert (config["update"]["learning_rate"], config["algorithm"]["beta"]) == (1e-5, 0.1)
    assert "eval_strategy: epoch policy 0 and the last policy are evaluated" in " ".join(output.split())
    assert output.split("NOT in this project")[1].split("Next:")[0].split() == ["optim:", "sgd"]


@pytest.mark.parametrize(
    ("command", "size"),
    [
        ("trl grpo --num_processes 4", 32),
        ("trl grpo --accelerate_config zero2", 64),
        ("trl grpo --accelerate_config single_gpu", 8),
        ("trl grpo --accelerate_config one.yaml", 8),
        ("accelerate launch --num-processes 4 -m trl.scripts.grpo", 32),
        ("trl grpo --accelerate_config two.yaml", 16),
        ("trl grpo --accelerate_config two.yaml --num_processes 3", 24),
        ("accelerate launch --config_file two.yaml -m trl.scripts.grpo", 16),
        ("accelerate launch --num_processes=8 --mixed_precision bf16 trl/scripts/grpo.py", 64),
        ("trl grpo --num_processes 4 --generation_batch_size 64", 64),
        ("torchrun --nproc_per_node=4 -m trl.scripts.grpo", 32),
        ("torchrun --nnodes 2 --nproc-per-node 4 -m trl.scripts.grpo", 64),
        ("python -m torch.distributed.run --nproc_per_node gpu -m trl.scripts.grpo", 8),
    ],
)
def test_the_processes_of_a_command_of_trl_multiply_its_batch(command, size) -> None:
    Path("grpo.yaml").write_text(COMMAND)
    Path("two.yaml").write_text("num_processes: 2\nmixed_precision: bf16\n")
    Path("one.yaml").write_text("num_processes: 8\ndistributed_type: NO\n")
    printed(init_from_trl, Path("project"), f"{command} --config grpo.yaml", None, False)
    config = yaml.safe_load(Path("project/config/config.yaml").read_text())
    assert config["rollout"]["generation_batch_size"] == size
    assert config["algorithm"]["steps_per_generation"] == (2 if "generation_batch_size" in command else 1)


@pytest.mark.parametrize(
    ("launcher", "size"),
    [
        ("python", 8),
        ("bin/python3.11", 8),
        ("WANDB_DIR=/a/b.c python", 8),
        ("accelerate launch --num_processes 4", 32),
        ("accelerate launch --num_processes $N", 8),
        ("accelerate launch --config_file two.yaml", 16),
        ("torchrun --nproc_per_node 2", 16),
        ("torchrun --nnodes 2", 16),
        ("deepspeed --num_nodes 2 --num_gpus=4", 64),
        ("torchrun --nproc_per_node 2 -m", 16),
    ],
)
def test_a_script_may_stand_after_its_launcher_and_before_a_comment(launcher, size) -> None:
    Path("two.yaml").write_text("num_processes: 2\n")
    Path("bin").mkdir()
    Path("bin/python3.11").touch()
    Path("mine.py").write_text(SCRIPT)
    script = "mine" if launcher.endswith("-m") else "mine.py"
    printed(init_from_trl, Path("project"), f"{launcher} {script} --beta 0.1  # it's", None, False)
    config = yaml.safe_load(Path("project/config/config.yaml").read_text())
    assert (config["algorithm"]["beta"], config["rollout"]["generation_batch_size"]) == (0.1, size)


@pytest.mark.parametrize("command", ["accelerate launch", "python -m mine.train --beta 0.1", "torchrun", ""])
def test_a_launcher_without_a_script_gives_a_one_line_error(command) -> None:
    with pytest.raises(UserError, match=r"^--from-trl '.*': names no script; write its file, such as train\.py$"):
        init_from_trl(Path("project"), command, None, False)


SCRIPT = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, TrlParser
def length(completions, **kwargs): return [float(len(text)) for text in completions]
(args,) = TrlParser((GRPOConfig,)).parse_args_and_config()
train, held = load_dataset("org/data", split="train"), load_dataset("org/data", split="test")
GRPOTrainer("org/model", length, args, train, held).train()
"""


def test_two_reward_functions_of_a_command_may_share_their_name() -> None:
    for name in "ab":
        Path(f"{name}.py").touch()
    command = "trl grpo --dataset_name org/data --eval_strategy steps --reward_funcs a.reward b.reward"
    printed(init_from_trl, Path("project"), command, "org/model", False)
    config = yaml.safe_load(Path("project/config/config.yaml").read_text())
    assert [(Path(one["function"]).name, one.get("name")) for one in config["rewards"]] == [
        ("a.py:reward", "reward_function"),
        ("b.py:reward", "reward_function_2"),
    ]


SPLITS = {"train": "train", "eval": "test"}
MIXTURE = """
reward_funcs: think_format_reward
reward_model_name_or_path: org/rewards
datasets:
- {path: json, data_files: a.jsonl, columns: [prompt], fraction: 0.5}
- {path: json, data_files: b.jsonl, columns: [prompt], fraction: 0.25}
test_split_size: 0.25
eval_strategy: epoch
"""


def test_a_mixture_of_trls_command_is_mixed_in_the_project(monkeypatch) -> None:
    for name in "ab":
        Path(f"{name}.jsonl").write_text("".join(f'{{"prompt": "{name}{n}", "more": 1}}\n' for n in range(8)))
    Path("mixture.yaml").write_text(MIXTURE)
    printed(init_from_trl, Path("project"), "trl rloo --config mixture.yaml", "org/model", False)
    config = yaml.safe_load(Path("project/config/config.yaml").read_text())
    assert [one["function"].rpartition(":")[2] for one in config["rewards"]] == ["reward_model", "think_format_reward"]
    monkeypatch.chdir("project")
    train, held_out = (load_function(f"data.py:{name}")() for name in ("train", "held_out"))
    assert (len(train), len(held_out)) == (9, 3)
    assert {row["prompt"] for row in train + held_out} == {f"a{n}" for n in range(8)} | {f"b{n}" for n in range(4)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--reward_funcs accuracy_reward", "trl grpo: give the option dataset_name, or datasets in its file"),
        ("--dataset_name org/data --reward_funcs mine", r"reward_funcs mine: must be .*, or MODULE\.FUNCTION"),
        ("--dataset_name org/data --reward_funcs my-lib.f", "reward_funcs my-lib.f: must be"),
        ("--dataset_name org/data --reward_funcs", "reward_funcs True: must be"),
        ("--dataset_name org/data --accelerate_config gone.yaml", "gone.yaml is neither a file nor one of TRL's own"),
        ("--dataset_name org/data", "trl grpo: its reward functions cannot be read"),
        ("--dataset_name org/data --reward_funcs accuracy_reward", r"does not show the model .*--model"),
    ],
)
def test_a_command_of_trl_without_data_model_or_rewards_is_refused(options, message) -> None:
    with pytest.raises(UserError, match=message):
        init_from_trl(Path("project"), f"trl grpo {options}", "m" if "model" not in message else None, False)
    assert not Path("project").exists()


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ('"q_proj", "v_proj"', ["q_proj", "v_proj"]),
        ("q_proj, 'k_proj',  v_proj", ["q_proj", "k_proj", "v_proj"]),
        ("1, 0.5", [1, 0.5]),
        ("','", ","),
        ("',' ';'", [",", ";"]),
        ("a,b", "a,b"),
        ('["q_proj","v_proj"]', "[q_proj,v_proj]"),
    ],
)
def test_a_comma_between_the_words_of_an_option_belongs_to_none_of_them(words, values) -> None:
    assert trl_cli.option_values(shlex.split(f"--beta 0.1 --names {words} --last")) == {
        "beta": 0.1,
        "names": values,
        "last": True,
    }


@pytest.mark.parametrize("end", [" \\\n  ", " \\\r\n"])
def test_a_command_over_several_lines_is_one_command(end) -> None:
    words = "trl grpo", "--dataset_name org/data", "--reward_funcs accuracy_reward", "--model_name_or_path org/model"
    printed(init_from_trl, Path("project"), end.join(words), None, False)
    assert yaml.safe_load(Path("project/config/config.yaml").read_text())["model"] == {"name_or_path": "org/model"}
    assert f"`rloo init --from-trl '{' '.join(words)}'`" in Path("project/README.md").read_text()


def test_the_modules_of_an_adapter_may_have_commas_between_them() -> None:
    Path("grpo.yaml").write_text(COMMAND.replace("lora_target_modules: [q_proj]\n", ""))
    command = 'trl grpo --config grpo.yaml --lora_target_modules "q_proj", "v_proj"'
    printed(init_from_trl, Path("project"), command, None, False)
    config = yaml.safe_load(Path("project/config/config.yaml").read_text())
    assert config["update"]["lora"]["target_modules"] == ["q_proj", "v_proj"]
