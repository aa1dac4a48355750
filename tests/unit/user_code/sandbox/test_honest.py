"""Right programs of less common forms get 1, and a program can neither hide a failed test nor make a row None."""

import sys

import pytest
from programs import ADD

from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards.code import code_reward
from rloo_pipeline.user_code.sandbox.code_tests import UnusableTestsError, read_tests

ASYNC = """
import asyncio
async def f(x):
    await asyncio.sleep(0)
    if x < 0: raise ValueError("negative")
    return x + 1
async def count(n):
    for i in range(n): yield i
class Resource:
    async def __aenter__(self): self.open = True; return self
    async def __aexit__(self, *_): self.open = False
"""
MANAGER = """
class C:
    def __init__(self, items=()): self.items, self.events = list(items), []
    def __contains__(self, x): return x in self.items
    def __enter__(self): self.events.append("in"); return self
    def __exit__(self, kind, error, trace): self.events.append(kind.__name__ if kind else "out")
"""


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("from collections import deque\ndef f(x): return deque(x)",
         "from collections import deque\nassert f([1, 2]) == deque([1, 2]) and f([1]) != deque([2])"),
        ("def f(x): x.append(4); x.appendleft(0); return x.maxlen",
         "from collections import deque\nd = deque([1, 2, 3], 4)\nassert f(d) == 4\nassert d == deque([0, 1, 2, 3])"),
        (ASYNC, "import asyncio\nassert asyncio.run(f(1)) == 2"),
        (ASYNC, "import asyncio\nasync def both(): return await asyncio.gather(f(1), f(2))\n"
                "assert asyncio.run(both()) == [2, 3]"),
        (ASYNC, "import asyncio\nasync def test():\n    try:\n        await f(-1)\n    except ValueError as error:\n"
                "        assert str(error) == 'negative'\n    else:\n        assert False\nasyncio.run(test())"),
        (ASYNC, "import asyncio\nasync def test():\n    assert [i async for i in count(3)] == [0, 1, 2]\n"
                "    async with Resource() as r:\n        assert r.open\n    assert not r.open\nasyncio.run(test())"),
        (MANAGER, "c = C()\nwith c as d:\n    assert d.events == ['in']\nassert c.events == ['in', 'out']"),
        (MANAGER, "c = C()\ntry:\n    with c:\n        raise KeyError\nexcept KeyError:\n    pass\n"
                  "assert c.events == ['in', 'KeyError']"),
        (MANAGER, "assert 2 in C([1, 2]) and 3 not in C([1, 2])"),
        ("import contextlib\n@contextlib.contextmanager\ndef f(x): yield x + 1", "with f(1) as y:\n    assert y == 2"),
        ("def f(b): return b.decode()",
         "try:\n    f(b'\\xff')\nexcept UnicodeDecodeError as e:\n    assert e.start == 0 and e.object == b'\\xff'\n"
         "else:\n    assert False"),
        ("class Short(Exception):\n    def __init__(self, n): super().__init__(); self.n = n\n"
         "    def __str__(self): return f'{self.n} short'\ndef f(): raise Short(3)",
         "try:\n    f()\nexcept Short as e:\n    assert e.n == 3 and str(e) == '3 short'\nelse:\n    assert False"),
        ("def f(kind, x):\n    try: return kind(x)\n    except ValueError: return type(x)",
         "assert f(int, '3') == 3 and f(int, 'x') == str"),
        ("def f(work, kind):\n    try: work()\n    except kind as error: return error.args",
         "def work(): raise KeyError('a', 2)\nassert f(work, KeyError) == ('a', 2)"),
    ],
)  # fmt: skip
def test_a_right_program_passes(reward, program, tests):
    assert reward(program, tests) == 1


@pytest.mark.parametrize("body", ["return True", "raise KeyError", "raise SystemExit"])
def test_no_context_manager_of_a_program_hides_a_failed_test(reward, body):
    program = f"""
class C:
    def __enter__(self): return self
    def __exit__(self, *_): {body}
    async def __aenter__(self): return self
    async def __aexit__(self, *_): {body}
def f(x):
    if x: raise ValueError
    return 1
"""
    tests = [
        "with C():\n    assert f(0) == 2",
        "try:\n    with C():\n        assert f(0) == 2\nexcept KeyError:\n    pass",
        "with C():\n    assert f(1) == 2",
        "import asyncio\nasync def test():\n    async with C():\n        assert f(0) == 2\nasyncio.run(test())",
    ]
    assert reward(program, tests, partial=True) == 0


def test_a_context_manager_is_not_told_the_answer(reward):
    program = """
class C:
    def __enter__(self): return self
    def __exit__(self, kind, error, trace): C.seen = [repr(error), getattr(error, "args", None)]
def f(): return 0
def seen(): return repr(C.seen)
"""
    tests = ["with C():\n    assert f() == 98765, 'not 98765'", "assert '98765' not in seen()"]
    assert reward(program, tests, partial=True) == 0.5


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def f(g): return g(3)", "assert f(lambda x: iter([x])) == 3"),
        ("def f(): raise ImportError",
         "try:\n    f()\nexcept ImportError as error:\n    first = error\ntry:\n    f.no_such\nexcept AttributeError:\n"
         "    pass\nassert f and not first\nraise first"),
        ("def f(): raise ImportError\ndef g(): raise ValueError",
         "try:\n    f()\nexcept ImportError as error:\n    first = error\ntry:\n    g()\nexcept ValueError:\n    pass\n"
         "raise first\nassert f"),
        ("def f(): raise ValueError", "try:\n    x = f()\nexcept ValueError:\n    import not_here\nassert x == 1"),
    ],
)  # fmt: skip
def test_a_program_cannot_make_its_row_none(reward, program, tests):
    assert reward(program, [tests, "assert True"]) == 0


def test_a_builtin_type_is_all_that_a_program_can_name(reward):
    wire = "rloo_pipeline.user_code.sandbox.inside.wire"
    program = f"import sys\nsys.modules['{wire}'].encode = lambda *_: ['x', 'print']\nf = 1"
    assert reward(program, "assert f(1) is None") == 0


@pytest.mark.parametrize("value", [3, 2.5, True, ["3"]])
@pytest.mark.parametrize("key", ["input", "output"])
def test_input_and_output_that_are_no_text_are_an_error(value, key):
    test = {"input": "", "output": "1"} | {key: value}
    with pytest.raises(UserError, match=rf"tests of a row have an {key} that is not text but {type(value).__name__}"):
        read_tests([test], None)


@pytest.mark.parametrize(
    "expression", ["+".join(["1"] * 100_000), "(" * 5000 + "1" + ")" * 5000, "[" * 250 + "]" * 250, "-" * 50_000 + "1"]
)
def test_an_expression_that_python_cannot_compile_is_a_reason_for_none(expression):
    with pytest.raises(UnusableTestsError, match=r"too long or nested too deeply|not valid Python: too many nested"):
        read_tests(f"assert {expression} == f(1)", None)


def test_what_the_compiler_takes_the_examiner_takes_too(reward):
    """Not the tests but the program would get a 0."""
    most_terms = None
    for terms in range(100, sys.getrecursionlimit() * 4, 100):
        try:
            read_tests(f"assert {'+'.join(['1'] * terms)} == add({terms - 1}, 1)", None)
        except UnusableTestsError:
            break
        most_terms = terms
    assert most_terms
    assert reward(ADD, f"assert {'+'.join(['1'] * most_terms)} == add({most_terms - 1}, 1)") == 1
    assert code_reward([ADD], tests=["assert " + "+".join(["add(0, 1)"] * 100_000)]) == [None]
