"""A TRL script and the project that `rloo init --from-trl` makes of it end with the same weights.

The script runs as it is, for three rounds, but TRL's trainer gets completions of random tokens in place of sampled
ones. The project's stages score the same completions, compute reference log-probs, and update.
"""

import contextlib
import random
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import forks
import pytest
import torch
from helpers import printed, write_prompts
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, optimization

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.round_tables import RoundFiles
from rloo_pipeline.commands.init import init_from_trl
from rloo_pipeline.config.loading import load
from rloo_pipeline.stages.reference import reference
from rloo_pipeline.stages.score import score
from rloo_pipeline.stages.update import update

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

EQUAL = 7e-5
"""Largest difference of the final weights, as a share of the distance that they have moved; measured: at
most 2.2e-5, with and without AVX.
"""
ROUNDS, LONGEST = 3, 8
PROMPTS = [f"{number * 7}+{number}=" for number in range(8)]

SCRIPT = """
from datasets import load_dataset
from peft import LoraConfig
from trl import {kind}Config, {kind}Trainer


def digits(completions, **kwargs):
    return [sum(character.isdigit() for character in text) - text.count("+") for text in completions]


trainer = {kind}Trainer(
    model="{model}",
    args={kind}Config(
        output_dir="out",
        model_init_kwargs={{"dtype": "float32"}},
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        learning_rate=1e-3,
        max_completion_length={longest},
        {options}
    ),
    reward_funcs=digits,
    train_dataset=load_dataset("json", data_files="prompts.jsonl", split="train"),
    peft_config={adapter},
)
trainer.train()
"""
"""The learning rate is one at which float32's spacing of the weights does not show."""

LORA = "LoraConfig()"
CASES = {
    "rloo": ("RLOO", {}),
    "rloo-kl": ("RLOO", {"beta": 0.5, "num_generations": 4}),
    "rloo-lora": ("RLOO", {}, LORA),
    "rloo-lora-embedding": ("RLOO", {}, "LoraConfig(target_modules=['q_proj', 'embed_tokens'])"),
    "rloo-iterations": ("RLOO", {"num_iterations": 2}),
    "rloo-accumulated-warm-up": ("RLOO", {"gradient_accumulation_steps": 2, "warmup_steps": 2, "weight_decay": 0.1}),
    "grpo": ("GRPO", {"per_device_train_batch_size": 16}),
    "grpo-kl-iterations-lora": ("GRPO", {"beta": 0.04, "num_iterations": 2}, LORA),
}
"""TRL's trainer, its options, and an adapter."""


class Round(NamedTuple):
    """Token ids of the prompts and completions of a round; neighbours are a group."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]


class Trained(NamedTuple):
    """Trained weights by name before and after."""

    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]


def of_script(kind: str) -> tuple[Trained, list[Round]]:
    """Runs script.py in the current folder, with TRL's trainer."""
    import datasets
    import trl

    datasets.config.HF_DATASETS_CACHE = Path("cache")

    rounds, before = list[Round](), dict[str, Tensor]()

    def weights(trainer: Any) -> dict[str, Tensor]:
        found = trainer.model.named_parameters()
        return {name.replace(".default", ""): weight.detach().clone() for name, weight in found if weight.requires_grad}

    def complete(trainer: Any, prompt_ids: list[list[int]], *_: object) -> Any:
        before.update({} if before else weights(trainer))
        rng, end = random.Random(len(rounds)), trainer.processing_class.eos_token_id
        drawn = [[rng.randrange(4, 20) for _ in range(rng.randrange(LONGEST + 1))] for _ in prompt_ids]
        completion_ids = [ids if len(ids) == LONGEST else [*ids, end] for ids in drawn]
        rounds.append(Round(prompt_ids, completion_ids))
        return (completion_ids, None) if kind == "GRPO" else completion_ids

    with (
        mock.patch.object(getattr(trl, f"{kind}Trainer"), "_generate_single_turn", complete),
        mock.patch.object(optimization, RATE, rate_after_step),
        mock.patch.object(torch.nn.init, "kaiming_uniform_", fill),
        mock.patch.object(torch.nn.init, "normal_", fill),  # of adapters on embeddings
    ):
        trainer = runpy.run_path("script.py")["trainer"]
    return Trained(before, weights(trainer)), rounds


RATE = "_get_linear_schedule_with_warmup_lr_lambda"
linear = getattr(optimization, RATE)


