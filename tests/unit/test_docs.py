"""Links of the files that people open first lead somewhere; `make docs` sees to those of the pages."""

import re

import pytest
from helpers import ROOT


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "config/README.md"])
def test_links_to_files_of_the_project_lead_to_one(name) -> None:
    page = ROOT / name
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []
