"""Replaces the generated parts of pages, each between the comments `<!-- NAME -->` and `<!-- /NAME -->`."""

from __future__ import annotations

from pathlib import Path


def write_part(page: Path, name: str, content: str) -> None:
    """Puts lines between the marks of a page."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    page.write_text(before + begin + content + end + rest.partition(end)[2], encoding="utf-8")
