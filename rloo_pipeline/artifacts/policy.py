"""Policies on disk: Hugging Face folders with safetensors weights, or PEFT adapters that name their base model.

`training/policy_model.py` loads and saves the model itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline.artifacts import lineage, model_dims, model_files, node_files, vision
from rloo_pipeline.artifacts.files import read_artifact, read_json
from rloo_pipeline.artifacts.manifest import Manifest, verify_manifest, write_manifest
from rloo_pipeline.artifacts.manifest import digest as digest_of
from rloo_pipeline.artifacts.model_dims import LengthLimit, ModelDims
from rloo_pipeline.artifacts.vision import ImageKind, ImageTokens
from rloo_pipeline.errors import UserError, one_line, raise_disk_error
from rloo_pipeline.transformers_internals import optional_parts, tokenizer_file

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

DECIDING = (".safetensors", "config.json")
"""Suffixes of the files that a policy's digest covers."""
IGNORED_KEYS = {"dtype", "torch_dtype", "transformers_version", "_name_or_path"}
"""Keys of a model's configuration that make no difference to an engine, which gets its dtype as an option."""


@dataclass(frozen=True)
class Policy:
    """A policy in a folder. Its files are read when they are first needed, and only once."""

    folder: Path
    trust_remote_code: bool = False
    """Allows code in the folder to run."""

    def __reduce__(self) -> tuple[type[Policy], tuple[Path, bool]]:
        """Pickles only the two fields, not what was read from the folder."""
        return Policy, (self.folder, self.trust_remote_code)

    def __str__(self) -> str:
        """The folder, which names the policy in messages."""
        return str(self.folder)

    @cached_property
    def adapter(self) -> dict[str, Any]:
        """The settings of a PEFT adapter."""
        return _object(self.folder / model_files.ADAPTER)

    @property
    def is_adapter(self) -> bool:
        """True for a PEFT adapter on a base model."""
        return (self.folder / model_files.ADAPTER).exists()

    @cached_property
    def adapter_modules(self) -> list[str]:
        """Names in transformers of the modules that the adapter changes; see `model_files.adapter_modules`."""
        return model_files.adapter_modules(self.folder)

    @cached_property
    def base(self) -> Path:
        """The folder with the full model: the base of an adapter, else the policy itself."""
        return Path(self.adapter["base_model_name_or_path"]) if self.is_adapter else self.folder

    @property
    def config_file(self) -> Path:
        """config.json of the full model."""
        return self.base / "config.json"

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of `config_file`; do not change it.

        Raises:
            UserError: it is not an object, or a key has a value of a wrong type.
        """
        content = _object(self.config_file)
        model_dims.check_types(content, self.config_file)
        return content

    @cached_property
    def self_check(self) -> dict[str, Any] | None:
        """The result of `training/self_check` that a stage wrote beside the full model; None if there is none."""
        file = self.base / model_files.SELF_CHECK
        return _object(file) if file.exists() else None

    @cached_property
    def layers_in_16_bits(self) -> list[str] | None:
        """Patterns of the layers that an NF4 checkpoint had in 16 bits; None if there was no such checkpoint."""
        file = self.base / model_files.NF4
        return _object(file)["in_16_bits"] if file.exists() else None

    @cached_property
    def transformers_config(self) -> Any:
        """The configuration as read by transformers, without a checkpoint's quantization; do not change it.

        Raises:
            UserError: transformers cannot read it.
        """
        optional_parts.prepare_transformers()
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(self.base, trust_remote_code=self.trust_remote_code)
        except Exception as error:  # any exception: transformers checks few values of a configuration
            raise_disk_error(error, self.config_file)
            raise UserError(
                f"{self.config_file}: transformers cannot read this configuration "
                f"({type(error).__name__}: {one_line(error)})"
            ) from error
        vars(config).pop("quantization_config", None)  # a 4-bit checkpoint has it, but policy 0 is in 16 bits
        return config

    @cached_property
    def engine_key(self) -> str:
        """A key that is equal for all policies that one engine can hold in turn.

        It covers `trust_remote_code` and the model's configuration with defaults filled in; for an adapter, its base
        model and its own settings.
        """
        if self.is_adapter:
            in_order = {key: sorted(value) if isinstance(value, list) else value for key, value in self.adapter.items()}
            return json.dumps([self.trust_remote_code, str(self.base.resolve()), in_order], sort_keys=True)
        config = _without_keys(self.transformers_config.to_dict(), IGNORED_KEYS)
        return json.dumps([self.trust_remote_code, config], sort_keys=True, default=str)

    @cached_property
    def dimensions(self) -> ModelDims | None:
        """The dimensions of the full model; None if config.json does not give them."""
        try:
            return model_dims.read(self.base, self.config)
        except UserError:
            return None

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The section of the language model in config.json."""
        return model_dims.text_config(self.config)

    @property
    def has_experts(self) -> bool:
        """True if layers have several experts."""
        return model_dims.experts_key(self.config) is not None

    @property
    def context(self) -> int | None:
        """The context length in tokens that config.json declares; None if it declares none."""
        return model_dims.context(self.config)

    @property
    def length_limit(self) -> LengthLimit | None:
        """The length beyond which the rotary embedding depends on the batch; None without a limit."""
        return model_dims.length_limit(self.config)

    @property
    def is_recurrent(self) -> bool:
        """True if layers have a state (Mamba, DeltaNet, short convolutions)."""
        return model_dims.is_recurrent(self.config)

    @property
    def image_kind(self) -> ImageKind | None:
        """The way the model takes images; None if it takes none."""
        return vision.kind_of(self.config) if vision.takes_images(self.config) else None

    @property
    def image_tokens(self) -> ImageTokens:
        """The image tokens of a model that takes images."""
        return vision.tokens_of(self.config)

    @property
    def placeholder_ids(self) -> list[int]:
        """Ids that stand for a part of an image or video; no model samples them."""
        return vision.placeholder_ids(self.config)

    @cached_property
    def vocabulary(self) -> int:
        """Number of tokens that the model embeds.

        Raises:
            UserError: config.json does not give it.
        """
        size = self.text_config.get("vocab_size")
        if not isinstance(size, int):
            raise UserError(f"{self.config_file}: has no vocab_size; fetch or write the model again")
        return size

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        One without PAD gets EOS as PAD, as in TRL. Nothing is padded here, so EOS stays in the loss and still ends a
        completion.

        Raises:
            UserError: the folder has no tokenizer, or the tokenizer has no EOS token.
        """
        tokenizer_file.prepare_tokenizers()
        from transformers import AutoTokenizer

        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                self.base, trust_remote_code=self.trust_remote_code
            )
        except Exception as error:  # any exception: tokenizers checks few values of its files
            raise_disk_error(error, self.base)
            raise UserError(f"{self}: no tokenizer can be loaded ({one_line(error)})") from error
        if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers makes one up if tokenizer.json is missing
            raise UserError(f"{self}: no tokenizer (no tokenizer.json); copy or fetch the whole model")
        if tokenizer.eos_token_id is None:
            raise UserError(
                f"{self}: the tokenizer has no EOS token, so no completion could "
                "end; set eos_token in tokenizer_config.json"
            )
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    @cached_property
    def processor(self) -> Any:
        """The processor of text and images; raises the same errors as `vision.load_processor`."""
        return vision.load_processor(self.base, self.config, self.trust_remote_code)

    def pixels(self, image: Any) -> dict[str, Tensor]:
        """An image as tensors, by the names that the model's forward has for them."""
        outputs = self.processor.image_processor(images=[image], return_tensors="pt").items()
        return {name: values for name, values in outputs if name != vision.UNREAD}

    @cached_property
    def generation_ends(self) -> tuple[int, ...] | None:
        """The EOS ids of generation_config.json; None without such a file.

        Raises:
            UserError: generation_config.json is not an object, or eos_token_id is not a token id.
        """
        path = self.base / model_files.GENERATION
        if not path.exists():
            return None
        configured = _object(path).get("eos_token_id")
        ids = configured if isinstance(configured, list) else [] if configured is None else [configured]
        for token in ids:
            if type(token) is not int or token < 0:
                raise UserError(f"{path}: eos_token_id has {token!r:.40}, which is not a token id; correct it")
        return tuple(ids)

    @cached_property
    def stop_ids(self) -> list[int]:
        """Token ids that end a completion: the tokenizer's EOS and the EOS ids of generation_config.json.

        Raises:
            UserError: see `tokenizer` and `generation_ends`; or the model has no row for an end token.
        """
        ids = sorted({*(self.generation_ends or ()), self.tokenizer.eos_token_id})
        if ids[-1] >= self.vocabulary:
            raise UserError(
                f"{self.base}: the end token {ids[-1]} has no row in the model's embedding ({self.vocabulary} rows); "
                "correct eos_token_id, or use the tokenizer of the model"
            )
        return ids

    @cached_property
    def hidden_ids(self) -> frozenset[int]:
        """Ids that rewards do not see as text: end tokens, BOS, PAD, UNK, CLS, SEP and MASK.

        Other special tokens, such as `<think>` or `<|channel|>`, are part of what a model says.
        """
        names = ("bos", "eos", "pad", "unk", "cls", "sep", "mask")
        ids = (getattr(self.tokenizer, f"{name}_token_id", None) for name in names)
        return frozenset({*self.stop_ids, *(id_ for id_ in ids if isinstance(id_, int))})

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """All special tokens of the tokenizer, including added ones."""
        return special_ids(self.tokenizer)

    @cached_property
    def manifest(self) -> Manifest | None:
        """The result of `verify` for all files, which are read once."""
        return self.verify()

    @cached_property
    def digest(self) -> str:
        """Digest of weights and configuration; tables have it as `policy` in their footers.

        Raises:
            UserError: `verify` fails, or it is not the policy that its round has trained.
        """
        if self.manifest:
            found = _digest(self.manifest.digests)
            lineage.check_policy(self.folder, found)
            return found
        return _digest({file.name: digest_of(file) for end in DECIDING for file in self.folder.glob(f"*{end}")})

    @cached_property
    def weights(self) -> list[Path]:
        """The weight files of the full model, checked to be complete; those of an adapter are checked too.

        Raises:
            UserError: the model is missing, its weights are not safetensors, or a file is missing or truncated.
        """
        for folder in dict.fromkeys((self.folder, self.base)):
            model_files.check(folder)
        return sorted(self.base.glob("*.safetensors"))

    def verify(self, chosen: Callable[[str], object] = bool) -> Manifest | None:
        """Checks files that a stage wrote against their manifest. Does nothing for the user's own model.

        Args:
            chosen: returns True for files to check; by default all.

        Raises:
            UserError: a file is missing, added or changed, or the policy belongs to a different round.
        """
        if self.folder.parent.name != model_files.POLICIES or not self.folder.name.isdigit():
            return None
        for link in node_files.links(self.folder):
            if not link.exists():
                raise UserError(
                    f"{link}: not on this machine: it is on another node's disk (exchange), or was lost with it; if "
                    "the run has ended, start it again, and it restores the policies that it needs"
                )
        return verify_manifest(self.folder, chosen, policy=self.folder.name)


