"""The pages of keys and the JSON schema match the models of the configuration."""

import runpy

import pytest
import yaml
from helpers import ROOT

from rloo_pipeline.config import Config

TOOL = runpy.run_path(str(ROOT / "tools" / "config_reference.py"))
PAGES = {str(path.relative_to(ROOT)): text for path, text in TOOL["pages"]().items()}


@pytest.mark.parametrize("name", PAGES)
def test_the_file_is_in_step_with_the_models(name) -> None:
    path = ROOT / name
    assert path.exists(), f"{name} is missing: run `make reference`"
    assert path.read_text(encoding="utf-8") == PAGES[name], f"{name} is out of step: run `make reference`"


def test_every_key_is_documented() -> None:
    def undocumented(model, above=""):
        for name, field in model.model_fields.items():
            if not field.description:
                yield above + name
            if inner := TOOL["section_in"](field.annotation):
                yield from undocumented(inner, f"{above}{name}.")

    assert list(undocumented(Config)) == []


def test_a_configuration_of_the_project_sets_each_key_of_the_first_page() -> None:
    files = [yaml.safe_load(file.read_text()) for file in (ROOT / "config").glob("*.yaml")]

    def sets(config: dict, section: str, name: str) -> bool:
        part = config.get(section.removesuffix("[]"), {}) if section else config
        return any(name in one for one in (part if isinstance(part, list) else [part]))

    first = [(section, name) for section, names in TOOL["FIRST"].items() for name in names]
    assert [key for key in first if not any(sets(config, *key) for config in files)] == []
