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


def test_the_summary_has_nothing_of_the_clock(finished) -> None:
    """Written again from other logs, summary.json has the same bytes; report.html may differ."""
    summary = finished.folder / "results" / "mini" / "summary.json"
    before = summary.read_bytes()
    log = finished.folder / "results" / "mini" / "logs" / "update" / "00001.log"
    text = log.read_text()
    try:
        log.write_text(text + "2031-01-01 00:00:00,000 INFO rloo.time: took 99999.0 s\n")
        assert finished.snakemake("--cores", "1", "--forcerun", "report").returncode == 0
        assert summary.read_bytes() == before
    finally:
        log.write_text(text)
        assert finished.snakemake("--cores", "1", "--forcerun", "report").returncode == 0
