"""Checks of jaxtyping's tensor shapes in tests: a function called with a wrong shape raises."""

from jaxtyping import install_import_hook

TRAINING = ("batch", "kernels", "layout", "logprobs", "objective", "packing", "selection")
CHECKED = ("rloo_pipeline.algorithm", *(f"rloo_pipeline.training.{name}" for name in TRAINING))
"""Packages and modules whose annotations beartype checks at every call."""


def install() -> None:
    """Checks the modules above when they are imported; call this before that."""
    install_import_hook(CHECKED, "beartype.beartype")
