"""Programs of completions are run against tests: right ones pass, wrong ones and cheats do not, and none gets out."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards import sandbox
from rloo_pipeline.rewards.code import code_reward, program_of
from rloo_pipeline.rewards.code_tests import UnusableError, read_tests
from rloo_pipeline.rewards.sandboxed import script
from rloo_pipeline.rewards.sandboxed.limits import READY

IMAGE = os.environ.get("RLOO_TEST_IMAGE", "")  # with no bwrap on PATH, the same tests go through Apptainer
LIMITS = sandbox.Limits(20, 512, 8, 8)


@pytest.fixture(scope="module")
def found():
    """The sandbox of this machine. In .ci/run a machine without one is a failure."""
    try:
        return sandbox.find(image=IMAGE)
    except UserError as error:
        if os.environ.get("RLOO_REQUIRE_SANDBOX"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture
def says(found):
    """Runs a program in the sandbox and gives what it printed."""

    def run(program, limits=LIMITS):
        pipe = subprocess.PIPE
        with sandbox.confined(script, found, limits, stdin=pipe, stdout=pipe) as process:
            said, _ = process.communicate(b"%d\n" % len(program.encode()) + program.encode(), timeout=limits.seconds)
        assert said.startswith(READY)
        return said[len(READY) :].decode()

    return run


@pytest.fixture
def walls(found):
    """Runs a program behind the sandbox's walls alone: without the limits and the filter that it takes on inside."""

    def run(program):
        command = [*sandbox.words(found, LIMITS), "-s", "-S", "-c", program]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=False, env=sandbox.ENVIRONMENT
        ).stdout

    return run


@pytest.fixture
def reward(found):
    """The reward of one program."""

    def run(program, tests, **options):
        columns = {"entry_point": [options.pop("entry_point", None)]}
        [score] = code_reward([program], tests=[tests], image=IMAGE, **columns, **options)
        return score

    return run


