"""In the place of torchrun (`python rank_processes.py COUNT worker --rank --socket PATH --controller WORKER`): ranks
that do what the first word of a request says.
"""

import os
import signal
import sys
import time
from pathlib import Path

from rloo_pipeline.errors import IncompatibleEngine
from rloo_pipeline.runtime import ranks
from rloo_pipeline.workers import engine_cache, kept_ranks


def run(words: list[str]) -> int:
    """Runs a stage; only rank 1 fails or dies, while the other waits as in a collective operation."""
    line = f"rank {ranks.current().number} of {os.getpid()}: {' '.join(words)}\n"
    os.write(1, line.encode())  # at once, since the ranks share the file
    match words[0], ranks.current().number:
        case "keep", _:
            engine_cache.keep("engine", 1, object())
            engine_cache.write_later(lambda folder: write(folder), Path(words[1]))
        case "other", _:
            raise IncompatibleEngine("another engine")
        case "fail", 1:
            ranks.tell_launcher("my.yaml: a key; drop it")
            return 1
        case "die", 1:
            os.kill(os.getpid(), signal.SIGKILL)
        case "fail" | "die", _:
            time.sleep(600)
    return 0


def write(folder: Path) -> None:
    """Writes this rank's part; without the folder, rank 1 fails."""
    if ranks.current().number == 1 or folder.exists():
        (folder / str(ranks.current().number)).touch()
    else:
        time.sleep(600)


if __name__ == "__main__":
    _, count, _, _, _, path, _, worker = sys.argv
    os.environ |= {"WORLD_SIZE": count, "TORCHELASTIC_RUN_ID": "test"}
    for number in range(int(count)):
        if not os.fork():
            os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
            kept_ranks.serve(run, Path(path), int(worker))
            os._exit(0)
    for _ in range(int(count)):
        os.wait()
