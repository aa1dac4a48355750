"""The table of keys that exclude each other names sections and keys that exist."""

import pytest

from rloo_pipeline.config import Algorithm, Config, Rollout
from rloo_pipeline.config.section import EXCLUDED, section_in

SECTIONS = {section.__name__: section for section in (Algorithm, Config, Rollout)}


@pytest.mark.parametrize("row", EXCLUDED, ids=lambda row: f"{row['section']}: {row['keys']}")
def test_each_name_is_a_key_of_its_section(row) -> None:
    for name in f"{row['keys']}, {row['others']}".split(", "):
        section = SECTIONS[row["section"]]
        for key in name.partition(": ")[0].split("."):
            assert key in section.model_fields, name
            section = section_in(section.model_fields[key].annotation)
