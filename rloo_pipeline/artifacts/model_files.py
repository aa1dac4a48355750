"""The files of a model: complete safetensors weights with all tensors of the model, and no pickles.

`check` accepts a folder only when it is complete: each safetensors file has the length that its header declares, and
every shard in the index exists. Pickled weights are refused.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.errors import UserError

POLICIES = "policies"
"""Folder of a run with the policies that its stages wrote."""
STATES = "trainer"
"""Folder of a run with its trainer states, by round."""
STATE_POLICY = "policy"
"""Folder of a trainer state with the policy of its round."""
ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
GENERATION = "generation_config.json"
SELF_CHECK = "self_check.json"
"""Result of `training/self_check`."""
NF4 = "nf4.json"
"""Patterns of the layers that stay in 16 bits, in a policy made from an NF4 checkpoint."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
PEFT_PREFIX = "base_model.model."
"""Prefix of tensor names in PEFT's files."""


def policy_folder(run: Path, number: int) -> Path:
    """The folder of a policy, in the run's folder; 0 is the warm start."""
    return run / POLICIES / f"{number:05d}"


def here(name: str, revision: str | None) -> Path | None:
    """A model's folder, which is its name or in the Hub's cache; None if it is not on this machine."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache

    with suppress(ValueError):  # no name of the Hub
        file = try_to_load_from_cache(name, "config.json", revision=revision)
        return Path(file).parent if isinstance(file, str) else None
    return None


def check_files(folder: Path) -> None:
    """Checks that a folder has only files and folders; reading a pipe would wait forever.

    Raises:
        UserError: the folder has a pipe, socket or device.
    """
    for path in sorted(folder.iterdir()):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UserError(f"{path}: a pipe, socket or device instead of a file; remove it from the model's folder")


def check(folder: Path) -> None:
    """Checks that the model or adapter in a folder is complete.

    Raises:
        UserError: the model is missing, its weights are not safetensors, or a file is missing or truncated.
    """
    if not (folder / "config.json").exists() and not (folder / ADAPTER).exists():
        raise UserError(
            f"{folder}: no config.json, so this is not a model folder; check the path or delete it and run again"
        )
    for missing in missing_shards(folder):
        raise UserError(f"{missing}: missing, though {INDEX} names it; fetch or write the model again")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = [file for file in sorted(folder.iterdir()) if file.suffix in PICKLES]
        if not pickles:
            raise UserError(f"{folder}: no weights (no .safetensors file); copy or fetch the whole model")
        raise UserError(
            f"{folder}: only pickled weights ({pickles[0].name}), which can run code when loaded; convert the model to "
            "safetensors"
        )
    for file in files:
        tensors_in(file)


def missing_shards(folder: Path) -> list[Path]:
    """The weight files that the index of a model names and its folder lacks."""
    named = read_json(folder / INDEX, remedy(folder))["weight_map"].values() if (folder / INDEX).exists() else ()
    return sorted({folder / name for name in named} - {*folder.glob("*.safetensors")})


def tensors_in(file: Path) -> dict[str, Any]:
    """The entries of the tensors in a safetensors file's header, such as `dtype` and `shape`, by name.

    A file has 8 bytes with the length of its header, the header, which is JSON and has the offsets, and the tensors.

    Raises:
        UserError: the file does not have the length that its header declares.
    """
    size = file.stat().st_size
    with file.open("rb") as handle:
        start = handle.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        text = handle.read(min(length, size))
    if (start + text).startswith(b"version https://git-lfs"):
        raise UserError(f"{file}: only a pointer of Git LFS; `git lfs pull` in that folder fetches the file")
    tensors: dict[str, Any] = {}
    try:
        tensors = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        end = size
    if size != 8 + length + end:
        raise UserError(
            f"{file}: truncated or damaged ({size} bytes, its header declares {8 + length + end}); "
            f"{remedy(file.parent)}"
        )
    return tensors


def remedy(folder: Path) -> str:
    """The advice for a damaged file in the folder of a model, which may be a policy of a run."""
    return f"delete {folder} and run again" if folder.parent.name == POLICIES else "fetch or write the model again"


def check_loading_info(model: Path | str, info: Mapping[str, Any]) -> None:
    """Checks that weights and model have the same tensors, from the `output_loading_info` of transformers.

    A tensor that is missing or has a different shape would be random, and an extra one would be ignored. Tied weights
    do not count as missing.

    Raises:
        UserError: the tensors differ.
    """
    problems = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    problems += [
        f"{name} has shape {list(shape)}, not {list(expected)}" for name, shape, expected in info["mismatched_keys"]
    ]
    problems += [f"{name} is not a tensor of the model" for name in sorted(info["unexpected_keys"])]
    if problems:
        more = f" (and {len(problems) - 1} more like it)" if len(problems) > 1 else ""
        raise UserError(
            f"{model}: the weights do not fit the model that its configuration describes, so some would be random or "
            f"ignored: {problems[0]}{more}; fetch or write the model again, or use a different one"
        )


def adapter_modules(folder: Path) -> list[str]:
    """Names in transformers of the modules that an adapter changes, read from its tensors.

    Raises:
        UserError: the adapter also replaces whole modules (PEFT's modules_to_save), which vLLM does not serve.
    """
    names = [name.removeprefix(PEFT_PREFIX) for name in tensors_in(folder / ADAPTER_WEIGHTS)]
    parts = [name.partition(".lora_") for name in names if ".base_layer." not in name]
    if whole := sorted({name.rpartition(".")[0] for name, separator, _ in parts if not separator}):
        raise UserError(
            f"{folder}: the adapter replaces {module_counts(whole)} as a whole (modules_to_save), which vLLM does not "
            "serve; train only adapters of linear layers"
        )
    return sorted({name for name, *_ in parts})


def module_counts(modules: Iterable[str]) -> str:
    """Lists modules by the last part of their names, with the count of each."""
    last = [name.rpartition(".")[2] for name in modules]
    return ", ".join(f"{name} ({last.count(name)} times)" for name in sorted(set(last)))


def check_finite(files: Iterable[Path]) -> None:
    """Checks that no weight in a model's files is NaN or infinite.

    Raises:
        UserError: a weight is not finite.
    """
    import torch
    from safetensors import safe_open

    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                tensor = tensors.get_tensor(name)
                if tensor.is_floating_point() and tensor.itemsize > 1 and not torch.isfinite(tensor).all():
                    raise UserError(f"{file}: {name} has values that are not finite; fetch or write the model again")
