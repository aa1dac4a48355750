"""`make screenshots`: docs/assets/report-light.png, report-dark.png, report-phone.png, report-curves.png and run.cast.

The page of a finished run is opened in headless chromium. The recording is of a real project, from `rloo init` to its
report, on a pseudo-terminal: it trains policy 0 of that run on new sums. Its format is asciicast v2, which
docs/assets/player.js plays.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ptyprocess import PtyProcessUnicode

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "docs" / "assets"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZES = {
    "light": (1280, 1280, 1, ""),
    "dark": (1280, 1280, 0, ""),
    "phone": (390, 1280, 1, ""),
    "curves": (1280, 1100, 1, "#training"),
}
"""Width and height in pixels, chromium's number of the colour scheme, and the section of the page."""
COLUMNS, ROWS = 100, 28
LONGEST_PAUSE = 0.1
"""Seconds; a longer pause of a command is cut to that, so that minutes play in half a minute."""
COMMANDS = (
    "ls",
    "rloo init my-project --model model --data sums.jsonl",
    "cd my-project",
    "rloo check",
    "rloo run rounds=3",
    "rloo watch results/my-project --once",
)


def shoot(page: Path, output: Path, width: int, height: int, scheme: int, section: str) -> None:
    """Writes an image of a page from a section on; in a frame, since chromium's window is at least 500 pixels wide."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit("screenshots: no chromium on the PATH; install it, and call `make screenshots` again")
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder) / "frame.html"
        style = f"border:0;display:block;width:{width}px;height:{height}px"
        source = page.resolve().as_uri() + section
        frame.write_text(f'<body style="margin:0"><iframe style="{style}" src="{source}"></iframe>')
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=20000")
        size = f"--window-size={max(width, 500)},{height}"
        image = Path(folder) / "image.png"
        look = (f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={image}", frame.as_uri())
        subprocess.run([browser, *options, size, *look], check=True, capture_output=True)
        _crop(image, output, width)


def _crop(image: Path, output: Path, width: int) -> None:
    from PIL import Image

    with Image.open(image) as whole:
        output.parent.mkdir(parents=True, exist_ok=True)
        whole.crop((0, 0, width, whole.height)).quantize(256, Image.Quantize.MAXCOVERAGE).save(output, optimize=True)


def record(output: Path, model: Path) -> None:
    """Writes a recording of `COMMANDS`, in a folder with a model and a file of sums."""
    from rloo_pipeline.demo.arithmetic import problems

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "home"
        shutil.copytree(model, folder / "model")
        rows = problems(split="train", size=400, seed=1, signs="+")
        (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        events, place = list[tuple[float, str]](), folder
        for command in COMMANDS:
            events += _typed(command)
            if command.startswith("cd "):
                place = place / command.removeprefix("cd ")
            else:
                events += _ran(command, place)
    header = {
        "version": 2,
        "width": COLUMNS,
        "height": ROWS,
        "title": "A project, from rloo init to its report",
    }
    now, lines = 0.0, [json.dumps(header)]
    for pause, text in events:
        now += pause
        lines.append(json.dumps([round(now, 2), "o", text.replace(str(folder), "~")]))
    output.write_text("\n".join(lines) + "\n")


def _typed(command: str) -> Iterator[tuple[float, str]]:
    """The command as it is typed: pauses and characters."""
    yield 1.0, "\x1b[1m$ \x1b[0m"
    yield from ((0.03, character) for character in command)
    yield 0.5, "\r\n"


def _ran(command: str, folder: Path) -> Iterator[tuple[float, str]]:
    """The output of a command on a terminal: pauses and text."""
    own = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": own, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    program, *arguments = command.split()
    found = shutil.which(program, path=own) or sys.exit(f"screenshots: no {program} beside {sys.executable}")
    process = PtyProcessUnicode.spawn([found, *arguments], cwd=folder, env=environment, dimensions=(ROWS, COLUMNS))
    before, shown = time.monotonic(), ""
    with contextlib.suppress(EOFError):  # the command has ended
        while True:
            text, now = process.read(65536), time.monotonic()
            last, shown = shown, re.sub(r"\d+", "0", text)
            if shown == last and text.startswith("\r"):  # the same lines in place of the last, with a later clock
                continue
            yield min(now - before, LONGEST_PAUSE), text
            before = now
    if process.wait():
        sys.exit(f"screenshots: `{command}` failed")


def main() -> None:
    """Writes all of docs/assets that is made from a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=ROOT / "results" / "demo", help="folder of a finished run")
    parser.add_argument("--no-recording", action="store_true", help="only the images")
    arguments = parser.parse_args()
    page = arguments.run / "report.html"
    if not page.exists():
        sys.exit(f"screenshots: {page}: no such page; make it with `make demo`, or name a run: --run results/my-run")
    for name, look in SIZES.items():
        shoot(page, ASSETS / f"report-{name}.png", *look)
    if not arguments.no_recording:
        record(ASSETS / "run.cast", arguments.run / "policies" / "00000")


if __name__ == "__main__":
    main()
