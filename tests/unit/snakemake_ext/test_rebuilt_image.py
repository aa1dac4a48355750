"""A run is told when its image was rebuilt under its name, since nothing runs again for it."""

from typing import Any

import pytest
from helpers import mini

from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.config import Config
from rloo_pipeline.config.run_set import RunSet
from rloo_pipeline.snakemake_ext import rebuilt_image
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall

RUN = RunSet({"mini": Config(**mini())})


@pytest.fixture
def warnings(tmp_path, monkeypatch) -> Any:
    """The warnings of a call with an image of this name and content."""

    def told(name: str, content: bytes, *outputs: str, in_image: bool = True, runs: RunSet = RUN) -> list[str]:
        said: list[str] = []
        image = tmp_path / name
        image.write_bytes(content)
        call = object.__new__(SnakemakeCall)
        call.in_image, call.image, call.results = in_image, str(image), tmp_path / "results"
        call.runs = runs
        made = {str(folder.parent / file) for folder in call.assets() for file in outputs}
        monkeypatch.setattr(SnakemakeCall, "outputs", lambda _: made)
        monkeypatch.setattr(rebuilt_image.logger, "warning", said.append)
        rebuilt_image.note(call)
        return said

    return told


def test_a_rebuilt_image_is_noted_in_each_call_until_the_run_begins_again(warnings, tmp_path) -> None:
    assert warnings("a.sif", b"one") == []
    assert warnings("a.sif", b"one", "summary.json") == []
    for _ in range(2):
        (said,) = warnings("a.sif", b"two", "summary.json")
        assert said.startswith(
            f"{tmp_path}/a.sif was built again or replaced since the first call that recorded it in "
            f"{tmp_path}/results/mini/{rebuilt_image.RECORD}"
        )
    assert warnings("a.sif", b"two", "assets") == []
    assert warnings("a.sif", b"two") == []


def test_an_experiment_is_told_once_until_its_shared_assets_are_made_again(warnings) -> None:
    """Runs of one seed share their assets; those of each seed have their own."""
    homes = {f"study/{arm}/{seed}": {"assets": f"study/shared/assets-{seed}"} for arm in "ab" for seed in "01"}
    configs = dict.fromkeys(homes, RUN.first)
    study = RunSet(configs, homes=homes, shared={home: RUN.first for of in homes.values() for home in of.values()})
    homes |= {home: {"assets": home} for home in study.shared}
    assert warnings("a.sif", b"one", runs=study) == []
    assert len(warnings("a.sif", b"two", "summary.json", runs=study)) == 1
    assert warnings("a.sif", b"two", "assets", runs=study) == []
    assert warnings("a.sif", b"two", runs=study) == []


def test_an_image_of_another_name_is_the_runs_image_from_then_on(warnings, tmp_path) -> None:
    assert warnings("a.sif", b"one") == []
    assert warnings("b.sif", b"two") == []
    assert read_json(tmp_path / "results" / "mini" / rebuilt_image.RECORD)["image"] == f"{tmp_path}/b.sif"
    assert len(warnings("b.sif", b"three")) == 1


def test_without_an_image_nothing_is_recorded(warnings, tmp_path) -> None:
    assert warnings("a.sif", b"one", in_image=False) == []
    assert not (tmp_path / "results").exists()
