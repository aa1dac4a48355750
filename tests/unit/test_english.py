"""Docstrings, comments and messages of the package use few of the phrases that are hard to read; the limits may only go
down.
"""

import ast
import csv
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache

import pytest
from helpers import ROOT

PATTERNS = {
    "docstrings that begin with a question word": (r"\A(Whether|What|Where|Which) ", 0),
    "'is no …', for 'is not a …'": (r"(?<!there) (is|are) no (?!longer)[a-z]+", 0),
    "', which is no …'": (r", which is no ", 0),
    "arguments without a noun, such as 'folder: of the run.'": (r"(?m)^ +\w+: (of|in|on) the [a-z ]+\.$", 0),
    "arguments that begin with 'whether'": (r"(?m)^ +\w+: whether ", 0),
    "'another … than', for 'a different … than'": (r"\b[Aa]nother ([a-z]+ )?[a-z]+ than\b", 0),
    "'is a text', for 'is a string'": (r"\b(is|are|be|as|not) a text\b", 1),
    "'trainings', for 'training runs'": (r"\btrainings\b", 0),
}
NOT = r"(?:is|are|was|were|do|does|did|has|have|had|can|could) (?:not|none|nothing)|cannot|needs? (?:it|them|one)"
OF_MESSAGES = {"', and' where a reader expects 'but'": (rf", and (?:[^,;:.()]* )?(?:{NOT})\b", 0)}


def messages(source: str) -> Iterator[str]:
    """Strings that are not docstrings, with {} for each value."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr(values=parts):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                yield text


def texts(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


@cache
def package() -> dict[str, tuple[list[str], list[str]]]:
    """The docstrings and comments of each file, and its messages, which tables have, too."""
    sources = {str(file.relative_to(ROOT)): file.read_text() for file in (ROOT / "rloo_pipeline").rglob("*.py")}
    tables = {str(file.relative_to(ROOT)): file.read_text() for file in (ROOT / "rloo_pipeline").rglob("*.csv")}
    found = {file: (list(texts(source)), list(messages(source))) for file, source in sorted(sources.items())}
    cells = {
        file: ([], [cell for row in csv.reader(io.StringIO(text)) for cell in row]) for file, text in tables.items()
    }
    charts = tomllib.loads((ROOT / "rloo_pipeline" / "report" / "charts.toml").read_text())
    captions = [chart["caption"] for of_page in charts.values() for chart in of_page.values()]
    return found | cells | {"report/charts.toml": ([], captions)}


@pytest.mark.parametrize("name", PATTERNS | OF_MESSAGES)
def test_a_phrase_that_is_hard_to_read_does_not_become_more_frequent(name) -> None:
    pattern, limit = (PATTERNS | OF_MESSAGES)[name]
    found = [
        (file, match[0].strip())
        for file, (docstrings, strings) in package().items()
        for text in [*([] if name in OF_MESSAGES else docstrings), *strings]
        for match in re.finditer(pattern, text)
    ]
    assert len(found) <= limit, f"{name}: reword these: {found}"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Whether it ends.", "docstrings that begin with a question word"),
        ("An answer that is no text.", "'is no …', for 'is not a …'"),
        ("At 1, which is no KL.", "', which is no …'"),
        ("    run: of the run.", "arguments without a noun, such as 'folder: of the run.'"),
        ("    dry: whether jobs run.", "arguments that begin with 'whether'"),
        ("Of another model than its base.", "'another … than', for 'a different … than'"),
        ("True if it is a text.", "'is a text', for 'is a string'"),
        ("One of several trainings.", "'trainings', for 'training runs'"),
        ("it needs a GPU, and there is none here", "', and' where a reader expects 'but'"),
        ("no symbolic links, and an experiment needs them", "', and' where a reader expects 'but'"),
    ],
)
def test_each_pattern_finds_its_phrase(text, name) -> None:
    assert re.search((PATTERNS | OF_MESSAGES)[name][0], text)
