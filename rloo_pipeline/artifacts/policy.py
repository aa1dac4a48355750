"""Policies on disk: Hugging Face folders with safetensors weights, or PEFT adapters that name their base model.

`check` accepts a policy only when it is complete: each safetensors file has the length that its header declares, and
every shard in the index exists. Pickled weights are refused. `training/policy_model.py` loads and saves the model
itself.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_pipeline.artifacts import lineage
from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.artifacts.manifest import Manifest, verify_manifest, write_manifest
from rloo_pipeline.artifacts.manifest import digest as digest_of
from rloo_pipeline.artifacts.model_dims import text_config
from rloo_pipeline.errors import UserError, one_line, raise_disk_full
from rloo_pipeline.runtime import import_shims

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FOLDER = "policies"
"""Folder of a run with the policies that its stages wrote."""
ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
GENERATION = "generation_config.json"
DECIDING = (".safetensors", "config.json")
"""Ends of the names of files that `digest` covers."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def is_adapter(folder: Path) -> bool:
    """True if a policy is a PEFT adapter on a base model."""
    return (folder / ADAPTER).exists()


def check_files(folder: Path) -> None:
    """Checks that a folder has only files and folders; reading a pipe would wait forever.

    Raises:
        UserError: it has a pipe, socket or device.
    """
    for path in sorted(folder.iterdir()):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UserError(f"{path}: a pipe, socket or device, and not a file; remove it from the model's folder")


def check(folder: Path) -> None:
    """Checks that a policy is complete.

    Raises:
        UserError: the model is missing, its weights are not safetensors, or a file is missing or truncated.
    """
    if not (folder / "config.json").exists() and not is_adapter(folder):
        raise UserError(
            f"{folder}: no config.json, so this is no model folder; check the path or delete it and run again"
        )
    files = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).exists():
        named = {folder / name for name in read_json(folder / INDEX)["weight_map"].values()}
        for missing in sorted(named - set(files)):
            raise UserError(f"{missing}: missing, though {INDEX} names it; fetch or write the model again")
    if not files:
        pickles = [file for file in sorted(folder.iterdir()) if file.suffix in PICKLES]
        if not pickles:
            raise UserError(f"{folder}: no weights (no .safetensors file); copy or fetch the whole model")
        raise UserError(
            f"{folder}: only pickled weights ({pickles[0].name}), which can run code when loaded; convert the model to "
            "safetensors"
        )
    for file in files:
        _check_safetensors(file)


