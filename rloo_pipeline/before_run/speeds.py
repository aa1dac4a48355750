"""Speeds that `rloo plan` computes hours with: measured on a card, with the range of what was measured, or from data
sheets. docs/generated/gpus.md has the measurements.
"""

from __future__ import annotations

from typing import NamedTuple

CARD = "H200"
"""The only card on which speeds were measured, alone in its machine."""


class Speed(NamedTuple):
    """A speed, or seconds."""

    typical: float
    slow: float
    fast: float
    source: str


TRAINING = Speed(0.23, 0.131, 0.308, "H200: a round of 1.7 billion weights; steps of 0.5 and of 1.5 billion")
"""Share of the card's dense 16-bit peak that an update reaches."""
DECODING = Speed(0.42, 0.40, 0.56, "H200: rounds of 1.7 billion weights; vLLM's generate alone")
"""Share of the card's memory bandwidth that decoding reaches."""
BETWEEN = Speed(10.7, 15.0, 10.7, "H200: from the end of an update to the begin of the next rollout")
"""Seconds of a round in which engines that stay loaded neither sample nor train."""
STARTS = {
    "rollout": Speed(43.4, 73.4, 43.4, "H200: vLLM with and without its compile cache"),
    "reference": Speed(40.0, 60.0, 30.0, "not measured"),
    "update": Speed(60.0, 90.0, 40.0, "not measured"),
}
"""Seconds that a job of its own takes to start, by stage."""
HOST_LINK = Speed(25e9, 12e9, 25e9, "PCIe 4 with 16 lanes; not measured")
"""Bytes per second between a GPU and the memory of its node."""
HOST_ADAM = Speed(20e9, 5e9, 40e9, "not measured")
"""Bytes per second that AdamW on the CPU reads and writes, for one process."""
DISK = Speed(3e9, 1e9, 6e9, "not measured")
"""Bytes per second of a node's disk."""
WRITING = Speed(0.95e9, 0.8e9, 1e9, "one CPU core: 0.54 GB written by one rank")
"""Bytes of a policy per second that a rank writes and digests, without waits for the disk."""
DIGESTING = Speed(2.2e9, 1.6e9, 2.4e9, "one CPU core: 0.54 GB digested")
"""Bytes of a policy per second that a core digests; a sampler uses `manifest.READERS`."""
LOADING = Speed(2e9, 1e9, 4e9, "not measured")
"""Bytes per second that a rank of vLLM copies to its GPU from files in the node's memory."""
PACES = ("typical", "slow", "fast")


def at(speed: Speed, pace: str) -> float:
    """A speed at one of `PACES`."""
    return float(getattr(speed, pace))
