"""References to functions that a configuration names."""

import pytest

from rloo_pipeline import import_string
from rloo_pipeline.errors import UserError


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    import fast\nexcept ImportError:\n    def right(): ...\n",
        "if True:\n    async def right(): ...\nelse:\n    pass\n",
        "with open(__file__):\n    from elsewhere import wrong as right\n",
        "right, other = map(str, '12')\n",
        "from elsewhere import *\n",
        "def __getattr__(name): ...\n",
        "import sys\nsys.modules[__name__] = object()\n",
    ],
)
def test_a_function_is_found_wherever_its_file_binds_its_name(text, tmp_path) -> None:
    (tmp_path / "own.py").write_text(text)
    assert import_string.check(f"{tmp_path}/own.py:right") == tmp_path / "own.py"


def test_a_name_inside_a_function_is_not_a_function_of_the_file(tmp_path) -> None:
    (tmp_path / "own.py").write_text("if True:\n    def write():\n        def right(): ...\n")
    with pytest.raises(UserError, match=r"own\.py has no function right; did you mean 'write'"):
        import_string.check(f"{tmp_path}/own.py:right")


def test_a_value_that_is_not_a_function_is_not_suggested_for_itself(tmp_path) -> None:
    (tmp_path / "own.py").write_text("right = 3\n")
    with pytest.raises(UserError, match=r"own\.py has no function right$"):
        import_string.load(f"{tmp_path}/own.py:right")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import not_there", "ModuleNotFoundError: No module named 'not_there'"),
        ("raise RuntimeError('no key')", "RuntimeError: no key"),
        ("raise SystemExit(2)", "SystemExit: 2"),
    ],
)
def test_a_package_that_fails_is_not_taken_for_a_missing_module(text, reason, tmp_path, monkeypatch) -> None:
    name = f"failing_{len(text)}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(text)
    (tmp_path / name / "own.py").write_text("def right(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=rf"importing {name}\.own failed with {reason}$"):
        import_string.check(f"{name}.own:right")
    with pytest.raises(UserError, match=rf"no module {name}_2\.own; install it"):
        import_string.check(f"{name}_2.own:right")


def test_a_script_that_ends_itself_is_an_error_of_its_line(tmp_path) -> None:
    (tmp_path / "own.py").write_text("def right(): ...\n\nraise SystemExit(2)\n")
    with pytest.raises(UserError, match=r"importing .*own\.py failed with SystemExit: 2 \(own\.py, line 3\)$"):
        import_string.load(f"{tmp_path}/own.py:right")


@pytest.mark.parametrize("call", ["eval('1 / 0')", "eval('1 +')", "importlib.import_module('not_there')"])
def test_code_without_a_file_is_not_the_line_of_an_error(call, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(f"import importlib\n\ndef wrong():\n    {call}\n")
    with pytest.raises((ZeroDivisionError, SyntaxError, ImportError)) as raised:
        import_string.load("own.py:wrong")()
    assert import_string.error_location(raised.value, "own.py:wrong") == " (own.py, line 4)"


def test_a_module_that_this_version_lacks_is_looked_up_in_the_docs_and_not_installed() -> None:
    with pytest.raises(UserError, match=r"no module rloo_pipeline\.rewards\.thinking in this version; docs/rewards"):
        import_string.check("rloo_pipeline.rewards.thinking:thinking_reward")
    with pytest.raises(UserError, match="no module thinking_rewards; install it"):
        import_string.check("thinking_rewards:thinking_reward")


def test_a_reward_of_trl_is_found() -> None:
    assert import_string.check("trl.rewards:accuracy_reward")


def test_where_a_file_is_missing_the_copy_of_a_run_is_named(tmp_path, monkeypatch) -> None:
    """Of a run that a colleague handed over."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no file own\.py \(looked for from [^)]*\)$"):
        import_string.check("own.py:right")
    (tmp_path / "results/run/functions").mkdir(parents=True)
    (tmp_path / "results/run/functions/own.py").touch()
    with pytest.raises(UserError, match=r"a run has a copy to put there: results/run/functions/own\.py"):
        import_string.check("own.py:right")
