"""The tables of keys that exclude each other name sections, keys and values that exist."""

import pytest
import yaml
from pydantic import TypeAdapter

from rloo_pipeline import config
from rloo_pipeline.config.section import EXCLUDED, UNUSED, section_in
from rloo_pipeline.runtime.installation import csv_rows


@pytest.mark.parametrize(
    "row", [*csv_rows(EXCLUDED), *csv_rows(UNUSED)], ids=lambda row: f"{row['section']}: {row['keys']}"
)
def test_each_name_is_a_key_of_its_section(row) -> None:
    _, *columns, _ = row.values()
    for name in filter(None, ", ".join(columns).split(", ")):
        section = getattr(config, row["section"])
        for key in name.partition(": ")[0].split("."):
            assert key in section.model_fields, name
            annotation = section.model_fields[key].annotation
            section = section_in(annotation)
        if value := name.partition(": ")[2]:
            TypeAdapter(annotation).validate_python(yaml.safe_load(value), strict=True)