def _object(file: Path) -> dict[str, Any]:
    """The content of a JSON file of a model."""
    remedy = model_files.remedy(file.parent)
    content = read_json(file, remedy)
    if not isinstance(content, dict):
        raise UserError(f"{file}: holds {content!r:.40}, not an object with keys; {remedy}")
    return content


def _without_keys(config: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """A configuration without some keys, at every level."""
    return {
        key: _without_keys(value, keys) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in keys
    }


def seal(folder: Path, name: str, known: Mapping[str, str] = MappingProxyType({}), /, **made_from: object) -> str:
    """Writes the manifest of a policy that will be `policies/<name>`, and returns its digest.

    Args:
        folder: folder with the policy's files.
        name: name of the policy, such as 00001.
        known: digests of files that were computed when they were written, by name.
        made_from: facts about the run, for `lineage`.
    """
    return _digest(write_manifest(folder, known, policy=name, **made_from).digests)


def measured_reward_model(measured: Path) -> Path:
    """The folder of a run's own reward model, beside the `measured` checks.json.

    Raises:
        UserError: a file of the model is missing or damaged, or checks.json is about a different model.
    """
    folder = measured.parent / "model"
    read_artifact(measured, policy=_digest(verify_manifest(folder).digests))
    return folder


class Chosen(NamedTuple):
    """A policy that `select` chose."""

    run: Path
    """Folder of its run."""
    policy: Path
    digest: str


def chosen_of(selection: Path, seed: int) -> Chosen:
    """The policy that was chosen for a seed.

    Raises:
        UserError: the file is missing or damaged, or no policy was chosen for this seed.
    """
    for best in read_artifact(selection)["chosen"]:
        if best["seed"] == seed:
            run = selection.parent / best["run"]
            return Chosen(run, model_files.policy_folder(run, best["round"]), best["policy"])
    raise UserError(f"{selection}: no policy was chosen for seed {seed}; delete it and run again")


def _digest(digests: Mapping[str, str]) -> str:
    names = sorted(name for name in digests if name.endswith(DECIDING) and "/" not in name)
    return hashlib.sha256("".join(f"{name} {digests[name]}\n" for name in names).encode()).hexdigest()


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """All special tokens of a tokenizer, including added ones."""
    added = getattr(tokenizer, "added_tokens_decoder", None)
    found = [id_ for id_, token in added.items() if token.special] if isinstance(added, Mapping) else []
    return frozenset({*tokenizer.all_special_ids, *found})  # mistral-common has no `added_tokens_decoder`
