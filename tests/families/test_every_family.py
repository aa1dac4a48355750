"""Every causal language model of transformers is trained correctly or refused."""

import os

import page
import pytest
import skipped_tests
from cases import PACKED, PADDED
from sweep import KINDS, try_out

from rloo_pipeline.training.model_support import ENCODERS


@pytest.mark.skipif("EVERY_FAMILY" not in os.environ, reason=skipped_tests.EVERY_FAMILY)
@pytest.mark.timeout(7200)
def test_every_causal_language_model_is_right_or_refused(capsys) -> None:
    outcomes = {kind: try_out(kind) for kind in KINDS}
    with capsys.disabled():
        for kind, outcome in outcomes.items():
            print(page.row(kind, outcome))
    assert not [kind for kind, outcome in outcomes.items() if outcome.verdict in {"wrong", "crashed"}]
    assert {kind: page.row(kind, outcome).split(" | ")[1] for kind, outcome in outcomes.items()} == forms()


@pytest.mark.parametrize("kind", ["doge", "gemma4_unified", "mllama", "moshi", "musicgen", "xlnet"])
def test_the_page_agrees_with_the_code_on_some_types(kind) -> None:
    assert page.row(kind, try_out(kind)).split(" | ")[1] == forms()[kind]


def forms() -> dict[str, str]:
    """The form of each type, as docs/generated/families.md says."""
    return {kind: line.split(" | ")[1] for kind, line in page.rows().items()}


def test_the_page_has_no_type_that_is_wrong() -> None:
    assert set(page.rows()) <= set(KINDS)
    assert not {"wrong", "crashed"} & set(forms().values())
    assert {forms().get(kind, "packed") for kind in PACKED} == {"packed"}
    assert {forms().get(kind, "padded") for kind in PADDED} == {"padded"}


def test_the_encoders_are_types_of_transformers() -> None:
    assert set(KINDS) >= ENCODERS