def rate_after_step(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    """TRL's rate but for the difference that docs/trl.md names: step i of a warm-up has i, not i − 1, parts of it."""
    step += step < num_warmup_steps
    return linear(step, num_warmup_steps=num_warmup_steps, num_training_steps=num_training_steps)


def fill(tensor: Tensor, **_: object) -> Tensor:
    """The same initial weights of adapters on both sides."""
    with torch.no_grad():
        return tensor.uniform_(-0.3, 0.3, generator=torch.Generator().manual_seed(tensor.numel()))


def of_stages(model: Path, number: int, round_: Round) -> None:
    """Runs the stages of a round of the project in the current folder."""
    config, tokenizer = load(Path("config/config.yaml")), AutoTokenizer.from_pretrained(model)
    run, zero = Path("results"), Policy(model)
    ids_of = dict(zip(PROMPTS, tokenizer(PROMPTS)["input_ids"], strict=True))
    names = {tuple(ids): prompt for prompt, ids in ids_of.items()}
    rows = [{"prompt_id": prompt, "prompt": prompt, "prompt_ids": ids} for prompt, ids in ids_of.items()]
    write_prompts(run / f"prompts-{number}", rows)
    policy = zero if number == 1 else Policy(run / f"{number - 1:05d}")
    rows = [
        {"prompt_id": names[tuple(prompt)], "sample": place % config.rollout.num_generations, "seed": 0}
        | {"prompt_ids": prompt, "completion_ids": ids, "sampling_logps": [-1.0] * len(ids)}
        | {"completion": tokenizer.decode(ids, skip_special_tokens=True)}
        | {"finish_reason": "stop" if ids[-1] == tokenizer.eos_token_id else "length"}
        for place, (prompt, ids) in enumerate(zip(*round_, strict=True))
    ]
    folder, about = run / "rounds" / f"{number:05d}", {"run": config.run, "round": number, "policy": policy.digest}
    files = RoundFiles(*([folder / name / "000.parquet"] for name in ("rollouts", "scores", "reference")))
    about |= {"policy_round": number - 1, "shard": 0, "seed": config.seed}
    tables.write(files.rollouts[0], rows, tables.ROLLOUTS, "rollouts", **about)
    score(config.only("score"), run / f"prompts-{number}", policy, files.rollouts[0], files.scores[0])
    if config.uses_reference:
        reference(config.only("reference"), zero, files.rollouts[0], files.reference[0])
    outputs = run / f"{number:05d}", *(folder / name for name in ("metrics", "events", "train.parquet"))
    with (
        mock.patch.object(torch.nn.init, "kaiming_uniform_", fill),
        mock.patch.object(torch.nn.init, "normal_", fill),
    ):
        inputs = files.rollouts, files.scores
        update(config.only("update"), number, policy, run / "trainer", *inputs, *outputs, reference=files.reference)


def of_scripts(folders: Mapping[str, Path]) -> dict[str, tuple[Trained, list[Round]]]:
    """Runs the script of each case in its folder."""
    outcomes = {}
    for case, folder in folders.items():
        with contextlib.chdir(folder):
            outcomes[case] = of_script(CASES[case][0])
    return outcomes


@pytest.fixture(scope="module")
def scripts(tiny_model, tmp_path_factory) -> tuple[dict[str, Path], dict[str, tuple[Trained, list[Round]]]]:
    """The folder of each case, and what its script has trained; in one process, since TRL takes seconds to import."""
    folders = {case: tmp_path_factory.mktemp(case) for case in CASES}
    for case, folder in folders.items():
        kind, options, *adapter = CASES[case]
        options = {"max_steps": ROUNDS * options.get("num_iterations", 1), **options}
        lines = "\n        ".join(f"{name}={value!r}," for name, value in options.items())
        values = {"kind": kind, "model": tiny_model, "longest": LONGEST, "options": lines}
        (folder / "script.py").write_text(SCRIPT.format(**values, adapter=adapter[0] if adapter else None))
        (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "{prompt}"}}\n' for prompt in PROMPTS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # TRL's side trains on the CPU
        return folders, forks.call(of_scripts, folders)


@pytest.mark.parametrize("case", CASES)
def test_a_script_and_its_project_end_with_the_same_weights(tiny_model, scripts, monkeypatch, case) -> None:
    folders, outcomes = scripts
    trained, rounds = outcomes[case]
    assert len(rounds) == ROUNDS
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(folders[case])
    printed(init_from_trl, Path("project"), "script.py", None, force=False)
    monkeypatch.chdir("project")
    for number, round_ in enumerate(rounds, 1):
        forks.call(of_stages, tiny_model, number, round_)
    [file] = Path("results", f"{ROUNDS:05d}").glob("*.safetensors")
    ours = load_file(file)
    assert ours.keys() == trained.after.keys()
    moved, apart = (
        sum(float((weights[name] - trained.after[name]).norm() ** 2) for name in ours) ** 0.5
        for weights in (trained.before, ours)
    )
    print(f"{case}: {apart / moved:.1e} of {moved:.3g}")
    assert apart < EQUAL * moved
