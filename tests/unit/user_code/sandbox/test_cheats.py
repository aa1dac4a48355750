"""A program passes a test only with the right answer."""

import sysconfig

import pytest
from programs import IMAGE

CHEATS = {
    "leaves early": "import sys\nsys.exit(0)",
    "leaves early, at once": "import os\nos._exit(0)",
    "leaves in the call": "import os\ndef f(x): os._exit(0)",
    "sends replies in place of the harness": """
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
    texts = []
    frame = sys._getframe()
    while frame:
        texts.append(repr(frame.f_locals) + repr(frame.f_globals))
        frame = frame.f_back
    texts += [repr(o) for o in gc.get_objects() if isinstance(o, (str, bytes, list, dict, tuple))]
    for folder, _, files in os.walk("/tmp"):
        texts += [open(os.path.join(folder, name)).read() for name in files]
    numbers = [int(n) for s in texts for n in re.findall(r"98765\\d{4}", s)]
    return numbers[0] if numbers else 0
""",
    "changes the harness": """
import sys
for module in list(sys.modules.values()):
    for name in list(vars(module)):
        if name in ("encode", "answer", "failure"):
            setattr(module, name, lambda *a: True)
        if name == "ProgramServer":
            module.ProgramServer.answer = lambda *a: {"value": True}
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


@pytest.mark.parametrize("error", ["StopIteration", "type('Stop', (StopIteration,), {})"])
def test_an_error_ends_no_loop_of_the_tests(reward, error):
    program = f"def f(x): raise {error}\nclass C:\n    def __getattr__(self, name): raise {error}\nc = C()"
    tests = [
        "assert all(map(f, [1, 2]))",
        "assert all(a == b for a, b in zip(map(f, [1, 2]), [1, 2]))",
        "assert not list(filter(f, [1, 2]))",
        "import operator\nassert all(map(operator.attrgetter('x'), [c, c]))",
    ]
    assert reward(program, tests, partial=True) == 0


@pytest.mark.skipif(bool(IMAGE), reason="an image has a Python of its own")
@pytest.mark.parametrize(
    "body",
    [
        "__array_interface__ = {'shape': (0, 1), 'typestr': '<f8', 'version': 3, 'data': (1, False)}",
        "def __array__(self, *a, **k): import numpy; return numpy.zeros((0, 1))",
        "def __len__(self): return 0\n    def __getitem__(self, place): raise IndexError",
    ],
)
def test_an_object_is_no_array_for_numpy(reward, body):
    program = f"class A:\n    {body}\ndef f(x): return A()"
    tests = [
        "import numpy as np\nassert np.allclose(f(1), [2])",
        "import numpy as np\nassert (f(1) == np.ones(1)).all()",
    ]
    assert reward(program, tests, partial=True, read_only=[sysconfig.get_path("platlib")]) == 0


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_passes_no_assert(reward, cheat):
    assert reward(CHEATS[cheat], TESTS_OF_CHEATS, partial=True, timeout=5) == 0
