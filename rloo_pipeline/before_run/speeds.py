"""Speeds from which `rloo plan` computes hours: measured on a card, with their range, or taken from data sheets.
docs/generated/gpus.md has the measurements.
"""

from typing import NamedTuple

CARD = "H200"
"""The only card on which speeds were measured. It was alone in its machine."""


class Speed(NamedTuple):
    """A speed or duration, with its range and source."""

    typical: float
    slow: float
    fast: float
    source: str


TRAINING = Speed(0.23, 0.131, 0.308, "H200: a round of 1.7 billion weights; steps of 0.5 and of 1.5 billion")
"""Share of the card's dense 16-bit peak that an update reaches."""
DECODING = Speed(0.42, 0.40, 0.56, "H200: rounds of 1.7 billion weights; vLLM's generate alone")
"""Share of the card's memory bandwidth that decoding reaches."""
BETWEEN = Speed(10.7, 15.0, 10.7, "H200: from the end of an update to the start of the next rollout")
"""Seconds per round in which warm engines neither sample nor train."""
STARTS = {
    "rollout": Speed(43.4, 73.4, 43.4, "H200: vLLM with and without its compile cache"),
    "reference": Speed(40.0, 60.0, 30.0, "not measured"),
    "update": Speed(60.0, 90.0, 40.0, "not measured"),
}
"""Seconds that a separate job takes to start, by stage."""
HOST_LINK = Speed(25e9, 12e9, 25e9, "PCIe 4 with 16 lanes; not measured")
"""Bytes per second between a GPU and host memory."""
HOST_ADAM = Speed(20e9, 5e9, 40e9, "not measured")
"""Bytes per second that AdamW on the CPU reads and writes, per process."""
DISK = Speed(3e9, 1e9, 6e9, "not measured")
"""Bytes per second of a node's disk."""
WRITING = Speed(0.95e9, 0.8e9, 1e9, "one CPU core: 0.54 GB written by one rank")
"""Bytes of a policy that a rank writes and digests per second, not counting waits for the disk."""
DIGESTING = Speed(2.2e9, 1.6e9, 2.4e9, "one CPU core: 0.54 GB digested")
"""Bytes of a policy that one core digests per second. A sampler uses `manifest.READERS` cores."""
LOADING = Speed(2e9, 1e9, 4e9, "not measured")
"""Bytes per second that a vLLM rank copies to its GPU from files in host memory."""
PACES = ("typical", "slow", "fast")


def at(speed: Speed, pace: str) -> float:
    """A speed at one of `PACES`."""
    return float(getattr(speed, pace))
