"""Commands of TRL's command line, such as `trl grpo --config grpo.yaml`, as the scripts that they stand for."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rloo_pipeline.commands.trl_tables import REWARDS
from rloo_pipeline.config.section import JSON
from rloo_pipeline.errors import UserError

MODULE = re.compile(r"(?:.*/)?trl[./]scripts[./](rloo|grpo)(?:\.py)?")
OVERLONG = "get_soft_overlong_punishment"
SCRIPT = """
{imports}
from datasets import concatenate_datasets, load_dataset
from trl import {kind}Config, {kind}Trainer, ModelConfig, TrlParser, get_peft_config, get_quantization_config

training_args, model_args = TrlParser(({kind}Config, ModelConfig)).parse_args_and_config()
training_args.model_init_kwargs = dict(
    revision=model_args.model_revision, dtype=model_args.dtype, **{model_init_kwargs}
)
{data}
trainer = {kind}Trainer(
    model=model_args.model_name_or_path,
    reward_funcs=[{rewards}],
    args=training_args,
    train_dataset=dataset[{train!r}],
    eval_dataset={held_out},
    quantization_config=get_quantization_config(model_args),
    peft_config=get_peft_config(model_args),
)
trainer.train()
"""
"""As trl/scripts/rloo.py and grpo.py do."""


def split(words: Sequence[str]) -> tuple[str, Sequence[str]] | None:
    """The trainer's kind and the options of a TRL command, which accelerate may launch; None for a script."""
    if len(words) > 1 and words[0] == "trl" and words[1] in ("rloo", "grpo"):
        return words[1].upper(), words[2:]
    for place, word in enumerate(words):
        if found := MODULE.fullmatch(word):
            return found[1].upper(), words[place + 1 :]
    return None


def script(kind: str, options: JSON) -> str:
    """The source of the script that a TRL command stands for.

    Args:
        kind: `RLOO` or `GRPO`.
        options: those of the command and of its file. Those that are written into the source are removed.

    Raises:
        UserError: the options name no data or an unknown reward function.
    """
    rewards, imports = _rewards(options)
    has_eval = options.get("eval_strategy", "no") not in ("no", False)
    mixture = options.pop("datasets", None)
    train, held_out = (options.pop(f"dataset_{part}_split", part) for part in ("train", "test"))
    name, config = options.pop("dataset_name", None), options.pop("dataset_config", None)
    if mixture:
        (train, held_out), has_eval = ("train", "test"), has_eval and "test_split_size" in options
        data = _mixture(mixture, options.pop("test_split_size", None))
    elif name:
        data = f"dataset = load_dataset({name!r}{f', {config!r}' if config else ''})"
    else:
        raise UserError(f"trl {kind.lower()}: give the option dataset_name, or datasets in its file")
    return SCRIPT.format(
        kind=kind,
        imports=imports,
        data=data,
        rewards=rewards,
        model_init_kwargs=options.pop("model_init_kwargs", None) or {},
        train=train,
        held_out=f"dataset[{held_out!r}]" if has_eval else None,
    )


def _rewards(options: JSON) -> tuple[str, str]:
    """The elements of `reward_funcs`, and the lines that import them."""
    names = options.pop("reward_funcs", None) or []
    model = options.pop("reward_model_name_or_path", None)
    elements, imports = [repr(model)] if model else [], []
    for name in [names] if isinstance(names, str) else names:
        module, _, function = name.rpartition(".")
        if not module and name not in (*REWARDS, OVERLONG):
            raise UserError(f"reward_funcs {name}: there are {', '.join((*REWARDS, OVERLONG))} and MODULE.FUNCTION")
        imports.append(f"from {module or 'trl.rewards'} import {function}")
        elements.append(f"{name}(1280, 256)" if name == OVERLONG else function)
    return ", ".join(elements), "\n".join(imports)


def _mixture(parts: Sequence[JSON], test_size: float | None) -> str:
    """The lines that load a mixture, as `trl.get_dataset` does."""
    loaded = []
    for part in parts:
        given = {"split": "train"} | {key: value for key, value in part.items() if value is not None}
        columns, _ = given.pop("columns", None), given.pop("fraction", None)
        arguments = ", ".join(f"{key}={value!r}" for key, value in given.items())
        loaded.append(f"load_dataset({arguments}){f'.select_columns({columns!r})' if columns else ''}")
    lines = [f"parts = [{', '.join(loaded)}]"]
    if fractions := [part["fraction"] for part in parts if part.get("fraction") is not None]:
        lines += [
            f"shares = {[fraction / sum(fractions) for fraction in fractions]}",
            "total = min(len(part) / share for part, share in zip(parts, shares) if share > 0)",
            "parts = [part.select(range(round(share * total))) for part, share in zip(parts, shares)]",
        ]
    whole = "concatenate_datasets(parts)"
    split_ = f"{whole}.train_test_split(test_size={test_size})" if test_size is not None else f"dict(train={whole})"
    return "\n".join([*lines, f"dataset = {split_}"])
