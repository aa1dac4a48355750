"""report.html: one self-contained page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rloo_pipeline.config import Config


def render(config: Config, run: Path, summary: dict[str, Any]) -> str:
    """The page as HTML."""
    return f"<!doctype html><title>{config.run}</title>"
