"""Replaces the generated parts of pages, each between the comments `<!-- NAME -->` and `<!-- /NAME -->`."""

from __future__ import annotations

from pathlib import Path


def around(page: Path, name: str) -> tuple[str, str, str]:
    """The text of a page up to a part, the part, and the text after it; the marks are outside of the part."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    part, _, after = rest.partition(end)
    return before + begin, part, end + after


def write_part(page: Path, name: str, content: str) -> None:
    """Puts lines between the marks of a page."""
    before, _, after = around(page, name)
    page.write_text(before + content + after, encoding="utf-8")