def alive(marker: str) -> list[str]:
    """Processes of this machine with the marker in their command line."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if marker in line and int(file.parent.name) != os.getpid():
            lines.append(line)
    return lines


ADD = "def add(a, b):\n    return a + b\n"


# What is right and what is wrong.


@pytest.mark.parametrize(
    ("program", "tests", "expected"),
    [
        (ADD, "assert add(1, 2) == 3", 1),
        (ADD, "assert add(1, 2) == 4", 0),
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"], 0),
        (ADD, "import math\nx = 1\nassert math.isclose(add(x, 0.5), 1.5)", 1),
        (ADD, [{"input": "", "output": ""}], 1),
        ("a, b = map(int, input().split())\nprint(a + b)", [{"input": "3 4\n", "output": "7"}], 1),
        ("a, b = map(int, input().split())\nprint(a + b)", [{"input": "3 4\n", "output": "8"}], 0),
        ("print('1  \\n2\\n')", [{"input": "", "output": "1\n2"}], 1),
        ("print(7)\nraise SystemExit(1)", [{"input": "", "output": "7"}], 0),
        ("import numpy_that_is_not_there\n" + ADD, "assert add(1, 2) == 3", 0),
        ("def add(a, b) return", "assert add(1, 2) == 3", 0),
        ("", "assert add(1, 2) == 3", 0),
        (ADD, None, None),
        (ADD, [], None),
    ],
)
def test_a_program_gets_1_where_all_tests_of_its_row_pass(reward, program, tests, expected):
    assert reward(program, tests) == expected


def test_a_share_is_given_where_the_option_says_so(reward):
    tests = ["assert add(1, 2) == 3", "assert add(1, 2) == 4", "assert add(0, 0) == 0", "assert add() == 1"]
    assert reward(ADD, tests, partial=True) == 0.5
    assert reward(ADD, "\n".join(tests), partial=True) == 0.5
    cases = [{"input": f"{n}\n", "output": str(n % 3)} for n in range(4)]
    assert reward("print(input())", cases, partial=True) == 0.75


def test_a_test_that_follows_a_program_which_stopped_counts_as_failed(reward):
    program = "import os\ndef f(n):\n    if n == 2: os._exit(0)\n    return n"
    assert reward(program, [f"assert f({n}) == {n}" for n in range(4)], partial=True) == 0.5


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def f(): return (1, [2.5, {'a': {3}}], b'x', None, True, 1j, frozenset({1}), {(1, 2): 3})",
         "assert f() == (1, [2.5, {'a': {3}}], b'x', None, True, 1j, frozenset({1}), {(1, 2): 3})\n"
         "assert isinstance(f(), tuple) and f()[4] is True"),
        ("def f(): return 10 ** 5000", "assert f() == 10 ** 5000"),
        ("from decimal import Decimal\nimport datetime\ndef f(): return [Decimal('0.1'), datetime.date(2020, 1, 2)]",
         "from decimal import Decimal\nimport datetime\nassert f() == [Decimal('0.1'), datetime.date(2020, 1, 2)]"),
        ("from collections import Counter, defaultdict\ndef f(): return Counter('aab'), defaultdict(int, x=1)",
         "assert f() == ({'a': 2, 'b': 1}, {'x': 1})"),
        ("def f(x): x.sort(); x.append(9)", "x = [3, 1]\nf(x)\nassert x == [1, 3, 9]"),
        ("def f(n):\n    for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2]"),
        ("def f(g, x): return [g(v) for v in x]", "assert f(lambda v: v * 2, [1, 2]) == [2, 4]"),
        ("def f(k, x): return sorted(x, key=k)", "assert f(len, ['aa', 'b']) == ['b', 'aa']"),
        ("def f(x):\n    if x < 0: raise ValueError('negative')\n    return x",
         "try:\n    f(-1)\n    assert False\nexcept ValueError as e:\n    assert 'negative' in str(e)"),
        ("class Empty(LookupError): pass\ndef f(): raise Empty('x')",
         "try:\n    f()\n    assert False\nexcept Empty:\n    pass\ntry:\n    f()\nexcept LookupError:\n    pass"),
        ("class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
         "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)",
         "s = Stack()\ns.push(3)\nassert len(s) == 1 and s.items == [3]\nassert s.pop() == 3\nassert not s"),
        ("count = 0\ndef f():\n    global count\n    count += 1", "f(); f()\nassert count == 2"),
        ("print('chatter')\nimport sys\nprint('more', file=sys.stderr)\ndef f():\n    print('noise')\n    return 1",
         "assert f() == 1"),
        ("if __name__ == '__main__':\n    input()\ndef f(): return 1", "assert f() == 1"),
    ],
)  # fmt: skip
def test_what_tests_do_with_functions_works_through_the_pipe(reward, program, tests):
    assert reward(program, tests) == 1


def test_check_is_called_with_the_entry_point(reward):
    check = "METADATA = {}\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n"
    assert reward(ADD, check, entry_point="add") == 1
    assert reward("def add(a, b): return 4", check, entry_point="add") == 0
    assert reward(ADD, check + "check(add)") == 1


def test_rows_are_independent_and_run_several_at_a_time(found):
    programs = [ADD, "def add(a, b): return 0", "while True: pass", ADD]
    tests = ["assert add(1, 2) == 3"] * 3 + [None]
    assert code_reward(programs, tests=tests, image=IMAGE, timeout=3, workers=3) == [1, 0, 0, None]


def test_tests_that_nothing_could_pass_or_fail_are_none_and_said(found, caplog):
    caplog.set_level("INFO")
    tests = ["def check(c):\n    assert c(1) == 1", "assert (", "x = 1", "import no_such_module\nassert add(1, 2) == 3",
             "class T: pass\nassert add(T(), 2)"]  # fmt: skip
    assert code_reward([ADD] * 5, tests=tests, image=IMAGE) == [None] * 5
    assert "5 of 5 completions cannot be run" in caplog.text


def test_the_program_is_the_last_fence_of_python_after_the_thinking():
    assert program_of("x = 1") == "x = 1"
    assert program_of("<think>\n```python\nno\n```\n</think>A:\n```python\na\n```\nor\n```Python\nb\n```\n") == "b\n"
    assert program_of("```\nplain\n```\n```json\n{}\n```\nwords") == "plain\n"
    assert program_of("```python\ncut off") == "cut off"
    assert program_of("<think>\n```python\nnever ends\n```") is None


def test_tests_of_no_known_form_are_an_error_that_names_the_row():
    with pytest.raises(UserError, match="tests of row 7"):
        read_tests([1, 2], None, "row 7")
    with pytest.raises(UserError, match="tests_column"):
        code_reward(["x"], tests_column="tets", tests=["assert x"])
    with pytest.raises(UnusableError):
        read_tests("print(add(1, 2))", None, "row 0")


# Where there is no sandbox.


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    sandbox.find.cache_clear()
    yield
    sandbox.find.cache_clear()


def test_without_a_sandbox_nothing_runs_unless_the_option_says_so(nothing_installed):
    with pytest.raises(UserError, match=r"bubblewrap is not installed.*allow_unconfined: true"):
        code_reward([ADD], tests=["assert add(1, 2) == 3"])
    assert code_reward([ADD] * 2, tests=["assert add(1, 2) == 3", "assert add(1, 2) == 4"], allow_unconfined=True) == [
        1,
        0,
    ]
    assert code_reward(["while True: pass"], tests=["assert f()"], allow_unconfined=True, timeout=1) == [0]
    hog = "def f():\n    try: return len(bytearray(1 << 30))\n    except MemoryError: return 'limited'"
    assert code_reward([hog], tests=["assert f() == 'limited'"], allow_unconfined=True) == [1]


# Getting out of the sandbox.


@pytest.mark.parametrize("run", ["says", "walls"])
def test_there_is_no_network(request, run):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        said = request.getfixturevalue(run)(
            f"""
