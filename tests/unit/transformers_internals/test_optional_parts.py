"""The distributions that transformers asks for, to know the versions of other packages."""

from importlib import metadata

import pytest

from rloo_pipeline.transformers_internals.optional_parts import Distributions


def test_distributions_are_those_of_a_mapping_of_all_packages(monkeypatch) -> None:
    names = metadata.packages_distributions()
    for package in ("torch", "accelerate", "mistral_common", "PIL"):
        assert Distributions.get(package, []) == [*dict.fromkeys(names[package])], package
    assert Distributions.get("no_such_package", []) == []
    monkeypatch.setattr(metadata, "distribution", pytest.fail)
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"flash_attn": ["flash-attn", "flash-attn-4"]})
    assert Distributions.get("flash_attn", []) == ["flash-attn", "flash-attn-4"]
