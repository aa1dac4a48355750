"""A run is told when its image was rebuilt under its name, since nothing runs again for it."""

from typing import Any

import pytest
from helpers import mini

from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.config import Config
from rloo_pipeline.config.run_set import RunSet
from rloo_pipeline.snakemake_ext import rebuilt_image
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall


@pytest.fixture
def warnings(tmp_path, monkeypatch) -> Any:
    """The warnings of a call with an image of this name and content."""

    def told(name: str, content: bytes, *outputs: str, in_image: bool = True) -> list[str]:
        said: list[str] = []
        image = tmp_path / name
        image.write_bytes(content)
        call = object.__new__(SnakemakeCall)
        call.in_image, call.image, call.results = in_image, str(image), tmp_path / "results"
        call.runs = RunSet({"mini": Config(**mini())})
        monkeypatch.setattr(SnakemakeCall, "outputs", lambda _: {str(call.results / "mini" / file) for file in outputs})
        monkeypatch.setattr(rebuilt_image.logger, "warning", said.append)
        rebuilt_image.note(call)
        return said

    return told


def test_a_rebuilt_image_is_noted_in_each_call_until_the_run_begins_again(warnings, tmp_path) -> None:
    assert warnings("a.sif", b"one") == []
    assert warnings("a.sif", b"one", "summary.json") == []
    for _ in range(2):
        (said,) = warnings("a.sif", b"two", "summary.json")
        assert said.startswith(f"{tmp_path}/a.sif was built again or replaced since {tmp_path}/results/mini began")
    assert warnings("a.sif", b"two", "assets") == []
    assert warnings("a.sif", b"two") == []


def test_an_image_of_another_name_is_the_runs_image_from_then_on(warnings, tmp_path) -> None:
    assert warnings("a.sif", b"one") == []
    assert warnings("b.sif", b"two") == []
    assert read_json(tmp_path / "results" / "mini" / rebuilt_image.RECORD)["image"] == f"{tmp_path}/b.sif"
    assert len(warnings("b.sif", b"three")) == 1


def test_without_an_image_nothing_is_recorded(warnings, tmp_path) -> None:
    assert warnings("a.sif", b"one", in_image=False) == []
    assert not (tmp_path / "results").exists()