import socket
def attempt(do):
    try:
        do()
        print("connected")
    except OSError as error:
        print("refused")
attempt(lambda: socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), 2))
attempt(lambda: socket.create_connection(("1.1.1.1", 53), 2))
attempt(lambda: socket.getaddrinfo("example.com", 80))
"""
        )
        assert said.split() == ["refused"] * 3
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize("run", ["says", "walls"])
def test_home_and_other_files_cannot_be_read(request, run, tmp_path):
    secrets = [Path.home() / f".rloo-test-{os.getpid()}", tmp_path / "secret", Path("/etc/passwd")]
    for path in secrets[:2]:
        path.write_text("hush")
    try:
        said = request.getfixturevalue(run)(
            f"""
import os
for path in {[str(path) for path in [*secrets, __file__]]}:
    try:
        print("read", path, "hush" in open(path).read() or path)
    except OSError:
        print("hidden")
for folder, _, files in os.walk("/"):
    if {secrets[0].name!r} in files:
        print("found", folder)
"""
        )
    finally:
        secrets[0].unlink()
    assert [line for line in said.splitlines() if line != "hidden" and not (IMAGE and "/etc/passwd" in line)] == []


@pytest.mark.parametrize("run", ["says", "walls"])
def test_the_environment_of_this_process_is_not_passed(request, run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hush-hush")
    said = request.getfixturevalue(run)(
        """
import glob, os
print(dict(os.environ))
for file in glob.glob("/proc/*/environ"):
    try:
        print(open(file).read())
    except OSError:
        pass
"""
    )
    assert "PATH" in said
    assert "hush-hush" not in said


def test_a_fork_bomb_stops_at_the_limit_and_is_gone_afterwards(says, found):
    limits = LIMITS._replace(memory_mb=511)
    said = says(
        """
import os, time
n = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        n += 1
except OSError:
    print(n)
""",
        limits,
    )
    assert 1 <= int(said) <= LIMITS.processes + sandbox.OWN_PROCESSES[found.kind]
    time.sleep(0.2)
    assert alive(str(511 << 20)) == []


@pytest.mark.parametrize(
    "hog",
    [
        "bytearray(1 << 30)",
        "import mmap; mmap.mmap(-1, 1 << 30)",
        "import os; os.write(os.memfd_create('x'), bytes(1 << 20))",
        "import ctypes; assert ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) >= 0",
    ],
)
def test_memory_is_limited(says, hog):
    assert says(f"try:\n    {hog}\n    print('had')\nexcept Exception:\n    print('refused')") == "refused\n"


@pytest.mark.parametrize("tests", ["assert f() == 1", [{"input": "", "output": "1"}]])
@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(600)",
        "import signal\nfor n in (signal.SIGTERM, signal.SIGINT, signal.SIGXCPU, signal.SIGHUP):\n"
        "    signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
    ],
)
def test_an_endless_program_is_killed_at_its_deadline(reward, program, tests):
    began = time.monotonic()
    assert reward(program, tests, timeout=1) == 0
    assert time.monotonic() - began < 3


def test_a_function_that_never_returns_fails_its_test_and_those_after_it(reward):
    program = "def f(n):\n    while n == 1: pass\n    return n"
    assert reward(program, [f"assert f({n}) == {n}" for n in range(4)], partial=True, timeout=3) == 0.25


def test_a_flood_of_output_ends_a_program_before_its_deadline(reward):
    began = time.monotonic()
    assert reward("while True: print('x' * 100_000)", [{"input": "", "output": "x"}], timeout=60) == 0
    assert time.monotonic() - began < 10


def test_a_program_that_reads_no_input_holds_nobody_up(reward):
    flood = [{"input": "x" * 10_000_000, "output": "1"}]
    assert reward("print(1)", flood) == 1
    assert reward("import time; time.sleep(60)", flood, timeout=1) == 0


@pytest.mark.parametrize("run", ["says", "walls"])
def test_nothing_outside_the_scratch_folder_can_be_written(request, run, tmp_path):
    said = request.getfixturevalue(run)(
        f"""
