"""Kills a small run at random until enough kills are done, goes on after each, and compares the result: `make soak`.

The run is .test/config/config.yaml, or what the arguments after `--` choose: `python tools/soak.py --kills 10 --
--configfile .test/config/config.yaml --config 'rollout={lag: 1}'`. A kill ends a stage, a worker, a rank or the
torchrun of an update with several (`--config 'deepspeed={processes: 2, zero_stage: 3}'`), Snakemake, or Snakemake with
its process group, by SIGTERM, SIGINT or SIGKILL. Each time Snakemake has ended, all processes of the run have to end
and the same command goes on. Each finished run has to have the bytes of an undisturbed one, and nothing may be left in
TMPDIR.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
CONFIGFILE = ("--configfile", str(ROOT / ".test" / "config" / "config.yaml"))
VICTIMS = ("stage", "worker", "rank", "torchrun", "Snakemake", "process group")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
COMPARED = ("prompts/**/*", "warmstart/**/*", "policies/**/*", "rounds/**/*", "trainer/**/*", "evaluation/**/*")
MARK = "RLOO_SOAK"
"""Environment variable of all processes of the soak."""
LONGEST_WAIT = 12.0
"""Upper limit of the seconds before a kill."""
HANG = 300.0
"""Seconds after which a Snakemake that does not end hangs."""
SURVIVAL = 10.0
"""Seconds that processes may go on after their Snakemake."""


@dataclass
class Soak:
    """Counts and problems so far."""

    folder: Path
    random: random.Random
    run: Sequence[str]
    """Snakemake's arguments that choose the run."""
    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    in_update: int = 0
    starts: int = 0
    finished: int = 0
    longest_survival: float = 0.0
    unread: int = 0
    """Empty folders of a Snakemake that was killed before it had read the Snakefile."""
    problems: list[str] = field(default_factory=list)

    def start(self, project: Path) -> subprocess.Popen[bytes]:
        """Starts or continues the run in a folder."""
        self.starts += 1
        command: list[str | Path] = [sys.executable, "-m", "snakemake", "--cores", "2"]
        command += ["--snakefile", ROOT / "workflow" / "Snakefile"]
        command += ["--directory", project, *self.run]
        environment = os.environ | {MARK: str(self.folder), "TMPDIR": str(self.folder / "tmp")}
        environment["PYTHONPATH"] = str(ROOT)
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def finish(self, project: Path, enough: Callable[[], bool]) -> None:
        """Works on one run until it is finished, with kills until there are enough."""
        project.mkdir()
        for _ in range(1000):
            snakemake, kills = self.start(project), self.kills.total()
            while not enough() and snakemake.poll() is None:
                self.kill_once(snakemake)
            try:
                code = snakemake.wait(HANG)
            except subprocess.TimeoutExpired:
                self.problems.append("Snakemake did not end")
                snakemake.kill()
                code = snakemake.wait()
            self.wait_for_processes()
            if code and kills == self.kills.total():
                self.problems.append(f"Snakemake ended with {code} though nothing was killed")
            if code == 0 or self.problems:
                break
        self.finished += 1
        for path in leftovers(project, self.folder / "tmp"):
            if is_unread(path):
                path.rmdir()
                self.unread += 1
            else:
                content = f" with {sorted(one.name for one in path.iterdir())}" if path.is_dir() else ""
                self.problems.append(f"left over: {path}{content}")

    def kill_once(self, snakemake: subprocess.Popen[bytes]) -> None:
        """Waits for a random moment, or for an update, and kills one victim if it runs."""
        wants_update = self.random.random() < 0.5
        deadline = time.monotonic() + (60.0 if wants_update else self.random.uniform(0, LONGEST_WAIT))
        while snakemake.poll() is None and time.monotonic() < deadline:
            if wants_update and stages(snakemake.pid, "update"):
                time.sleep(self.random.uniform(0, 1.0))
                break
            time.sleep(0.05)
        updates, launchers = stages(snakemake.pid, "update"), torchruns(snakemake.pid)
        ranks = [process for launcher in launchers for process, _ in descendants(launcher.pid)]
        processes = {"stage": updates or stages(snakemake.pid), "worker": workers(snakemake.pid, bool(updates))}
        processes |= {"rank": ranks, "torchrun": launchers}
        victim = self.random.choice([name for name in VICTIMS if processes.get(name, True)])
        number = self.random.choice(SIGNALS)
        if snakemake.poll() is not None:
            return
        if victim == "process group":
            os.killpg(snakemake.pid, number)
        elif victim == "Snakemake":
            snakemake.send_signal(number)
        else:
            try:
                self.random.choice(processes[victim]).send_signal(number)
            except psutil.NoSuchProcess:
                return
        self.kills[victim, number.name] += 1
        self.in_update += bool(updates)
        if victim not in processes:
            try:
                snakemake.wait(HANG)
            except subprocess.TimeoutExpired:
                return  # finish() reports it

    def wait_for_processes(self) -> None:
        """Waits until no process of the soak lives."""
        began = time.monotonic()
        while alive := marked(self.folder):
            if time.monotonic() - began > SURVIVAL:
                self.problems += [f"outlives Snakemake: {' '.join(process.cmdline())[:200]}" for process in alive]
                for process in alive:
                    process.kill()
                return
            time.sleep(0.05)
        self.longest_survival = max(self.longest_survival, time.monotonic() - began)

    def table(self) -> str:
        """The kills by victim and signal, in Markdown."""
        names = [number.name for number in SIGNALS]
        lines = [f"| killed | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
        lines += [f"| {victim} | {' | '.join(str(self.kills[victim, name]) for name in names)} |" for victim in VICTIMS]
        return "\n".join(lines)


def descendants(pid: int) -> list[tuple[psutil.Process, list[str]]]:
    """The processes below a process, with their arguments."""
    processes = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                processes.append((process, process.cmdline()))
    return processes


def stages(snakemake: int, name: str | None = None) -> list[psutil.Process]:
    """The processes `rloo STAGE …` of the jobs."""
    return [
        process
        for process, argv in descendants(snakemake)
        if any(word.startswith("--log=") for word in argv) and Path(argv[1]).name == "rloo" and name in (None, argv[2])
    ]


def workers(snakemake: int, trainer: bool) -> list[psutil.Process]:
    """The workers, or only the one that trains."""
    return [
        process
        for process, argv in descendants(snakemake)
        if "worker" in argv and "--rank" not in argv and (not trainer or any("trainer-" in word for word in argv))
    ]


def torchruns(snakemake: int) -> list[psutil.Process]:
    """The processes that start and watch the ranks of a stage or of a worker."""
    return [process for process, argv in descendants(snakemake) if "rloo_pipeline.runtime.ranks" in argv]


def marked(folder: Path, mark: str = MARK) -> list[psutil.Process]:
    """Living processes that have this folder in the environment variable `mark`."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(mark) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return processes


def leftovers(project: Path, temporary: Path) -> list[Path]:
    """Files that a finished run must not leave: temporary files, half-written outputs, Snakemake's locks."""
    hidden = [path for path in (project / "results").rglob(".*") if path.name not in (".snakemake_timestamp", ".fence")]
    tokens = (project / "results").glob("*/.fence/*")
    return [*temporary.iterdir(), *hidden, *tokens, *(project / ".snakemake" / "locks").glob("*")]


def is_unread(path: Path) -> bool:
    """True for the folder of a Snakemake that was killed before it had read the Snakefile."""
    return path.name.startswith("snakemake") and path.is_dir() and not any(path.iterdir())


def digests(project: Path) -> Mapping[str, str]:
    """Digests of the files that have to be equal."""
    [run] = (project / "results").iterdir()
    files = {file for pattern in COMPARED for file in run.glob(pattern) if file.is_file()}
    return {str(file.relative_to(run)): digest(file) for file in files if file.name != ".snakemake_timestamp"}


def digest(file: Path) -> str:
    """A digest of a file; tables of scores are compared without the seconds that scoring took."""
    if file.suffix == ".parquet" and "seconds" in pq.read_schema(file).names:
        sink = pa.BufferOutputStream()
        pq.write_table(pq.read_table(file, partitioning=None).drop_columns("seconds"), sink)
        return hashlib.sha256(sink.getvalue()).hexdigest()
    return hashlib.sha256(file.read_bytes()).hexdigest()


def main() -> None:
    """Prints the table; exits with 1 if there is a problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="least number of kills")
    parser.add_argument("--in-update", type=int, default=20, help="least number of kills while an update ran")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("run", nargs="*", default=CONFIGFILE, help="arguments of Snakemake that choose another run")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        soak = Soak(Path(name), random.Random(arguments.seed), arguments.run)
        (soak.folder / "tmp").mkdir()
        soak.finish(soak.folder / "undisturbed", lambda: True)
        expected = {} if soak.problems else digests(soak.folder / "undisturbed")

        def enough() -> bool:
            return bool(soak.kills.total() >= arguments.kills and soak.in_update >= arguments.in_update)

        while not enough() and not soak.problems:
            project = soak.folder / f"run-{soak.finished}"
            soak.finish(project, enough)
            digests_now = digests(project)
            names = sorted(expected.keys() | digests_now.keys())
            soak.problems += [f"differs: {name}" for name in names if expected.get(name) != digests_now.get(name)]
            print(f"{soak.kills.total()} kills, {soak.finished - 1} runs finished", file=sys.stderr, flush=True)
        print(f"{soak.table()}\n")
        print(f"- {soak.kills.total()} kills, {soak.in_update} of them during an update; {soak.starts} starts")
        print(f"- {soak.finished - 1} runs finished; {len(expected)} files of each compared with an undisturbed run")
        print(f"- processes ended at most {soak.longest_survival:.1f} s after their Snakemake")
        print(f"- {soak.unread} empty folders in TMPDIR of a Snakemake killed before it had read the Snakefile")
        print(f"- {len(soak.problems)} problems; {time.monotonic() - began:.0f} s; seed {arguments.seed}")
        if soak.problems:
            print((soak.folder / "log").read_text()[-3000:], *soak.problems, sep="\n", file=sys.stderr)
            raise SystemExit(1)


if __name__ == "__main__":
    main()
