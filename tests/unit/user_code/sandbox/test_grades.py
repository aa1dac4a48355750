"""Correct programs pass their tests, wrong ones fail; without a sandbox nothing runs."""

import sysconfig
import time

import pytest
from programs import ADD, IMAGE

from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards.code import code_reward, program_of
from rloo_pipeline.user_code import reward_call
from rloo_pipeline.user_code.sandbox import sandbox
from rloo_pipeline.user_code.sandbox.code_tests import UnusableTestsError, read_tests


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
        ("print('  1\\n  2')", [{"input": "", "output": "1\n  2"}], 1),
        ("print('  1\\n  2')", [{"input": "", "output": "1\n2"}], 0),
        ("print(7)\nraise SystemExit(1)", [{"input": "", "output": "7"}], 0),
        ("import numpy_that_is_not_there\n" + ADD, "assert add(1, 2) == 3", 0),
        ("def add(a, b) return", "assert add(1, 2) == 3", 0),
        ("", "assert add(1, 2) == 3", 0),
        ("async def f(x): return x\ndef g(y): return y + 1", "assert g(f(1)) == 2", 0),
        (
            "async def f(x): return x\nasync def g(y): return 1 + await y",
            "import asyncio\nassert asyncio.run(g(f(1))) == 2",
            1,
        ),
        (
            "async def f(x): return x\ndef g(y): return 2",
            "import asyncio\nc = f(1)\nasyncio.run(asyncio.wait_for(c, 9))\nassert g(c) == 2",
            0,
        ),
        ("def use(g): return 1", "async def g(): pass\nassert use(g) == 1", None),
        (ADD, None, None),
        (ADD, [], None),
    ],
)
def test_a_program_gets_1_where_all_tests_of_its_row_pass(reward, program, tests, expected):
    assert reward(program, tests) == expected


def test_partial_gives_the_share_of_passed_tests(reward):
    tests = ["assert add(1, 2) == 3", "assert add(1, 2) == 4", "assert add(0, 0) == 0", "assert add() == 1"]
    assert reward(ADD, tests, partial=True) == 0.5
    assert reward(ADD, "\n".join(tests), partial=True) == 0.5
    cases = [{"input": f"{n}\n", "output": str(n % 3)} for n in range(4)]
    assert reward("print(input())", cases, partial=True) == 0.75


def test_cases_for_which_a_slow_program_leaves_no_time_count_as_failed(reward):
    cases = [{"input": str(n), "output": str(n)} for n in (0, 1, 2, 3, 4, 5, 6, 7)]
    slow = "n = input()\nwhile n != '0': pass\nprint(n)"
    began = time.monotonic()
    assert reward(slow, cases, partial=True, timeout=20, row_timeout=2) == 1 / 8
    assert time.monotonic() - began < 20, "one start and 2 s, not 7 limits"


def test_tests_after_the_programs_exit_count_as_failed(reward):
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
        ("def f(self, do, on, name): return [self, do, on, name]",
         "assert f(on=3, do=2, name=4, self=1) == [1, 2, 3, 4]"),
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
def test_values_and_calls_work_through_the_pipe(reward, program, tests):
    assert reward(program, tests) == 1


@pytest.mark.skipif(bool(IMAGE), reason="an image has a Python of its own")
@pytest.mark.parametrize(
    ("body", "test"),
    [
        ("return np.array(x) * 2", "assert np.allclose(f([1, 2]), [2, 4]) and f([1]).shape == (1,)"),
        ("return np.eye(2, dtype='f4')", "np.testing.assert_array_equal(f(0), np.eye(2)); assert f(0).dtype == 'f4'"),
        ("return np.array(['a', 'bc'])", "assert (f(0) == np.array(['a', 'bc'])).all()"),
        ("return x.sum()", "assert f(np.arange(4)) == 6"),
        ("x.sort()", "x = np.array([3, 1])\nf(x)\nassert x.tolist() == [1, 3]"),
    ],
)
def test_arrays_cross_as_data(reward, body, test):
    program = f"import numpy as np\ndef f(x): {body}"
    folders = [sysconfig.get_path("platlib")]
    assert reward(program, [f"import numpy as np\n{test}\nassert True"], read_only=folders) == 1


def test_check_is_called_with_the_entry_point(reward):
    check = "METADATA = {}\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n"
    assert reward(ADD, check, entry_point="add") == 1
    assert reward("def add(a, b): return 4", check, entry_point="add") == 0
    assert reward(ADD, check + "check(add)") == 1