import os
for folder, _, files in os.walk("/"):
    if folder.startswith(("/proc", "/sys")):
        continue
    try:
        open(os.path.join(folder, "written"), "w").close()
        print(folder)
    except OSError:
        pass
    for name in files[:3]:
        try:
            open(os.path.join(folder, name), "r+b").close()
            print(os.path.join(folder, name))
        except OSError:
            pass
try:
    open({str(tmp_path / "written")!r}, "w")
    print("out")
except OSError:
    pass
"""
    )
    written = {line for line in said.split() if not line.startswith("/dev/")}
    assert "/tmp" in written
    assert all(line == "/tmp" or line.startswith("/tmp/") or IMAGE for line in written)
    assert "/dev/shm" not in said.split() or IMAGE
    assert not list(tmp_path.iterdir())


def test_files_are_limited_one_by_one_and_together(says):
    said = says(
        """
def write(name, size):
    try:
        with open(name, "wb") as file:
            for _ in range(size):
                file.write(bytes(1 << 20))
        print("written")
    except OSError:
        print("refused")
write("small", 1)
write("large", 9)
import os
os.remove("large")
for n in range(20):
    write(str(n), 7)
"""
    ).split()
    assert said[:2] == ["written", "refused"]
    assert IMAGE or said[2:].count("written") <= 1


def test_other_processes_cannot_be_killed(says, reward):
    program = f"""
import os, signal
for pid in [os.getppid(), {os.getpid()}, {os.getppid()}, -1, *range(2, 5000)]:
    if pid != os.getpid():
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
def f(): return 1
print(1)
"""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as neighbour:
        says(program)
        reward(program, "assert f() == 1")
        assert neighbour.poll() is None
        assert neighbour.stdin is not None
        neighbour.stdin.close()
    assert reward(ADD, "assert add(1, 2) == 3") == 1


@pytest.mark.parametrize("ending", ["", "while True: pass", "os._exit(0)"])
def test_what_a_program_leaves_behind_dies_with_it(reward, ending):
    program = f"""
import os, time
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 64)
            time.sleep(300)
        os._exit(0)
print(1)
{ending}
"""
    marker = {"": 509, "while True: pass": 508, "os._exit(0)": 507}[ending]
    reward(program, [{"input": "", "output": "1"}], timeout=1.5, memory_mb=marker)
    reward(program, "assert f() == 1", timeout=1.5, memory_mb=marker)
    time.sleep(0.3)
    assert alive(str(marker << 20)) == []


def test_a_program_dies_with_the_process_that_scores_it(found):
    call = (
        "from rloo_pipeline.rewards.code import code_reward\n"
        "tests = ['assert f()', [{'input': '', 'output': ''}]]\n"
        "code_reward(['import time; time.sleep(60)'] * 2, tests=tests,"
        f" timeout=60, memory_mb=506, workers=2, image={IMAGE!r})"
    )
    marker = str(506 << 20)
    with subprocess.Popen([sys.executable, "-c", call]) as scorer:
        deadline = time.monotonic() + 20
        while len(alive(marker)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(alive(marker)) >= 3
        time.sleep(1.5)  # until the programs are at work
        scorer.kill()
    time.sleep(1)
    assert alive(marker) == []


def test_the_filter_refuses_new_namespaces_keyrings_and_odd_sockets(says):
    said = says(
        """
import ctypes, os, threading
libc = ctypes.CDLL(None, use_errno=True)
for call in ((272, 0x10000000), (250, 0, -3, 1), (41, 40, 1, 0), (41, 16, 3, 0), (425, 8, 0), (321, 0, 0), (101, 0)):
    result = libc.syscall(*call)
    print(result, ctypes.get_errno())
print(libc.syscall(56, 0x10000011, 0, 0, 0, 0))
thread = threading.Thread(target=print, args=("threads work",))
thread.start(); thread.join()
"""
    )
    assert said.splitlines() == ["-1 1"] * 7 + ["-1", "threads work"]


def test_the_program_is_no_root_and_has_no_capability(says):
    said = says(
        """
import ctypes, os
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
data = (ctypes.c_uint32 * 6)()
print(ctypes.CDLL(None).capget(header, data), list(data[:2]), list(data[3:5]))
try:
    os.setuid(0)
    print(os.getuid())
except OSError:
    print("no root")
