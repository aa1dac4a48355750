"""Links of the pages lead somewhere, also to headings, and what is generated is what is stored."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from helpers import ROOT

from rloo_pipeline.config import TABLE_COLUMNS


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "config/README.md"])
def test_links_to_files_of_the_project_lead_to_one(name) -> None:
    page = ROOT / name
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def test_links_to_headings_lead_to_one() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    links = [(page, *link) for page in pages for link in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", page.read_text())]
    assert len(links) > 50
    targets = [(page.parent / place if place else page, anchor) for page, place, anchor in links]
    assert not [(str(target), anchor) for target, anchor in targets if anchor not in headings(target)]


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_every_page_is_in_the_table_of_pages(name) -> None:
    text = (ROOT / name).read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert {page for page in pages if f"{page})" not in text} == set()


BENCH = runpy.run_path(str(ROOT / "tools" / "bench" / "page.py"))


def test_the_page_of_figures_has_those_that_are_stored() -> None:
    assert BENCH["PAGE"].read_text() == BENCH["page"](), "run `make reference`"


def test_what_is_measured_on_gpus_is_what_the_records_say() -> None:
    sys.path.insert(0, str(ROOT / "tools" / "gpu"))
    try:
        page = runpy.run_path(str(ROOT / "tools" / "gpu" / "gpus_page.py"))
    finally:
        del sys.path[0], sys.modules["rows"]
    assert page["PAGE"].read_text() == page["page"](), "run `make reference`"
    assert page["README"].read_text() == page["readme"](), "run `make reference`"


def test_the_readme_has_the_same_figures() -> None:
    stored = json.loads(BENCH["STORED"].read_text())
    speed, memory = (stored[f"update_{name}_vs_trl"]["value"] for name in ("tokens_per_s", "peak_memory"))
    assert f"{speed:.1f} times its tokens/s, {memory:.2f} of its peak memory" in (ROOT / "README.md").read_text()


def test_the_reserved_columns_are_listed() -> None:
    page = (ROOT / "docs" / "models_and_data.md").read_text()
    listed = page.partition("<!-- reserved -->")[2].partition("<!-- /reserved -->")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == {*TABLE_COLUMNS} - {"prompt", "completion"}


HTML = {
    "br",
    "code",
    "details",
    "div",
    "figcaption",
    "figure",
    "p",
    "span",
    "sub",
    "summary",
    "sup",
    "table",
    "td",
    "th",
    "tr",
}


def test_no_page_has_a_placeholder_that_a_browser_takes_for_markup() -> None:
    """`results/<run>/` outside of code is shown as results//."""
    found = {}
    for page in (ROOT / "docs").rglob("*.md"):
        text = re.sub(r"```.*?```|`[^`\n]*`|<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
        found[page.name] = [tag for tag in re.findall(r"<([a-z_]+)>", text) if tag not in HTML]
    assert {name: tags for name, tags in found.items() if tags} == {}
