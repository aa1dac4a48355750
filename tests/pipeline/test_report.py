"""A finished run in Snakemake's own report, and in Python."""

import pytest

import rloo_pipeline

pytestmark = pytest.mark.slow


def test_snakemakes_own_report_has_the_page_and_captions(finished, tmp_path) -> None:
    page = tmp_path / "report.html"
    outcome = finished.snakemake("--report", str(page))
    assert outcome.returncode == 0, outcome.stderr
    text = page.read_text(encoding="utf-8")
    for sentence in ("The run in one page", "before any round is paid for", "Held-out accuracy of the policy"):
        assert sentence in text
    assert "results/mini/report.html" in text


def test_a_finished_run_is_not_run_again_from_python(finished, capfd) -> None:
    before = finished.files("rounds/**/*")
    run = rloo_pipeline.run(finished.configure(), cores=1, folder=finished.folder)
    assert "Nothing to be done" in capfd.readouterr().out
    assert run is not None
    assert list(run.metrics().index) == [1, 2]
    assert run.rollouts(2).num_rows == 64
    assert finished.files("rounds/**/*") == before
