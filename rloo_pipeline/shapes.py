"""Sizes of a model, from its folder's config.json and the headers of its weights; no torch is needed."""

from __future__ import annotations

import io
import json
import struct
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from rloo_pipeline import references
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.files import read_json
from rloo_pipeline.training import model_support

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Shape(NamedTuple):
    """What memory and work depend on."""

    hidden: int
    layers: int
    heads: int
    """Width of all query heads together."""
    key_value: int
    """Width of all key (or value) heads together."""
    intermediate: int
    vocabulary: int
    parameters: int
    """Tied ones once."""
    source: str = ""
    """Where it was read."""

    def cached(self, dtype: str) -> int:
        """Bytes of the KV cache a token."""
        return 2 * self.layers * self.key_value * BYTES[dtype]


def of_model(config: Config) -> Shape:
    """The shape of the model that a configuration names; one that is built is built for a look at it.

    Raises:
        UserError: it is not on this machine, or cannot be trained.
    """
    assets = Path("results") / config.run / "assets" / "model"
    if config.model.build is not None and (assets / "config.json").exists():
        return _trained(config, assets)
    if config.model.build is not None:
        with tempfile.TemporaryDirectory() as folder:
            try:
                with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # what libraries say to themselves
                    references.load(config.model.build)(Path(folder), 0, **config.model.build_options)
            except ImportError as error:
                raise UserError(f"{config.model.build} needs the stages' environment here ({error})") from error
            return _trained(config, Path(folder))._replace(source=config.model.build)
    name = str(config.model.name_or_path)
    return _trained(config, Path(name) if Path(name).is_dir() else _cached(name, config.model.revision, config.run))


def _trained(config: Config, folder: Path) -> Shape:
    """The shape of the model in a folder, once its config.json says that the run can train it."""
    model_support.refuse_run(config, folder)
    return read(folder)


def _cached(name: str, revision: str | None, run: str) -> Path:
    """A model's folder in the Hub's cache; its config.json is enough."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(found, str):
        raise UserError(
            f"{name}: neither a folder nor in the Hub's cache; fetch it first: "
            f"snakemake --cores 1 -- results/{run}/assets"
        )
    return Path(found).parent


def read(folder: Path) -> Shape:
    """The shape of the model in a folder.

    Raises:
        UserError: config.json is missing, or has no sizes of a transformer.
    """
    whole = read_json(folder / "config.json")
    facts: dict[str, Any] = whole.get("text_config") or whole
    try:
        hidden, heads = int(facts["hidden_size"]), int(facts["num_attention_heads"])
        head = int(facts.get("head_dim") or hidden // heads)
        shape = Shape(
            hidden=hidden,
            layers=int(facts["num_hidden_layers"]),
            heads=heads * head,
            key_value=int(facts.get("num_key_value_heads") or heads) * head,
            intermediate=int(facts.get("intermediate_size") or 4 * hidden),
            vocabulary=int(facts["vocab_size"]),
            parameters=0,
            source=str(folder),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / 'config.json'}: no sizes of a transformer in it ({error})") from error
    tied = bool(facts.get("tie_word_embeddings", whole.get("tie_word_embeddings", False)))
    return shape._replace(parameters=_counted(folder) or _by_formula(shape, tied))


def _counted(folder: Path) -> int:
    """Parameters by the headers of all safetensors files; 0 where there are none."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as handle:
            header = json.loads(handle.read(struct.unpack("<Q", handle.read(8))[0]))
        for name, entry in header.items():
            if name != "__metadata__":
                count = 1
                for size in entry["shape"]:
                    count *= size
                total += count
    return total


def _by_formula(shape: Shape, tied: bool) -> int:
    """Parameters of a Llama or Qwen of this shape."""
    attention = 2 * shape.hidden * (shape.heads + shape.key_value)
    layer = attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden
    return shape.layers * layer + shape.vocabulary * shape.hidden * (1 if tied else 2) + shape.hidden
