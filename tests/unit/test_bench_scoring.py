"""tools/bench_scoring.py measures what it says, on rows of the form of GSM8K's."""

import json
import sys

from helpers import ROOT


def test_the_benchmark_gives_a_ratio_with_its_range(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import bench_scoring

    data = tmp_path / "train.jsonl"
    rows = ({"question": f"{n}+{n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"} for n in range(50))
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = bench_scoring.score_rows_per_s_vs_bare(data, rows=400, workers=2, repeats=2)
    assert figures.keys() == {"value", "min", "max", "repeats"}
    assert figures["repeats"] == 2
    assert 0 < figures["min"] <= figures["value"] <= figures["max"]
    batch = bench_scoring.completions_of(data, 16)
    assert [a == c for a, c in zip(batch.columns["answer"], batch.completions, strict=True)] == [True, False] * 8
    del sys.modules["bench_scoring"]
