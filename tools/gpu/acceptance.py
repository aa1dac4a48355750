"""`make gpu`: runs the rows of rows.yaml on this machine, one after the other, and writes results/gpu/.

    acceptance.py [--only ROW ...] [--minutes N] [--together N] [--rehearse] [--list]

Each row is a process of its own with a time limit; a failure does not stop the others. The record is
results/gpu/gpu.json, the page results/gpu/gpu.md, and a row's log results/gpu/ROW/log. A row that has passed with these
sources on these cards is not run again; those that failed come last. --together N runs N rows at once, except those
that need the machine to themselves, which come last. --rehearse runs every row with tiny sizes on CPUs and writes
results/gpu-rehearsal/.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(ROOT / part) for part in ("", "tools/gpu", "tools", "tools/bench", "tests", "tests/stages", "tests/families")
]

import gpus_page  # noqa: E402
import machine  # noqa: E402
import psutil  # noqa: E402
import soak  # noqa: E402
from rows import ROWS, NotHereError, Row, RowError  # noqa: E402

MARK = "RLOO_GPU_ROW"
"""Environment variable of all processes of a row."""
IMPORTED = (
    *("snakemake.cli", "snakemake.report.html_reporter", "snakemake.storage", "smart_open", "yte", "pyarrow.parquet"),
    *("rloo_pipeline.snakemake_ext.planning", "rloo_pipeline.before_run.inputs", "rloo_pipeline.snakemake_ext.logger"),
)
"""Modules that are imported before a rehearsal forks its rows."""
END = 15.0
"""Seconds that a row's processes may outlive it."""
TIME_UP = "the time was up"
"""Why a row did not run, or not to its end, with --minutes."""
REHEARSED_MINUTES = 15.0
"""Time limit of a row in the rehearsal, for a busy machine."""
SOURCES = (
    "rloo_pipeline/**/*.py",
    "workflow/**/*.smk",
    "workflow/Snakefile",
    "tools/gpu/*.py",
    "tools/gpu/*.yaml",
    "requirements/cuda.txt",
)
Record = dict[str, Any]


def main() -> None:
    """Runs the rows; exits with 1 if one of them fails."""
    arguments = _parse_arguments()
    if arguments.list:
        for row in ROWS:
            print(f"{row.name:22} {row.shows}")
        return
    place = ROOT / "results" / ("gpu-rehearsal" if arguments.rehearse else "gpu")
    record = _record(place, arguments.rehearse)
    todo, end = _todo(record, arguments.only), time.monotonic() + 60 * (arguments.minutes or float("inf"))
    place.mkdir(parents=True, exist_ok=True)

    def in_time(row: Row) -> Record:
        if (left := (end - time.monotonic()) / 60) <= 0:
            return {"outcome": "not run", "why": TIME_UP}
        print(f"{row.name}: {row.shows}", flush=True)
        return run(row, place / row.name, arguments.rehearse, left)

    def note(row: Row, outcome: Record) -> None:
        print(f"{row.name}: {gpus_page.outcome_text(outcome)}", flush=True)
        if outcome.get("why") == TIME_UP and row.name in record["rows"]:
            return  # an earlier outcome says more
        record["rows"][row.name] = outcome | {"source": record["source"]}
        (place / "gpu.json").write_text(json.dumps(record, indent=1) + "\n")
        (place / "gpu.md").write_text(gpus_page.section(record))

    together = arguments.together or (2 if arguments.rehearse else 1)
    shared = [row for row in todo if together > 1 and (arguments.rehearse or not row.alone)]
    with ThreadPoolExecutor(together) as pool:
        rows = {pool.submit(in_time, row): row for row in shared}
        for done in as_completed(rows):
            note(rows[done], done.result())
    for row in todo:
        if row not in shared:
            note(row, in_time(row))
    counts = gpus_page.counts(record)
    print(f"{counts}; {place.relative_to(ROOT)}/gpu.md, gpu.json, and a log of each row")
    raise SystemExit(any(outcome["outcome"] == "failed" for outcome in record["rows"].values()))


def _record(place: Path, rehearse: bool) -> Record:
    """The record so far, if it is of these cards, else a new one."""
    record: Record = {"commit": _commit(), "source": _digest(), "machine": machine.facts(), "rows": {}}
    file = place / "gpu.json"
    if file.exists() and not rehearse:
        earlier = json.loads(file.read_text())
        if earlier["machine"]["cards"] == record["machine"]["cards"]:
            record["rows"] = earlier["rows"]
    return record


def _todo(record: Record, only: Sequence[str]) -> list[Row]:
    """The rows to run: those named, or all that have not passed with these sources; those that failed come last."""
    if only:
        return [row for row in ROWS if row.name in only]

    def outcome(row: Row) -> str | None:
        earlier = record["rows"].get(row.name, {})
        return earlier.get("outcome") if earlier.get("source") == record["source"] else None

    return sorted((row for row in ROWS if outcome(row) != "passed"), key=lambda row: outcome(row) == "failed")


