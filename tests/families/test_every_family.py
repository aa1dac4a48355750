"""None of transformers' causal language models is taken and wrong."""

from collections import Counter

import pytest
from sweep import KINDS, try_out

from rloo_pipeline.training.model_types import REFUSED


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_causal_language_model_is_right_or_refused(capsys) -> None:
    found = {kind: try_out(kind) for kind in KINDS}
    with capsys.disabled():
        for kind, (verdict, why) in found.items():
            print(f"{kind}: {verdict}: {' '.join(why.split())[:150]}")
        print(dict(Counter(outcome.verdict for outcome in found.values())))
    assert not [kind for kind, outcome in found.items() if outcome.verdict in {"wrong", "crashed"}]
    assert sum(outcome.verdict == "right" for outcome in found.values()) > 50


def test_the_types_that_are_refused_by_name_are_those_of_transformers() -> None:
    assert REFUSED.keys() <= set(KINDS)
