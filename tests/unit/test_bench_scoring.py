"""tools/bench/scoring.py measures what it says, on rows of the form of GSM8K's."""

import json
import sys

from helpers import ROOT


def test_the_benchmark_compares_scoring_with_the_bare_function(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "bench"))
    import scoring

    data = tmp_path / "train.jsonl"
    rows = ({"question": f"{n}+{n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"} for n in range(50))
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ratios = scoring.ratios_to_bare(scoring.completions_of(data, 400), 2)
    assert len(ratios) == 2
    assert min(ratios) > 0
    batch = scoring.completions_of(data, 16)
    assert [a == c for a, c in zip(batch.columns["answer"], batch.completions, strict=True)] == [True, False] * 8
    del sys.modules["scoring"]
