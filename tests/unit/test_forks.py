"""The process from which commands are forked ends with the tests, however they end."""

import os
import signal
import subprocess
import sys

from helpers import has_ended, wait_until

KILLED = """
import os, signal, time
import forks
server = forks._started()
other = os.fork()  # as a test may: it keeps the pipe to the server open
if not other:
    time.sleep(300)
print(server.pid, other, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_tests_that_are_killed_leave_no_process_behind_that_forks() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, env=environment)
    server, other = map(int, killed.stdout.readline().split())
    try:
        wait_until(lambda: has_ended(server), seconds=60)
    finally:
        os.kill(other, signal.SIGKILL)
        if not has_ended(server):
            os.kill(server, signal.SIGKILL)
    killed.communicate()
