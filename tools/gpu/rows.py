"""The rows of `make gpu`, most valuable first.

A row calls a function of this folder in a process of its own. It passes if the function returns its figures, and fails
with the sentence of what the function raises. The rehearsal calls the same function with other options, on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from shutil import which
from typing import Any, NamedTuple

Figures = dict[str, float | int | str]
"""Figures of a row by name; the name of a number ends with its unit."""


class RowError(Exception):
    """A row has failed; the message is the sentence that the page shows, beside the figures so far."""

    def __init__(self, why: str, figures: Figures | None = None) -> None:
        super().__init__(why)
        self.figures = figures or {}


class NotHereError(Exception):
    """A row cannot run on this machine; the message says why."""


class Row(NamedTuple):
    """One row."""

    name: str
    shows: str
    function: str
    """`module:function` of this folder. It gets an empty folder and the options."""
    minutes: float
    """Time limit on a GPU."""
    options: Mapping[str, Any] = {}
    rehearse: Mapping[str, Any] | str = {}
    """Options that differ in the rehearsal, or the reason why a CPU cannot run the row."""
    needs: tuple[str, ...] = ("gpu",)
    """See `machine.missing`."""
    alone: bool = False
    """Needs the machine to itself, also with `--together`: it measures, or its engine takes all memory of the card."""


DRY = {"dry": True}
"""A whole run is only planned in the rehearsal; the tests run it on CPUs."""


def _mini(name: str, shows: str, *needs: str, **options: Any) -> Row:
    shows = f"the mini configuration: {shows}"
    return Row(f"mini-{name}", shows, "whole_runs:mini", 12, options, DRY, needs or ("gpu",))


def _trainer(**keys: Any) -> dict[str, Any]:
    return {"changes": {"deepspeed": keys}}


def _update(**keys: Any) -> dict[str, Any]:
    return {"changes": {"update": keys}}


LORA = {"r": 8, "lora_alpha": 16}
TEACHER = {
    "algorithm": {
        "beta": 0,
        "importance_sampling_level": "token",
        "teacher": {"build": "rloo_pipeline.demo.character_model:tiny_qwen3"},
    }
}
PREFERENCES = {
    "reward_model": {
        "train": {
            "generator": "rloo_pipeline.demo.arithmetic:preferences",
            "options": {"split": "train", "size": 2000, "worked_share": 0.0},
        },
        "learning_rate": 0.003,
    },
    "rewards": [
        {"function": "rloo_pipeline.rewards.model:reward_model", "batch": "all", "gpus": 1},
        {"function": "rloo_pipeline.rewards.answer:exact_answer_reward", "name": "answer", "weight": 0},
    ],
    "correct": {"reward": "answer"},
    "checks": {"accept": ["pair_accuracy"]},
}
OFFLOAD = {
    "optimizer": {"optimizer": "cpu"},
    "all": {"optimizer": "cpu", "parameters": "cpu"},
    "nvme": {"optimizer": "nvme", "parameters": "nvme"},
}
TOOLS = {
    "model": {"build": "rloo_pipeline.demo.character_model:tool_qwen3"},
    "dataset": {
        "train": {"generator": "rloo_pipeline.demo.calculation:problems", "options": {"split": "train", "size": 100}},
        "eval": {"generator": "rloo_pipeline.demo.calculation:problems", "options": {"split": "test", "size": 20}},
    },
    "warmstart": {
        "sft": {
            "steps": 300,
            "demonstrations": {
                "generator": "rloo_pipeline.demo.calculation:demonstrations",
                "options": {"split": "train", "size": 400, "called_share": 1.0},
            },
        }
    },
    "rollout": {
        "tools": ["rloo_pipeline.environments.tools:calculator"],
        "max_turns": 3,
        "generation_batch_size": 32,
        "max_completion_length": 64,
    },
    "rewards": [{"function": "rloo_pipeline.rewards.answer:exact_answer_reward", "name": "answer"}],
}
ACCEPT = ["scorable", "teaching", "truncated", "entropy", "duplicates"]
QLORA = {
    "model": {"quantization": "nf4", "build_options": {"hidden_size": 64, "intermediate_size": 128}},
    "update": {"lora": LORA},
    "warmstart": {"sft": None},
    "checks": {"accept": ACCEPT},
}
"""SFT trains all weights, which are in 4 bits here, so policy 0 knows nothing."""
EXPERTS = {"model": {"build": "tests/model_folders.py:build", "build_options": {"kind": "qwen3_moe"}}}
REPLAY = {**EXPERTS, "rollout": {"router_replay": True}}
FP8 = {
    "model": {"build_options": {"hidden_size": 64, "intermediate_size": 128}},
    "rollout": {"quantization": "fp8_per_tensor"},
}
REFILL = {"rollout": {"refill": 1}, "algorithm": {"filter_zero_variance": True}}
IMAGES = ("qwen2_5_vl", "qwen3_vl", "gemma3")
MODEL_KINDS = (
    *("mistral", "gpt_oss", "gemma2", "qwen3_moe", "deepseek_v3", "falcon_h1", "granitemoehybrid", "qwen3_next"),
    "stablelm",
)
"""The keys of `two_rounds.KINDS`; those with a window or sinks first."""
RECURRENT = ("falcon_h1", "granitemoehybrid", "qwen3_next")
"""Their cache is all memory that vLLM may have."""
OVERLAP = "tests/stages/test_two_ranks.py::test_sums_that_are_taken_beside_the_backward_pass_are_the_same"
ELSEWHERE = "each kind runs on CPUs in `make kinds`, three of them in `make test`"

ROWS = (
    Row("versions", "cards, driver, CUDA and the libraries' versions", "machine:versions", 3, needs=()),
    Row("doctor", "`rloo doctor` finds no problem", "machine:doctor", 5),
    Row("demo", "`make demo` from its first job to its page", "whole_runs:demo", 30, rehearse=DRY),
    _mini("bfloat16", "bfloat16, as most users have it"),
    Row(
        "attention",
        "FlashAttention against the formula, forward and backward, with and without a window",
        "attention_rows:compare",
        minutes=5,
        options={"device": "cuda"},
        rehearse={"device": "cpu"},
    ),
    Row(
        "resume",
        "kill -9 in a rollout and in an update; the same command goes on and leaves nothing behind",
        "whole_runs:resume",
        minutes=15,
        rehearse="the row same-bytes does the same and more",
    ),
    _mini("lora", "a LoRA adapter", **_update(lora=LORA)),
    _mini("qlora", "a LoRA adapter on weights in NF4", changes=QLORA),
    _mini(
        "zero3-offload",
        "ZeRO 3, weights and optimizer in the node's memory",
        **_trainer(zero_stage=3, offload=OFFLOAD["all"]),
    ),
    Row(
        "round",
        "a round of 1.7 billion weights, 512 completions of up to 1,024 tokens, against TRL with vLLM",
        "round_rows:against_trl",
        minutes=25,
        rehearse={"tiny": True},
        needs=("gpu", "trl"),
        alone=True,
    ),
    Row(
        "sampling",
        "vLLM's `generate` alone: start, tokens/s, the same tokens again and in smaller batches; then our sampler",
        "sampling_rows:bare",
        minutes=12,
        rehearse={"tiny": True},
        alone=True,
    ),
    Row(
        "sampling-invariant",
        "the same with VLLM_BATCH_INVARIANT=1: all tokens are equal",
        "sampling_rows:bare",
        minutes=12,
        options={"invariant": True},
        rehearse="batch invariance is of vLLM's kernels for GPUs",
        alone=True,
    ),
    Row(
        "same-bytes",
        "with `reproducible: true`, a run that was killed twice has the bytes of an undisturbed one",
        "whole_runs:resume",
        minutes=25,
        options={"reproducible": True},
        rehearse={"reproducible": True, "on_cpu": True},
    ),
    Row(
        "step-1.5B",
        "an optimizer step of 1.5 billion weights against TRL's",
        "step_rows:step",
        minutes=10,
        options={"size": "1.5B"},
        rehearse={"size": "tiny", "sides": ["plain"]},
        needs=("gpu", "trl"),
        alone=True,
    ),
    Row(
        "kernels",
        "the kernels that replace several of PyTorch's against plain transformers, by type of model",
        "kernel_rows:compare",
        minutes=10,
        options={"device": "cuda"},
        rehearse={"device": "cpu", "kinds": ["qwen3"]},
    ),
    Row(
        "step-kernels",
        "an optimizer step of 1.5 billion weights without and with these kernels",
        "step_rows:step",
        minutes=10,
        options={"size": "1.5B", "sides": ["plain", "fast"]},
        rehearse={"size": "tiny", "sides": ["plain"]},
        alone=True,
    ),
    Row(
        "step-flash3",
        "an optimizer step of 1.5 billion weights with FlashAttention 2 and with 3",
        "step_rows:step",
        minutes=10,
        options={"size": "1.5B", "sides": ["fast", "flash3"]},
        rehearse={"size": "tiny", "sides": ["plain"]},
        needs=("gpu", "flash3"),
        alone=True,
    ),
    Row(
        "step-compiled",
        "an optimizer step of 1.5 billion weights with layers by torch.compile, without Liger's kernels and with them",
        "step_rows:step",
        minutes=15,
        options={"size": "1.5B", "sides": ["fast", "compiled", "compiled-fast"]},
        rehearse={"size": "tiny", "sides": ["plain", "compiled"]} if which("g++") else "torch.compile needs g++",
        alone=True,
    ),
    Row(
        "step-filled",
        "an optimizer step of 1.5 billion weights with `max_tokens_per_micro_batch: auto`",
        "step_rows:filled",
        minutes=10,
        options={"size": "1.5B"},
        rehearse={"size": "tiny", "room": 1e9, "sides": ["plain"]},
        alone=True,
    ),
    Row(
        "tests",
        "the tests that start vLLM, DeepSpeed or Snakemake, as `make test` runs them on a GPU",
        "machine:suite",
        minutes=90,
        rehearse={"paths": ["tests/unit/test_seeds.py"]},
    ),
    *(
        Row(
            f"kind-{kind}",
            f"two rounds of `{kind}`, longer than its window",
            "kind_rows:kind",
            minutes=8,
            options={"kind": kind},
            rehearse=ELSEWHERE,
            alone=kind in RECURRENT,
        )
        for kind in MODEL_KINDS
    ),
    _mini("router-replay", "a mixture of experts trains with the sampler's experts", changes=REPLAY)._replace(
        rehearse="vLLM returns its experts on GPUs only"
    ),
    _mini("fp8", "rollouts with FP8 weights", changes=FP8),
    _mini("tools", "rollouts of several turns with a calculator", changes=TOOLS),
    *(
        Row(
            f"images-{kind}",
            f"the demo of images with `{kind}`, two rounds",
            "whole_runs:images",
            minutes=12,
            options={"kind": kind},
            rehearse=DRY,
        )
        for kind in IMAGES
    ),
    _mini("reward-model", "a reward model on the GPU", reward_model=True),
    _mini("preferences", "a reward model that preferences train", changes=PREFERENCES),
    _mini("lag", "`rollout.lag: 1` on one GPU", changes={"rollout": {"lag": 1}}),
    _mini("refill", "`rollout.refill: 1`", changes=REFILL),
    _mini("teacher", "a teacher beside the rewards", changes=TEACHER),
    _mini("reproducible", "`reproducible: true`", changes={"reproducible": True}),
    _mini(
        "reproducible-experts",
        "`reproducible: true` with a mixture of experts",
        changes={**EXPERTS, "reproducible": True},
    ),
    _mini(
        "exchange",
        "`exchange: node`, policies that go through the node's memory",
        changes={"reproducible": True, "exchange": "node", "keep_every": 2},
    ),
    _mini("float32", "float32", changes={"model": {"dtype": "float32"}}),
    _mini("float16", "float16", changes={"model": {"dtype": "float16"}}),
    _mini("adamw_8bit", "AdamW with moments in 8 bits", **_update(optimizer="adamw_8bit")),
    _mini("adafactor", "Adafactor", **_update(optimizer="adafactor")),
    _mini("muon", "Muon", **_update(optimizer="muon")),
    _mini("zero1", "ZeRO 1", **_trainer(zero_stage=1)),
    _mini("zero2", "ZeRO 2", **_trainer(zero_stage=2)),
    _mini("zero3", "ZeRO 3", **_trainer(zero_stage=3)),
    _mini(
        "offload",
        "ZeRO 2, the optimizer in the node's memory",
        **_trainer(zero_stage=2, offload=OFFLOAD["optimizer"]),
    ),
    _mini("nvme", "ZeRO 3, weights and optimizer in files", **_trainer(zero_stage=3, offload=OFFLOAD["nvme"])),
    _mini("checkpointing", "activations computed twice", **_trainer(gradient_checkpointing=True)),
    _mini("torch-compile", "layers by torch.compile", **_update(torch_compile=True)),
    _mini("two-ranks", "an update on two GPUs", "2 gpus", **_trainer(processes=2, zero_stage=3)),
    _mini(
        "sequence-parallel",
        "an update on two GPUs that split each sequence",
        "2 gpus",
        **_trainer(processes=2, sequence_parallel=2),
    ),
    Row(
        "two-ranks-warm",
        "the mini configuration: an update on two GPUs under ZeRO 2, whose ranks stay for the next",
        "whole_runs:warm_ranks",
        minutes=12,
        rehearse=DRY,
        needs=("2 gpus",),
    ),
    Row(
        "two-ranks-overlap",
        "gradients of two GPUs summed during the backward pass, against after it",
        "machine:suite",
        minutes=8,
        options={"paths": [OVERLAP]},
        rehearse="`make test` runs this test on CPUs",
        needs=("2 gpus",),
    ),
    _mini("two-gpus-lag", "`rollout.lag: 1` with a GPU for each side", "2 gpus", changes={"rollout": {"lag": 1}}),
    _mini("two-gpus-sampler", "vLLM over two GPUs", "2 gpus", changes={"vllm": {"tensor_parallel_size": 2}}),
    _mini("two-engines", "two vLLM engines in a job", "2 gpus", changes={"vllm": {"data_parallel_size": 2}}),
    Row(
        "memory",
        "memory that `rloo plan` predicts against what an update takes, three models",
        "memory_rows:update",
        minutes=15,
        options={"device": "cuda"},
        rehearse={"device": "cpu", "sizes": ["small"]},
        alone=True,
    ),
    *(
        Row(
            f"step-{size}",
            f"an optimizer step of {size[:-1]} billion weights against TRL's",
            "step_rows:step",
            minutes=15,
            options={"size": size, "sides": sides},
            rehearse="the row step-1.5B does it with a tiny model",
            needs=("gpu", "trl"),
            alone=True,
        )
        # DeepSpeed takes 20 bytes for each weight, which is 152 GB for 7 billion
        for size, sides in (("0.5B", ["plain", "deepspeed", "trl"]), ("7B", ["plain", "trl"]))
    ),
    _mini("image", "in the image for GPUs (`--sdm apptainer`)", "gpu", "apptainer", "image", container=True)._replace(
        rehearse="needs the image; tests/cluster runs it in that for CPUs"
    ),
)
