"""report-so-far: makes report.html from the files of a run in flight, and a record of its sources.

It only reads files of the run while the run goes on; no stage waits for it, and an error in it does not end the run.
"""

from pathlib import Path

from rloo_pipeline.artifacts.files import write_json, write_text
from rloo_pipeline.config import Config
from rloo_pipeline.errors import explain
from rloo_pipeline.judging.run_files import is_finished
from rloo_pipeline.report.origin import versions
from rloo_pipeline.report.page import render
from rloo_pipeline.report.summary import so_far
from rloo_pipeline.runtime.progress import warn


def report_so_far(config: Config, run: Path, output: Path) -> None:
    """Writes report.html of the run in folder `run`, unless the final one exists.

    Args:
        config: the section `report`.
        run: folder of the run.
        output: pages/<round>.json, a record that the page was written after this round, with the packages' versions.
    """
    number = int(output.stem)
    write_page(config, run, f"after round {number}")
    write_json(output, {"round": number, "versions": versions()})  # the page may already show later rounds


def write_page(config: Config, run: Path, when: str) -> None:
    """Writes report.html of a run in flight, or of one whose checks failed, unless the final one exists. An error only
    gives a warning, which says `when`.
    """
    try:
        page = render(config, run, so_far(config, run))
    except Exception as error:
        warn(f"no page {when}: {explain(error)}", error)
    else:
        if not is_finished(run, config):
            write_text(run / "report.html", page)
