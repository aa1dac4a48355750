"""Options of RLOOConfig and GRPOConfig in TRL 1.16: their defaults, and their counterparts here."""

from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any

import yaml

from rloo_pipeline.config.section import JSON
from rloo_pipeline.runtime.installation import csv_rows

_DEFAULTS = csv_rows("commands/trl_defaults.csv")


def _defaults(of: str) -> dict[str, Any]:
    rows = (row for row in _DEFAULTS if row["of"] == of and row["default"])
    return {row["option"]: yaml.safe_load(row["default"]) for row in rows}


DEFAULTS = {kind: _defaults(kind) for kind in ("RLOO", "GRPO")}
EARLIER = {(row["of"], row["option"]): (row["since"], row["before"]) for row in _DEFAULTS if row["since"]}
"""The first release with the default of 1.16, and the default before it; for RLOO, of TRL 0.22 and later."""
OF_MODEL = _defaults("ModelConfig")
"""Defaults of TRL's ModelConfig and ScriptArguments. These command-line options are not passed to the trainer, but read
where the script uses them.
"""
VALUES: Mapping[str, JSON] = {
    option: {row["value"]: yaml.safe_load(row["here"]) for row in rows}
    for option, rows in groupby(csv_rows("commands/trl_values.csv"), itemgetter("option"))
}
"""By option: its values, and what they are here, which for some is a part of the section `algorithm`."""
_ROWS = [tuple(row.values()) for row in csv_rows("commands/trl_options.csv")]
KEYS = {option: key for option, key, _ in _ROWS if key}
"""Options that are taken over unchanged, and the keys that they set."""
WITHOUT_KEY = {option: instead for option, key, instead in _ROWS if not key}
"""Options that need no key here, and what replaces them; nothing for those that change only speed, logs or storage, or
that are read together with another option.
"""
SAMPLING = {"stop_strings": "stop", "min_new_tokens": "min_tokens"}
"""transformers' names of vLLM's sampling parameters."""
LOADING = {
    *("attn_implementation", "device_map", "low_cpu_mem_usage", "use_cache", "use_kernels", "cache_dir", "token"),
    *("local_files_only", "offload_folder", "fast_inference", "max_lora_rank", "gpu_memory_utilization"),
}
"""Arguments for loading a model that change only speed."""
UNSLOTH = ("FastLanguageModel", "FastModel", "FastVisionModel")
"""Unsloth's classes whose `from_pretrained` returns a model and its tokenizer."""
OTHER_WEIGHTS = ("load_in_8bit", "load_in_16bit", "load_in_fp8", "full_finetuning")
"""Arguments of these that load other weights than the default, 4 bits."""
LOADING_TOKENIZER = {
    *(*LOADING, "use_fast", "trust_remote_code", "use_auth_token", "model_max_length", "max_length", "max_seq_length"),
    *("pad_token", "padding_side", "padding", "truncation_side", "truncation", "clean_up_tokenization_spaces"),
}
"""Arguments for loading a tokenizer that change nothing here."""
LORA_SILENT = {"task_type", "inference_mode", "use_gradient_checkpointing", "random_state"}
"""Arguments of LoraConfig, and of Unsloth's get_peft_model, that change only speed or a seed."""
OF_LORA = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "lora_target_parameters": "target_parameters",
    "lora_modules_to_save": "modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}
"""Command-line options, and the LoraConfig arguments that TRL's get_peft_config makes from them."""
OFF = {
    **dict.fromkeys(("do_sample", "include_stop_str_in_output", "skip_special_tokens"), True),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "entropy_coef", "router_aux_loss_coef"), 0.0),
    "repetition_penalty": 1.0,
    "bnb_4bit_quant_type": "nf4",
}
"""Values at which an option without a counterpart has no effect, besides None and False."""
NEVER_NONE = {
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "num_iterations", "beta"),
    *("max_steps", "num_train_epochs", "learning_rate", "lr_scheduler_type", "optim", "adam_beta1", "adam_beta2"),
    *("adam_epsilon", "weight_decay", "epsilon", "temperature", "max_completion_length"),
}
"""Options with which TRL fails if they are None, or samples without a limit."""
REWARDS: dict[str, JSON] = {
    "accuracy_reward": {"function": "rloo_pipeline.rewards.math:math_reward"},
    "reasoning_accuracy_reward": {
        "function": "rloo_pipeline.rewards.math:math_reward",
        "options": {"after_thinking": True},
    },
    "think_format_reward": {"function": "rloo_pipeline.rewards.format:think_format_reward"},
}
"""TRL's reward functions that have a counterpart here."""
REWARD_MODEL = "rloo_pipeline.rewards.model:reward_model"
OVERLONG = "rloo_pipeline.rewards.length:overlong_reward"
OVERLONG_OPTIONS = {"max_completion_len": "longest", "soft_punish_cache": "cache"}
"""Its options, by the parameters of TRL's get_soft_overlong_punishment, in their order."""
ENVIRONMENT_REWARD = "rloo_pipeline.rewards.from_environment:environment_reward"
POSITIONAL = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")
"""Trainer arguments that may be positional."""
BEFORE_TRL_022 = {"policy", "ref_policy", "reward_model", "config"}
"""Arguments of RLOOTrainer before TRL 0.22, which sampled and scored in another way."""
TALK = {
    *("print", "system", "run_line_magic", "run_cell_magic", "info", "warning", "debug", "basicConfig", "setLevel"),
    *("filterwarnings", "login", "notebook_login", "print_trainable_parameters", "empty_cache", "collect"),
}
"""Functions whose calls say or show something, and do not change the training."""
KNOWN = {*POSITIONAL, "peft_config", "quantization_config", "tools", "environment_factory"}
"""Trainer arguments that a project takes over."""
ADVICE = {"rollout_func": "make its episodes a class in rollout.environment, or its calls tools in rollout.tools"}
"""How a project gets what other arguments do."""
SECTIONS = ("run", "rounds", "seed", "model", "dataset", "rollout", "vllm", "rewards", "correct", "algorithm", "update")
