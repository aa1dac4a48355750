"""The distributions that transformers asks for, to know the versions of other packages."""

from importlib import metadata

import pytest

from rloo_pipeline.runtime.import_shims import replaced
from rloo_pipeline.transformers_internals import optional_parts
from rloo_pipeline.transformers_internals.optional_parts import Distributions


def test_distributions_are_those_of_a_mapping_of_all_packages(monkeypatch) -> None:
    names = metadata.packages_distributions()
    with replaced(metadata, "packages_distributions", Distributions):
        for package in ("torch", "accelerate", "mistral_common", "PIL"):
            assert metadata.packages_distributions().get(package, []) == [*dict.fromkeys(names[package])], package
        assert metadata.packages_distributions().get("no_such_package", []) == []
    assert metadata.packages_distributions() == names
    monkeypatch.setattr(metadata, "distribution", pytest.fail)
    both = ["flash-attn", "flash-attn-4"]
    monkeypatch.setattr(optional_parts, "packages_distributions", lambda: {"flash_attn": both})
    assert Distributions.get("flash_attn", []) == both
