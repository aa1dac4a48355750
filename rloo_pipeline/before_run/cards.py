"""Specifications of GPUs, from the vendors' data sheets."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import devices
from rloo_pipeline.runtime.installation import csv_rows

if TYPE_CHECKING:
    from rloo_pipeline.config import Dtype


class Card(NamedTuple):
    """A GPU model."""

    name: str
    gigabytes: float
    teraflops: float
    """Dense bfloat16 from the vendor's data sheet; float16 for cards without bfloat16."""
    bandwidth: float
    """Memory bandwidth in TB/s."""

    @property
    def room(self) -> float:
        """Bytes that a process which trains or computes log-probs may use of it; warm workers hold the rest."""
        return devices.left_for_training(self.gigabytes * 1e9)


CARDS = {
    name: Card(name, *map(float, numbers)) for name, *numbers in map(dict.values, csv_rows("before_run/cards.csv"))
}
WITHOUT_BFLOAT16 = ("t4",)
"""Cards on which vLLM refuses bfloat16. Older ones, such as the V100, do not run CUDA 13."""


def card_of(argument: str, dtype: Dtype = "float32") -> Card:
    """Parses a card such as `h100` or `h100:80`, with its memory in GB.

    Raises:
        UserError: the card is unknown or lacks the run's number format, or its memory is not a number above 0.
    """
    name, _, size = argument.lower().partition(":")
    if name not in CARDS:
        raise UserError(f"--gpu {argument}: unknown card; name one of {', '.join(CARDS)}, such as h100:80 (GB)")
    if dtype == "bfloat16" and name in WITHOUT_BFLOAT16:
        raise UserError(f"--gpu {argument}: vLLM has no bfloat16 on this card; set model.dtype to float16 or float32")
    if not size:
        return CARDS[name]
    if not re.fullmatch(r"\d+(\.\d+)?", size) or not float(size):
        raise UserError(f"--gpu {argument}: '{size}' is not a number of GB; write it as h100:80")
    return CARDS[name]._replace(gigabytes=float(size))


def card_here(argument: str, dtype: Dtype = "float32") -> Card:
    """As `card_of`; but if no memory is named and this machine has such a card, with the memory that its driver shows,
    which decides what `auto` is in a run.
    """
    card = card_of(argument, dtype)
    whole = ":" not in argument and not any(name.startswith(devices.SLICE) for name in devices.visible_gpus())
    for line in devices.gpu_facts("name,memory.total") if whole else ():
        name, _, mebibytes = line.rpartition(", ")
        if mebibytes.isdigit() and re.search(rf"\b{card.name}\b", name.lower().replace("rtx ", "rtx")):
            return card._replace(gigabytes=round(int(mebibytes) * 2**20 / 1e9, 1))
    return card
