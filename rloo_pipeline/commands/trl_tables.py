"""Options of RLOOConfig and GRPOConfig in TRL 1.16: their defaults, and their counterparts here."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rloo_pipeline.config.section import JSON

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "RLOO": {"num_generations": 2, "beta": 0.05},
    "GRPO": {"num_generations": 8, "beta": 0.0},
}
BOTH = {"max_completion_length": 512, "learning_rate": 1e-6, "lr_scheduler_type": "linear", "num_iterations": 1}
EARLIER: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "RLOO": {"max_completion_length": ("1.10", "256"), "max_prompt_length": ("0.27", "512")},
    "GRPO": {
        "max_completion_length": ("1.10", "256"),
        "max_prompt_length": ("0.26", "512"),
        "beta": ("0.19", "0.04"),
        "temperature": ("0.18", "0.9"),
        "top_k": ("0.18", "50"),
        "loss_type": ("0.22", "bnpo"),
        "use_bias_correction_kl": ("1.10", "false"),
        "vllm_importance_sampling_mode": ("0.26", "token_truncate at 2.0, or none,"),
    },
}
"""The first release with the default of 1.16, and the default before it; for RLOO, of TRL 0.22 and later."""
with Path(__file__).with_name("trl_options.csv").open(encoding="utf-8", newline="") as _file:
    _ROWS = [tuple(row.values()) for row in csv.DictReader(_file)]
KEYS = {option: key for option, key, _ in _ROWS if key}
"""Options that are taken over unchanged, and the keys that they set."""
WITHOUT_KEY = {option: instead for option, key, instead in _ROWS if not key}
"""Options that need no key here, and what replaces them; nothing for those that change only speed, logs or storage, or
that are read together with another option.
"""
SAMPLING = {"stop_strings": "stop", "min_new_tokens": "min_tokens"}
"""transformers' names of vLLM's sampling parameters."""
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw_32bit"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw_8bit"),
    "adafactor": "adafactor",
}
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
LOSSES: Mapping[str, JSON] = {
    "grpo": {"loss_agg_mode": "sequence_mean_token_mean"},
    "bnpo": {"loss_agg_mode": "token_mean"},
    "dapo": {"loss_agg_mode": "token_mean"},
    "dr_grpo": {"loss_agg_mode": "sequence_mean_token_sum_norm"},
    "luspo": {"loss_agg_mode": "sequence_mean_token_sum"},
    "cispo": {"loss_agg_mode": "token_mean", "clip": "cispo"},
    "sapo": {"loss_agg_mode": "sequence_mean_token_mean", "clip": "sapo"},
    "vespo": {"loss_agg_mode": "token_mean", "clip": "vespo"},
}
SCALES: Mapping[str, JSON] = {
    "group": {"advantage": "grpo"},
    "none": {"advantage": "dr_grpo"},
    "batch": {"advantage": "dr_grpo", "reward_normalization": "batch"},
}
CORRECTIONS = {
    "token_truncate": "token_tis",
    "token_mask": "token_mis",
    "sequence_truncate": "sequence_tis",
    "sequence_mask": "sequence_mis",
}
LOADING = {
    *("attn_implementation", "device_map", "low_cpu_mem_usage", "use_cache", "use_kernels", "cache_dir", "token"),
    *("local_files_only", "offload_folder", "fast_inference", "max_lora_rank", "gpu_memory_utilization"),
}
"""Arguments for loading a model that change only speed."""
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
OF_MODEL: Mapping[str, Any] = {
    **dict.fromkeys(("dtype", "torch_dtype", "attn_implementation", "dataset_config", "datasets")),
    **dict.fromkeys(("lora_target_modules", "lora_modules_to_save", "lora_target_parameters")),
    **dict.fromkeys(("use_peft", "use_rslora", "use_dora", "load_in_4bit", "load_in_8bit", "dataset_streaming"), False),
    "model_revision": "main",
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_task_type": "CAUSAL_LM",
    "dataset_train_split": "train",
    "dataset_test_split": "test",
    "trust_remote_code": False,
}
"""Defaults of TRL's ModelConfig and ScriptArguments. These command-line options are not passed to the trainer, but read
where the script uses them.
"""
OFF = {
    **dict.fromkeys(("do_sample", "include_stop_str_in_output", "skip_special_tokens"), True),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "entropy_coef", "router_aux_loss_coef"), 0.0),
    "repetition_penalty": 1.0,
    "bnb_4bit_quant_type": "nf4",
}
"""Values at which an option without a counterpart has no effect, besides None and False."""
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
SECTIONS = ("run", "rounds", "seed", "model", "dataset", "rollout", "vllm", "rewards", "correct", "algorithm", "update")
