"""Distances that tests allow: a GPU adds up in another order than a CPU, and two of its kernels in two orders."""

import forks


def within(on_cpus: float, on_gpus: float) -> float:
    """The distance that counts here."""
    return on_gpus if forks.HAS_GPU else on_cpus
