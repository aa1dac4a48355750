"""Text of models, data sets and functions cannot control the terminal that shows it."""

import io
import json
import re
from pathlib import Path

import pytest
from helpers import rloo
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import rloo_pipeline
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime.console import Terminal

TITLE, LINK, CLIPBOARD, CLEAR = "\x1b]0;t\x07", "\x1b]8;;http://x\x1b\\", "\x1b]52;c;aGk=\x07", "\x1b[2J\x9b2J"
HOSTILE = f"{TITLE}{LINK}{CLIPBOARD}{CLEAR}\r\x08\x7f[red]end[/]"
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def table_of(text: str) -> Table:
    table = Table(text, title=text)
    table.add_row(text)
    return table


@pytest.mark.parametrize("wrap", [str, Text, table_of, lambda text: Panel(Text(text)), lambda text: [text]])
def test_text_on_the_terminal_has_neither_control_characters_nor_markup(wrap) -> None:
    console = Terminal(file=io.StringIO(), width=200)
    console.print(wrap(HOSTILE))
    assert not CONTROLS.search(console.file.getvalue())
    assert "[red]end[/]" in console.file.getvalue()


def test_colours_lines_and_tabs_stay() -> None:
    console = Terminal(file=io.StringIO(), force_terminal=True, color_system="standard", _environ={})
    console.print(Text("two\nlines", "red"))
    assert console.file.getvalue() == "\x1b[31mtwo\x1b[0m\n\x1b[31mlines\x1b[0m\n"
    assert str(UserError("a\tb\nc")) == "a\tb\nc"


def test_a_function_that_quotes_a_completion_cannot_control_the_terminal_or_the_log(tmp_path) -> None:
    data, function, log = tmp_path / "rows.jsonl", tmp_path / "reward.py", tmp_path / "log"
    data.write_text(json.dumps({"prompt": "1+1", "completion": HOSTILE}) + "\n")
    function.write_text("def reward(completions, **_):\n    raise ValueError(completions[0])\n")
    call = ("reward-test", f"{function}:reward", "--data", data)
    shown, logged = rloo(*call), rloo(*call, "--log", log)
    for text in (shown.stdout, shown.stderr, logged.stderr, log.read_bytes().decode()):
        assert "[red]end[/]" in text
        assert not CONTROLS.search(text)


def test_commands_print_to_no_other_console() -> None:
    """Progress bars have one of rich's own, for the names of counters."""
    package = Path(rloo_pipeline.__file__).parent
    users = {file.name for file in package.rglob("*.py") if re.search(r"\bConsole\(", file.read_text())}
    assert users == {"output.py", "progress.py"}