def run(row: Row, folder: Path, rehearse: bool, until_end: float = float("inf")) -> Record:
    """Runs a row in a process of its own: a new one, or in a rehearsal, which has no GPU, a fork.

    Args:
        row: the row.
        folder: folder for its files.
        rehearse: run it with tiny sizes, on CPUs.
        until_end: minutes until all rows must have ended.

    Returns:
        `outcome` (passed, failed, not run), `why` unless it passed, `seconds` and `figures`.
    """
    reasons = [row.rehearse] if rehearse else map(machine.missing, row.needs)
    if (reason := next((reason for reason in reasons if isinstance(reason, str)), None)) is not None:
        return {"outcome": "not run", "why": reason}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    options = {**row.options, **(row.rehearse if rehearse and isinstance(row.rehearse, Mapping) else {})}
    minutes, began = REHEARSED_MINUTES if rehearse else row.minutes, time.monotonic()
    context: Any = multiprocessing.get_context("forkserver" if rehearse else "spawn")
    context.set_forkserver_preload(list(IMPORTED))
    process = context.Process(target=_be_row, args=(row.function, options, folder, environment(folder, rehearse)))
    process.start()
    code: int | None = None
    try:
        process.join(60 * min(minutes, until_end))
        code = process.exitcode
    finally:
        process.kill()
        seconds = time.monotonic() - began
        left = _end(folder, 0 if code is None else END)
    outcome = _outcome(folder, code, minutes)
    if code is None and until_end < minutes:
        outcome = {"outcome": "not run", "why": TIME_UP}
    if left and outcome["outcome"] == "passed":
        outcome = {"outcome": "failed", "why": f"processes went on after it: {'; '.join(left)}"}
    return {**outcome, "seconds": round(seconds, 1)}


def environment(folder: Path, rehearse: bool) -> dict[str, str]:
    """The environment of a row: this one's, the mark, this source tree, and no network.

    SPT_NOENV keeps the title that vLLM's processes give themselves from overwriting the mark. Threads would only slow
    down the tiny models of the rehearsal.
    """
    own = {MARK: str(folder), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "SPT_NOENV": "1"}
    return {**os.environ, **own, **({"OMP_NUM_THREADS": "1"} if rehearse else {})}


def _outcome(folder: Path, code: int | None, minutes: float) -> Record:
    """The outcome that the row's process wrote, or else how it ended."""
    if code is None:
        return {"outcome": "failed", "why": f"took longer than {minutes:g} minutes"}
    if (file := folder / "outcome.json").exists():
        outcome: Record = json.loads(file.read_text())
        return outcome
    by = f"by {signal.Signals(-code).name}" if code < 0 else f"with {code}"
    return {"outcome": "failed", "why": f"its process ended {by}; see {folder / 'log'}"}


def _end(folder: Path, patience: float) -> list[str]:
    """Waits for processes that a row left behind, kills the remaining ones, and returns their names."""
    deadline = time.monotonic() + patience
    while (alive := soak.marked(folder, MARK)) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = []
    for process in alive:
        try:
            left.append(" ".join(process.cmdline())[:100])
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return left


def _be_row(function: str, options: Mapping[str, Any], folder: Path, variables: Mapping[str, str]) -> None:
    """Calls a row's function in this process, and writes the outcome."""
    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    with (folder / "log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", 1, closefd=False)  # line by line, in case the row is killed
    module, _, name = function.partition(":")
    try:
        with contextlib.chdir(ROOT):
            outcome: Record = {"outcome": "passed", "figures": getattr(import_module(module), name)(folder, **options)}
    except NotHereError as reason:
        outcome = {"outcome": "not run", "why": str(reason)}
    except Exception as error:
        traceback.print_exc()
        why = str(error) if isinstance(error, RowError) else f"{type(error).__name__}: {error}"
        outcome = {"outcome": "failed", "why": (why.splitlines() or [""])[0][:400]}
        outcome |= {"figures": error.figures} if isinstance(error, RowError) and error.figures else {}
    (folder / "outcome.json").write_text(json.dumps(outcome))
    atexit._run_exitfuncs()  # multiprocessing ends a process without them, and an engine ends its processes in one


def _commit() -> str:
    """The commit of this clone; empty if there is none."""
    call = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _digest() -> str:
    """A digest of the sources that the rows run."""
    whole = hashlib.sha256()
    for file in sorted(file for pattern in SOURCES for file in ROOT.glob(pattern)):
        whole.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return whole.hexdigest()[:12]


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", action="extend", choices=[row.name for row in ROWS], default=[], metavar="ROW"
    )
    parser.add_argument("--minutes", type=float, help="end the rows after so many minutes")
    parser.add_argument("--together", type=int, metavar="N", help="rows at once; those that need the machine come last")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on CPUs")
    parser.add_argument("--list", action="store_true", help="name the rows")
    return parser.parse_args()


if __name__ == "__main__":
    main()
