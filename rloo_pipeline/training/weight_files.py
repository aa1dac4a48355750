"""Writes the weights of a full model as safetensors files of half a gigabyte, independent of the number of ranks.

All ranks write in parallel, each a part of the files; on the nodes' own disks, the ranks of each node write all files.
If transformers loaded a checkpoint with other tensor names and shapes than the model's (for example for experts), the
files have those of the checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from rloo_pipeline.artifacts import manifest, node_files
from rloo_pipeline.artifacts.files import rename
from rloo_pipeline.artifacts.model_files import INDEX, WEIGHTS
from rloo_pipeline.errors import UserError, translate_write_errors
from rloo_pipeline.runtime import ranks
from rloo_pipeline.training.deepspeed_internals import split_model
from rloo_pipeline.transformers_internals.loaded_model import as_in_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARD = 500_000_000
"""Bytes per weight file; a rank holds at most two such files while a policy is written."""


def write_together(model: PreTrainedModel, target: Path, place: Path | None = None) -> dict[str, str]:
    """Writes the weights of a model; each rank writes some of the files. Every rank must call it.

    Args:
        model: a transformers model, whole on each rank or split over them.
        target: folder that all ranks see.
        place: folder on each node for the files (`node_files.place`), to which `target` then gets links.

    Returns:
        BLAKE3 digests of all files, by name.

    Raises:
        UserError: the disk is full, or two nodes wrote different files.
    """
    rank, tensors = ranks.current(), split_model.tensors(model)
    number_here, writers = (rank.number, rank.world) if place is None else ranks.on_node()
    if place is not None:
        node_files.make(place, target.parent)
    shards, in_files = _shards(model, tensors)
    files, writing = _names(len(shards)), dict[str, Future[str]]()
    with ThreadPoolExecutor(1) as thread:
        for number, (file, names) in enumerate(zip(files, shards, strict=True)):
            own = number % writers == number_here
            kept = {name: whole for name in names if (whole := split_model.on_cpu(tensors[name], own)) is not None}
            if own:
                wait(writing.values())  # at most one file is written while the next is gathered
                writing[file] = thread.submit(_write, as_in_checkpoint(model, kept), (place or target) / file)
    of_ranks = ranks.gathered({file: each.result() for file, each in writing.items()})
    if rank.first:
        _write_index(target, files, in_files, sum(each.nbytes for part in in_files for each in part.values()))
        if place is not None:
            for file in files:
                (target / file).symlink_to(place / file)
    digests = {file: digest for part in of_ranks for file, digest in part.items()}
    if not all(part.items() <= digests.items() for part in of_ranks):
        raise UserError(f"{target.parent}: two nodes wrote different weights; set exchange: shared and run again")
    return digests


def _shards(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> tuple[list[list[str]], list[dict[str, Tensor]]]:
    """Names of the model's tensors for each file, in order, and the file's tensors without values.

    Everything goes into one file if converting the tensors of one file needs those of another.
    """
    shapes = {
        name: torch.empty(getattr(each, "ds_shape", each.shape), dtype=each.dtype, device="meta")
        for name, each in tensors.items()
    }
    shards = [list(shard) for shard in _by_file(shapes.items())]
    in_files = [as_in_checkpoint(model, {name: shapes[name] for name in names}) for names in shards]
    together = as_in_checkpoint(model, shapes)
    apart = {name: each.shape for part in in_files for name, each in part.items()}
    if apart != {name: each.shape for name, each in together.items()}:
        return [list(shapes)], [together]
    return shards, in_files


def _write(tensors: Mapping[str, Tensor], path: Path) -> str:
    """Writes a file and flushes it to disk, which no other node could do; returns its digest.

    Two nodes may share the folder of `exchange`, and then both write the same file.
    """
    own = path.with_name(f".{path.name}.{ranks.current().number}")
    with translate_write_errors(path.parent):
        save_file({name: each.contiguous() for name, each in tensors.items()}, own, metadata={"format": "pt"})
        with own.open("rb") as file:
            os.fsync(file.fileno())
    digest = manifest.digest(own)
    rename(own, path)
    return digest


def write_shards(tensors: Iterable[tuple[str, Tensor]], target: Path) -> None:
    """Writes tensors to safetensors files of at most `SHARD` bytes (or one tensor) each, with an index if several."""
    shards, total = list[list[str]](), 0
    for shard in _by_file(tensors):
        save_file(shard, target / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
        shard.clear()  # frees its memory before the next one is read
    files = _names(len(shards))
    for number, file in enumerate(files):
        (target / f"{number}.part").rename(target / file)
    _write_index(target, files, shards, total)


def _by_file(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """The tensors of each file: at most `SHARD` bytes, or one tensor."""
    shard, size = dict[str, Tensor](), 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
    yield shard


def _names(count: int) -> list[str]:
    """Names of `count` weight files."""
    stem = WEIGHTS.removesuffix(".safetensors")
    return (
        [f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)] if count > 1 else [WEIGHTS]
    )


def _write_index(target: Path, files: Sequence[str], shards: Sequence[Iterable[str]], total: int) -> None:
    """Writes the index of tensors by file if there are several files; `total` is their size in bytes."""
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
