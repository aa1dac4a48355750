"""In the place of srun (`python srun_ranks.py --ntasks=COUNT ... rloo worker --rank`): ranks on this machine, which do
what the first word of a request says (`rank_processes.run`). Their input and output is srun's, line by line.
"""

import os
import selectors
import subprocess
import sys

import rank_processes

from rloo_pipeline.cluster import node_ranks


def start(count: int) -> list[subprocess.Popen[bytes]]:
    """The ranks."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    variables = [{"RANK": str(number), "WORLD_SIZE": str(count), "LOCAL_RANK": str(number)} for number in range(count)]
    return [subprocess.Popen([sys.executable, __file__, "rank"], env=os.environ | own, **pipes) for own in variables]


def pass_on(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Passes lines on until a rank has ended; with --kill-on-bad-exit this ends the others."""
    selector = selectors.DefaultSelector()
    for rank in [None, *ranks]:
        selector.register(rank.stdout if rank else sys.stdin.buffer.raw, selectors.EVENT_READ, rank)
    while True:
        for key, _ in selector.select():
            line = key.fileobj.readline()
            if not line and key.data:
                return
            if key.data:
                os.write(1, line)
                continue
            for rank in ranks:
                rank.stdin.write(line) if line else rank.stdin.close()
            if not line:
                selector.unregister(key.fileobj)


if sys.argv[1:] == ["rank"]:
    node_ranks.serve(rank_processes.run)
elif __name__ == "__main__":
    (number,) = (int(word.partition("=")[2]) for word in sys.argv if word.startswith("--ntasks="))
    started = start(number)
    pass_on(started)
    for process in started:
        process.kill()
        process.wait()