"""
    ).splitlines()
    assert said[0] == "0 [0, 0] [0, 0]"
    assert said[1] == "no root" or os.getuid() == 0  # in a user namespace a mapped root has no power outside of it


def test_further_paths_can_be_read_and_imported(tmp_path, found):
    tmp_path.chmod(0o755)  # where root runs this, the program is another user
    (tmp_path / "helper.py").write_text("def twice(x): return 2 * x")
    options = {"read_only": [str(tmp_path)], "image": IMAGE}
    assert code_reward(["from helper import twice as f"], tests=["assert f(2) == 4"], **options) == [1]
    with pytest.raises(UserError, match="not there"):
        code_reward(["x"], tests=["assert x"], read_only=["/no/such/folder"])


# Faking success.

CHEATS = {
    "leaves early": "import sys\nsys.exit(0)",
    "leaves early, at once": "import os\nos._exit(0)",
    "leaves in the call": "import os\ndef f(x): os._exit(0)",
    "answers everything in the harness's place": """
import os
for n in range(64):
    for line in (b'{"passed": true}', b'{"value": null}', b'{"value": 42}', b'{"value": true, "changed": {}}'):
        try: os.write(n, (line + b"\\n") * 50)
        except OSError: pass
""",
    "prints what a test would print": "print('1 passed'); print('{\"passed\": true}')",
    "equal to everything": """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
def f(x): return Equal()
""",
    "a number that is equal to everything": """
class Equal(int):
    def __eq__(self, other): return True
    __lt__ = __gt__ = __le__ = __ge__ = __eq__
    def __hash__(self): return 0
    def __abs__(self): return self
    def __sub__(self, other): return self
def f(x): return Equal()
""",
    "compares in any way": """
class Any:
    def __call__(self, *a, **k): return self
    def __getattr__(self, name): return self
    __lt__ = __gt__ = __le__ = __ge__ = __sub__ = __rsub__ = __abs__ = __contains__ = __eq__ = __call__
    def __hash__(self): return 0
f = Any()
""",
    "patches builtins and modules": """
import builtins, math, sys, unittest
builtins.AssertionError = type("Nothing", (BaseException,), {})
builtins.abs = lambda x: 0
builtins.exec = builtins.compile = builtins.eval = lambda *a, **k: None
builtins.isinstance = lambda *a: True
math.isclose = lambda *a, **k: True
sys.excepthook = sys.unraisablehook = lambda *a: os._exit(0)
def f(x): return 0
""",
    "defines builtins and modules for the tests": """
class math:
    isclose = staticmethod(lambda *a, **k: True)
def abs(x): return 0
class statistics:
    mean = staticmethod(lambda x: 0)
def f(x): return 0
""",
    "tracing, threads and atexit": """
import atexit, os, sys, threading, time
atexit.register(os._exit, 0)
sys.settrace(lambda *a: None)
def late():
    while True:
        for n in range(3, 64):
            try: os.write(n, b'{"passed": true}\\n')
            except OSError: pass
        time.sleep(0.001)
threading.Thread(target=late, daemon=True).start()
def f(x): return 0
""",
    "looks for the expected value": """
import gc, os, re, sys
def f(x):
    seen = []
    frame = sys._getframe()
    while frame:
        seen.append(repr(frame.f_locals) + repr(frame.f_globals))
        frame = frame.f_back
    seen += [repr(o) for o in gc.get_objects() if isinstance(o, (str, bytes, list, dict, tuple))]
    for folder, _, files in os.walk("/tmp"):
        seen += [open(os.path.join(folder, name)).read() for name in files]
    numbers = [int(n) for s in seen for n in re.findall(r"98765\\d{4}", s)]
    return numbers[0] if numbers else 0
""",
    "changes the harness": """
import sys
for module in list(sys.modules.values()):
    for name in list(vars(module)):
        if name in ("encode", "answer", "failure"):
            setattr(module, name, lambda *a: True)
        if name == "Served":
            module.Served.answer = lambda *a: {"value": True}
def f(x): return 0
""",
    "raises what a test may catch": "def f(x): raise SystemExit(0)",
    "nonsense on the wire": "import os\ndef f(x):\n    [os.write(n, b'[[[[\\n') for n in range(3, 9)]",
}


TESTS_OF_CHEATS = [
    "assert f(1) == 987654321",
    "import math\nassert math.isclose(f(1), 987654321)",
    "assert statistics.mean([f(1)]) == 987654321",
    "assert abs(f(1) - 987654321) < 1e-6",
    "def check(c):\n    assert c(1) == 987654321\ncheck(f)",
    "try:\n    right = f(1) == 987654321\nexcept Exception:\n    right = True\nassert f(1) == 987654321 and right",
]


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_passes_not_one_assert(reward, cheat):
    assert reward(CHEATS[cheat], TESTS_OF_CHEATS, partial=True, timeout=5) == 0