def _check_safetensors(file: Path) -> None:
    """Checks the length of a file: 8 bytes of header length, a JSON header with the offsets of each tensor, tensors."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        start = handle.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        text = handle.read(min(length, size))
    try:
        header: dict[str, Any] = json.loads(text)
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError):
        end = size
    if size != 8 + length + end:
        ours = file.parent.parent.name == FOLDER
        remedy = f"delete {file.parent} and run again" if ours else "fetch or write the model again"
        raise UserError(
            f"{file}: truncated or damaged ({size} bytes, its header asks for {8 + length + end}); {remedy}"
        )


def check_loading_info(model: Path | str, info: Mapping[str, Any]) -> None:
    """Checks that weights and model have the same tensors, by the `output_loading_info` of transformers.

    A tensor that is missing or has another shape would be random, and one too many would be ignored. Tied weights do
    not count as missing.

    Raises:
        UserError: they have not.
    """
    problems = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    problems += [
        f"{name} has shape {list(shape)}, not {list(expected)}" for name, shape, expected in info["mismatched_keys"]
    ]
    problems += [f"{name} is no tensor of the model" for name in sorted(info["unexpected_keys"])]
    if problems:
        more = f" (and {len(problems) - 1} more like it)" if len(problems) > 1 else ""
        raise UserError(
            f"{model}: the weights do not fit the model that its configuration describes, so some would be random or "
            f"ignored: {problems[0]}{more}; fetch or write the model again, or use another one"
        )


def check_finite(folder: Path) -> None:
    """Checks that no weight of a model is NaN or infinite.

    Raises:
        UserError: one is.
    """
    import torch
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                tensor = tensors.get_tensor(name)
                if tensor.is_floating_point() and tensor.itemsize > 1 and not torch.isfinite(tensor).all():
                    raise UserError(f"{file}: {name} has values that are not finite; fetch or write the model again")


def seal(folder: Path, name: str, **made_from: object) -> str:
    """Writes the manifest of a policy that will be `policies/<name>`, and returns its digest.

    Args:
        folder: holds the policy.
        name: name of the policy, such as 00001.
        made_from: facts about the run, for `lineage`.
    """
    return _digest(write_manifest(folder, policy=name, **made_from).digests)


def verify(folder: Path, chosen: Callable[[str], object] = bool) -> Manifest | None:
    """Checks the files of a policy that a stage wrote against its manifest. Does nothing for a model of the user.

    Args:
        folder: `policies/<name>` for a policy that a stage wrote.
        chosen: returns True for files to check; by default all.

    Raises:
        UserError: a file is missing, added or changed, or it is the policy of another round.
    """
    if folder.parent.name != FOLDER or not folder.name.isdigit():
        return None
    return verify_manifest(folder, chosen, policy=folder.name)


def verify_text(folder: Path) -> None:
    """Does the same as `verify`, but only for the tokenizer, if any; for stages that do not read weights."""
    if folder.is_dir():
        verify(folder, lambda name: not name.endswith(".safetensors"))


def digest(folder: Path) -> str:
    """Digest of a policy's weights and configuration; tables have it as `policy` in their footers.

    Raises:
        UserError: `verify` fails, or it is not the policy that its round trained.
    """
    manifest = verify(folder)
    if manifest:
        digest_of_policy = _digest(manifest.digests)
        lineage.check_policy(folder, digest_of_policy)
        return digest_of_policy
    return _digest({file.name: digest_of(file) for end in DECIDING for file in folder.glob(f"*{end}")})


def _digest(digests: Mapping[str, str]) -> str:
    names = sorted(name for name in digests if name.endswith(DECIDING) and "/" not in name)
    return hashlib.sha256("".join(f"{name} {digests[name]}\n" for name in names).encode()).hexdigest()


def vocabulary(folder: Path) -> int:
    """Number of tokens that the model of a policy embeds.

    Raises:
        UserError: its config.json does not give it.
    """
    file = base_of(folder) / "config.json"
    hf_config = read_json(file)
    size = text_config(hf_config).get("vocab_size") if isinstance(hf_config, dict) else None
    if not isinstance(size, int):
        raise UserError(f"{file}: has no vocab_size; fetch or write the model again")
    return size


def base_of(folder: Path) -> Path:
    """The folder with the full model: the base of an adapter, else the policy itself."""
    return Path(read_json(folder / ADAPTER)["base_model_name_or_path"]) if is_adapter(folder) else folder


def load_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a policy.

    A tokenizer without PAD gets EOS as PAD, as in TRL. Nothing is padded here, so EOS stays in the loss and still ends
    a completion.

    Raises:
        UserError: the folder has no tokenizer, or the tokenizer has no EOS token.
    """
    import_shims.prepare_transformers()
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            base_of(folder), trust_remote_code=trust_remote_code
        )
    except Exception as error:  # tokenizers checks few values of its files
        raise_disk_full(error)
        raise UserError(f"{folder}: no tokenizer can be loaded ({one_line(error)})") from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{folder}: the tokenizer has no EOS token, so no completion could "
            "end; set eos_token in tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def has_pad(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if a tokenizer came with a PAD token of its own, rather than EOS from `load_tokenizer`."""
    return tokenizer.pad_token_id != tokenizer.eos_token_id or tokenizer.init_kwargs.get("pad_token") is not None


def stop_ids(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids that end a completion: the tokenizer's EOS and the EOS ids of generation_config.json.

    Raises:
        UserError: generation_config.json is not an object, or eos_token_id is not a token id.
    """
    path = base_of(folder) / GENERATION
    content = read_json(path) if path.exists() else {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds {content!r:.40}, not an object with keys; fetch or write the model again")
    configured = content.get("eos_token_id")
    ids = configured if isinstance(configured, list) else [] if configured is None else [configured]
    for token in ids:
        if type(token) is not int or token < 0:
            raise UserError(f"{path}: eos_token_id has {token!r:.40}, which is not a token id; correct it")
    eos = tokenizer.eos_token_id
    return sorted({*ids, *([eos] if isinstance(eos, int) else [])})


def shown_ids(tokenizer: PreTrainedTokenizerBase, ends: Collection[int], ids: Sequence[int]) -> list[int]:
    """The ids that rewards see as text: all but end tokens, BOS, PAD, UNK, CLS, SEP and MASK.

    Other special tokens, such as `<think>` or `<|channel|>`, are part of what a model says.

    Args:
        tokenizer: the model's tokenizer.
        ends: tokens that end a completion.
        ids: token ids of a text.
    """
    hidden = {*ends, *_named_ids(tokenizer)}
    return [id_ for id_ in ids if id_ not in hidden]


@lru_cache(maxsize=8)
def _named_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    names = ("bos", "eos", "pad", "unk", "cls", "sep", "mask")
    ids = (getattr(tokenizer, f"{name}_token_id", None) for name in names)
    return frozenset(id_ for id_ in ids if isinstance(id_, int))


@lru_cache(maxsize=8)
def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """All special tokens of a tokenizer, including added ones."""
    added = getattr(tokenizer, "added_tokens_decoder", None)
    found = [id_ for id_, token in added.items() if token.special] if isinstance(added, Mapping) else []
    return frozenset({*tokenizer.all_special_ids, *found})  # mistral-common has no `added_tokens_decoder`