BUILTIN = ["assert sum(10, 15) == 6", "assert sum(4, 6) == 3"]
"""Tests of MBPP, task 126."""


def test_the_program_may_be_asked_for_a_function_with_the_name_of_a_builtin(reward):
    program = "def sum(a, b): return builtin([n for n in range(1, min(a, b)) if a % n == b % n == 0])"
    right = "from builtins import sum as builtin\n" + program
    assert reward(right, BUILTIN) == 1
    assert reward(right.replace("range(1", "range(2"), BUILTIN) == 0
    assert reward("def sum(a, b): return 6", BUILTIN, partial=True) == 0.5
    assert reward("x = 1", "assert sum([1, 2]) == 3") == 0, "the builtin is not the program's"
    assert reward(right, "def check(f):\n    assert f(10, 15) == 6", entry_point="sum") == 1


def test_beside_a_name_of_the_program_a_builtin_is_pythons(reward):
    program = "def f(x): return x\ndef abs(x): return 0\ndef sum(x): return 0"
    assert reward(program, "assert abs(f(1) - 2) < 0.1") == 0
    assert reward(program, "assert globals()['f'](1) == 1 and sum([1]) == 1") == 1


def test_tests_behind_a_main_guard_run(reward):
    tests = "def check(f):\n    assert f(1, 2) == 3\nif __name__ == '__main__':\n    check(add)"
    assert reward(ADD, tests) == 1
    assert reward("def add(a, b): return 0", tests) == 0
    assert reward("x = 1", tests) == 0
    builtin = "if __name__ == '__main__':\n    assert sum(10, 15) == 6"
    assert reward("def sum(a, b): return 6", builtin) == 1
    assert reward("x = 1", builtin) == 0


def test_rows_are_independent(confinement):
    programs = [ADD, "def add(a, b): return 0", "while True: pass", ADD]
    tests = ["assert add(1, 2) == 3"] * 3 + [None]
    assert code_reward(programs, tests=tests, image=IMAGE, timeout=3) == [1, 0, 0, None]


def test_unusable_tests_give_none_and_a_note(confinement):
    notes = reward_call.collect_notes()
    tests = ["def check(c):\n    assert c(1) == 1", "assert (", "x = 1", "import no_such_module\nassert add(1, 2) == 3",
             "class T: pass\nassert add(T(), 2)", "assert set(sum(2, 3)) == set([1])"]  # fmt: skip
    assert code_reward([ADD] * 7, tests=[*tests, None], image=IMAGE) == [None] * 7
    assert sorted(notes) == [0, 1, 2, 3, 4, 5], "the last has no tests"
    assert all(why.startswith("cannot run the tests: ") for why in notes.values())


def test_the_program_is_the_last_python_code_block_after_the_thinking():
    assert program_of("x = 1") == "x = 1"
    assert program_of("<think>\n```python\nno\n```\n</think>A:\n```python\na\n```\nor\n```Python\nb\n```\n") == "b\n"
    assert program_of("```\nplain\n```\n```json\n{}\n```\nwords") == "plain\n"
    assert program_of("```python\ncut off") == "cut off"
    assert program_of("<think>\n```python\nnever ends\n```") is None


def test_tests_of_an_unknown_form_raise_an_error_that_shows_them():
    with pytest.raises(UserError, match=r"the tests of a row \(\[1, 2\]\) are neither"):
        read_tests([1, 2], None)
    with pytest.raises(UserError, match="tests_column"):
        code_reward(["x"], tests_column="tets", tests=["assert x"])
    with pytest.raises(UnusableTestsError):
        read_tests("print(add(1, 2))", None)


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sandbox, "search", sandbox.search.__wrapped__)  # without the cache


def test_without_a_sandbox_nothing_runs_unless_allow_unconfined_is_set(nothing_installed):
    with pytest.raises(UserError, match=r"bubblewrap is not installed.*allow_unconfined: true"):
        code_reward([ADD], tests=["assert add(1, 2) == 3"])
    assert code_reward([ADD] * 2, tests=["assert add(1, 2) == 3", "assert add(1, 2) == 4"], allow_unconfined=True) == [
        1,
        0,
    ]
    assert code_reward(["while True: pass"], tests=["assert f()"], allow_unconfined=True, timeout=1) == [0]
    hog = "def f():\n    try: return len(bytearray(1 << 30))\n    except MemoryError: return 'limited'"
    assert code_reward([hog], tests=["assert f() == 'limited'"], allow_unconfined=True) == [1]
