"""Options of a command line, and TRL's own commands, such as `trl grpo --config grpo.yaml`, as scripts."""

import json
import re
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from rloo_pipeline.commands.trl_tables import REWARDS
from rloo_pipeline.config.section import JSON
from rloo_pipeline.errors import UserError
from rloo_pipeline.report.frame import templates_of

MODULE = re.compile(r"(?:.*/)?trl[./]scripts[./](rloo|grpo)(?:\.py)?")
LAUNCH = re.compile(r"--(num[-_]processes|config[-_]file|nproc[-_]per[-_]node|nnodes|num_gpus|num_nodes)[ =](\S+)")
"""Options of `accelerate launch`, `torchrun` and `deepspeed`, whose processes multiply the batch."""
DEEPSPEED = {"num_gpus": "nproc_per_node", "num_nodes": "nnodes"}
"""Options of `deepspeed`, and those of `torchrun` with the same meaning."""
LAUNCHER = re.compile(r"(?:.*/)?(?:python[\d.]*|accelerate|torchrun|deepspeed|srun|uv|env)|\w+=.*")
"""A program that may stand before a script, or a variable for it."""
PROCESSES = {"single_gpu": 1} | dict.fromkeys(("multi_gpu", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"), 8)
"""Number of processes of TRL's own configurations of accelerate."""
OVERLONG = "get_soft_overlong_punishment"


def split(words: list[str]) -> tuple[str, list[str]] | None:
    """The trainer's kind and the options of a TRL command, which a launcher may start; None for a script.

    Raises:
        UserError: the command does not train with RLOO or GRPO.
    """
    if words[0] == "trl":
        if words[1:2] not in (["rloo"], ["grpo"]):
            raise UserError(f"--from-trl '{' '.join(words[:2])}': only the commands trl rloo and trl grpo can be read")
        return words[1].upper(), words[2:]
    for place, word in enumerate(words):
        if found := MODULE.fullmatch(word):
            return found[1].upper(), [*_launch_options(words[:place]), *words[place + 1 :]]
    return None


def without_launcher(words: list[str]) -> tuple[list[str], JSON]:
    """A script with its options, without the launcher before it, and `num_processes` if the launcher gives it.

    Raises:
        UserError: there is no script, or a configuration of accelerate cannot be read.
    """
    for before, (place, word) in zip(words, enumerate(words[1:], 1), strict=False):
        if before == "-m" and Path(file := word.replace(".", "/") + ".py").is_file():
            words[place] = file
    scripts = (place for place, word in enumerate(words) if word.endswith(".py"))
    first = next(scripts, None) if not words[0] or LAUNCHER.fullmatch(words[0]) else 0
    if first is None:
        raise UserError(f"--from-trl '{' '.join(words)}': names no script; write its file, such as train.py")
    launch = option_values(_launch_options(words[:first]))
    count = _number_of_processes(launch)
    return words[first:], {"num_processes": count} if count else {}


def _launch_options(launcher: Sequence[str]) -> list[str]:
    """The options of a launcher that set its number of processes, under accelerate's names."""
    options = LAUNCH.findall(" ".join(launcher))
    found = {DEEPSPEED.get(name, name.replace("-", "_")): value for name, value in options}
    nodes = found.pop("nnodes", None)
    per_node, nodes = found.pop("nproc_per_node", "1" if nodes else ""), nodes or "1"
    if per_node.isdecimal() and nodes.isdecimal():  # not `gpu`, or `1:4`
        found["num_processes"] = str(int(per_node) * int(nodes))
    return [f"--{name}={value}" for name, value in found.items()]


def script(kind: str, options: JSON) -> str:
    """The source of the script that a TRL command stands for.

    Args:
        kind: `RLOO` or `GRPO`.
        options: those of the command and of its file. Those that are written into the source are removed.

    Raises:
        UserError: the options name no data or an unknown reward function.
    """
    rewards, imports = _rewards(options)
    if count := _number_of_processes(options):
        options["num_processes"] = count
    has_eval = options.get("eval_strategy", "no") not in ("no", False)
    mixture, test_size = options.pop("datasets", None) or [], None
    train, held_out = (options.pop(f"dataset_{part}_split", part) for part in ("train", "test"))
    name, config = options.pop("dataset_name", None), options.pop("dataset_config", None)
    if mixture:
        (train, held_out), has_eval = ("train", "test"), has_eval and "test_split_size" in options
        test_size = options.pop("test_split_size", None)
    elif not name:
        raise UserError(f"trl {kind.lower()}: give the option dataset_name, or datasets in its file")
    fractions = [part["fraction"] for part in mixture if part.get("fraction") is not None]
    template = templates_of("rloo_pipeline.commands").get_template("trl_script.py.j2")
    return template.render(
        kind=kind,
        imports=imports,
        dataset=f"{name!r}, {config!r}" if config else repr(name),
        parts=[_loaded(part) for part in mixture],
        shares=[fraction / sum(fractions) for fraction in fractions],
        test_size=test_size,
        rewards=rewards,
        model_init_kwargs=options.pop("model_init_kwargs", None) or {},
        train=repr(train),
        held_out=f"dataset[{held_out!r}]" if has_eval else None,
    )


def _number_of_processes(options: JSON) -> int | None:
    launch = options.get("config_file") or options.get("accelerate_config")
    count = options.get("num_processes") or (_processes(str(launch)) if launch else None)
    return count if isinstance(count, int) else None  # not `$N`


def _processes(launch: str) -> int | None:
    """The number of processes in a configuration of accelerate: a file, or one of TRL's own."""
    if Path(launch).is_file():
        settings = _mapping(launch)
        # accelerate starts one then, whatever num_processes says; YAML reads NO as False
        return 1 if settings.get("distributed_type") in ("NO", False) else settings.get("num_processes")
    if launch not in PROCESSES:
        raise UserError(f"--from-trl: {launch} is neither a file nor one of TRL's own ({', '.join(PROCESSES)})")
    return PROCESSES[launch]


def _rewards(options: JSON) -> tuple[str, str]:
    """The elements of `reward_funcs`, and the lines that import them."""
    names = options.pop("reward_funcs", None) or []
    model = options.pop("reward_model_name_or_path", None)
    elements, imports = [repr(model)] if model else [], []
    for name in names if isinstance(names, list) else [names]:
        module, _, function = str(name).rpartition(".")
        of_trl = not module and function in (*REWARDS, OVERLONG)
        if not of_trl and not (module and all(map(str.isidentifier, name.split(".")))):
            raise UserError(f"reward_funcs {name}: must be {', '.join((*REWARDS, OVERLONG))}, or MODULE.FUNCTION")
        bound = function if function not in elements else f"{function}_{len(elements) + 1}"
        imports.append(f"from {module or 'trl.rewards'} import {function} as {bound}")
        elements.append(f"{name}(1280, 256)" if name == OVERLONG else bound)
    return ", ".join(elements), "\n".join(imports)


def _loaded(part: JSON) -> str:
    """The call that loads a part of a mixture, as in `trl.get_dataset`."""
    given = {"split": "train"} | {key: value for key, value in part.items() if value is not None}
    columns, _ = given.pop("columns", None), given.pop("fraction", None)
    arguments = ", ".join(f"{key}={value!r}" for key, value in given.items())
    return f"load_dataset({arguments}){f'.select_columns({columns!r})' if columns else ''}"


def option_values(words: Sequence[str]) -> dict[str, Any]:
    """Parses `--max_steps 400 --use_vllm` into {max_steps: 400, use_vllm: True}. Options override the file of
    `--config`.

    Raises:
        UserError: a word does not belong to an option, or the file cannot be read.
    """
    found: dict[str, Any] = {}
    name = None
    for word, after in zip_longest(words, words[1:], fillvalue="--"):
        if not after.startswith("--"):  # `"q_proj", "v_proj"` in a shell: the comma is not meant as part of a name
            word = word[:1] + word[1:].removesuffix(",")
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = _number(value) if equals else True
        elif name is None:
            raise UserError(f"--from-trl: '{word}' does not belong to an option; write the options as for the script")
        elif found[name] is True:
            found[name] = _number(word)
        else:
            found[name] = [*(found[name] if isinstance(found[name], list) else [found[name]]), _number(word)]
    if file := found.pop("config", None):
        options = _mapping(str(file))
        # YAML reads 1e-6 as text
        is_number = re.compile(r"[-+]?\d+[eE][-+]?\d+").fullmatch
        found = {key: float(value) if is_number(str(value)) else value for key, value in options.items()} | found
    return found


def _number(word: str) -> Any:
    """Parses a word of a command line as a number, boolean, dictionary or string."""
    for convert in (json.loads, float):
        try:
            return convert(word)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(word.lower(), word)


def _mapping(file: str) -> JSON:
    """The content of a YAML file.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return dict(yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {})
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"--from-trl: --config {file} cannot be read ({error})") from error
