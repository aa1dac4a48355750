"""A stage is rerun for code that affects its result, but not for layout, comments or code without effect."""

import ast
import hashlib
from pathlib import Path

import pytest
from helpers import mini

from rloo_pipeline.config import STAGES, Config, provenance, syntax
from rloo_pipeline.config.loading import validate
from rloo_pipeline.config.syntax import normal_form

TEXT = """
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import hints


class Limit(Base[int], strict=True):
    '''Of a length.'''

    low: float = 0.5
    '''At least.'''


@cached
def reward(completions: list[str], /, *others, scale: float = 2e-3, **rest) -> list[float]:
    '''As long as it is.'''
    # a comment
    if (found := len(others)) > 1 and not rest:
        return [math.log1p(len(text[1:-1])) * scale - 1 for text in completions if text is not None]
    match others:
        case [None, {"a": 1, **more}] | (True as more):
            raise ValueError(f"{found!r:>{4}} of {scale=} {{}}" "and " f"{more}") from None
    return [float(text == b"\\x00") for text in completions]
"""


def digest(text: str) -> str:
    return hashlib.sha256(normal_form(ast.parse(text)).encode()).hexdigest()


def test_comments_docstrings_and_layout_do_not_count() -> None:
    other = (
        TEXT.replace("Of a length.", "Of a width.")
        .replace("# a comment", "\n    # another")
        .replace("    '''As long as it is.'''\n", "")
        .replace("At least.", "At most.")
        .replace("scale: float = 2e-3,", "\n    scale: float = (0.002),\n")
    )
    assert other != TEXT
    assert digest(other) == digest(TEXT)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("scale - 1", "scale + 1"),
        ("2e-3", "2e-4"),
        ("text is not None", "text is not Nothing"),
        ("case [None,", "case [False,"),
        ("from None", "from found"),
        ('b"', '"'),
        ("and not rest", "and rest"),
        ("strict=True", "strict=False"),
        ("completions: list[str], /, *others", "completions: list[str], *others"),
        ("@cached\n", ""),
        ("1:-1", ":-1"),
        ('"a": 1', '"a": ""'),
        ("found := len", "found := sum"),
    ],
)
def test_what_code_does_counts(before: str, after: str) -> None:
    assert TEXT.count(before) == 1
    assert digest(TEXT.replace(before, after)) != digest(TEXT)


def test_every_python_version_gives_the_same_digest() -> None:
    """Computed with 3.11, 3.12 and 3.13, whose own dumps of this tree differ."""
    assert digest(TEXT) == "89d44d820d068c12ed43f1e005fabc7ffd7e91ddc87627663ea5aa82280a0e1c"
    with_fields_of_3_12 = ast.parse(TEXT)
    for node in ast.walk(with_fields_of_3_12):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            node.type_params = []  # type: ignore[attr-defined]
    assert normal_form(with_fields_of_3_12) == normal_form(ast.parse(TEXT))


def config(function: str) -> Config:
    changes = {"rewards": [{"function": function, "name": "answer"}]}
    return validate(mini(**changes), "test")


def fresh_digest(function: str) -> str:
    """The digest of `score` with a reward, after files were edited."""
    for cached in (syntax.facts, provenance._digest, provenance._closure, provenance._imports):
        cached.cache_clear()
    return provenance.source_digest("score", config(function))


@pytest.fixture
def score_digest(tmp_path: Path):
    """The digest of `score` with a reward of these texts."""

    def digest_of(reward: str, imported_module: str) -> str:
        (tmp_path / "mine.py").write_text(reward)
        (tmp_path / "beside.py").write_text(imported_module)
        return fresh_digest(f"{tmp_path}/mine.py:reward")

    return digest_of


MINE = "import beside\n\ndef reward(completions):\n    return [beside.ONE] * len(completions)\n"


def test_in_files_of_users_comments_do_not_count_and_values_do(score_digest) -> None:
    before = score_digest(MINE, "ONE = 1.0\n")
    assert score_digest("# mine\n" + MINE, "'''Beside.'''\nONE = 1.0  # a comment\n") == before
    assert score_digest(MINE, "ONE = 2.0\n") != before
    assert score_digest(MINE.replace("len(completions)", "2"), "ONE = 1.0\n") != before


def test_a_docstring_that_a_reward_reads_counts(score_digest) -> None:
    """A judge may have its instructions there."""
    reward = MINE.replace("beside.ONE", "judged(beside.__doc__)")
    assert score_digest(reward, "'''Be strict.'''\n") != score_digest(reward, "'''Be kind.'''\n")


@pytest.mark.parametrize(
    ("function", "line", "helpers"),
    [
        ("own_pkg.rewards:reward", "from .helpers import ONE", "own_pkg/helpers.py"),
        ("own_pkg.rewards:reward", "from . import helpers", "own_pkg/helpers.py"),
        ("own_pkg.rewards:reward", "from own_pkg.helpers import ONE", "own_pkg/helpers.py"),
        ("own_pkg.sub.rewards:reward", "from ..helpers import ONE", "own_pkg/helpers.py"),
        ("own_pkg/rewards.py:reward", "from own_pkg.helpers import ONE", "own_pkg/helpers.py"),
        ("rewards.py:reward", "from helpers.a import ONE", "helpers/b.py"),
        ("rewards.py:reward", "import library", "library/core.py"),
    ],
)
def test_modules_of_the_users_package_count_and_those_of_a_library_do_not(
    tmp_path, monkeypatch, function, line, helpers
) -> None:
    """helpers/a.py imports `helpers.b`, and pip has put `library` beside the file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    files = {
        "own_pkg/sub/__init__.py": "",
        "own_pkg/helpers.py": "",
        "helpers/a.py": "from helpers.b import ONE",
        "helpers/b.py": "",
        "library/__init__.py": "from library.core import ONE",
        "library/core.py": "",
        "other_name-1.0.dist-info/RECORD": "library/__init__.py,,\nlibrary/core.py,,\n",
    }
    reward = function.partition(":")[0].removesuffix(".py").replace(".", "/") + ".py"
    for file, text in {**files, reward: f"{line}\n\ndef reward(completions):\n    return []\n"}.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    before = fresh_digest(function)
    (tmp_path / helpers).write_text("ONE = 1.0\n")
    assert (fresh_digest(function) != before) == ("library" not in helpers)


def test_the_users_task_files_count_for_the_benchmarks_alone(tmp_path) -> None:
    """And not what Python and lm-eval write beside them."""
    with_tasks = validate(mini(evaluation={"harness": {"tasks": ["mine"], "include_path": str(tmp_path)}}), "x")
    stages = ("stage-harness", "harness", "evaluate")

    def digests() -> list[str]:
        provenance._digest.cache_clear()
        syntax.facts.cache_clear()
        return [provenance.source_digest(stage, with_tasks) for stage in stages]

    before = digests()
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "utils.pyc").touch()
    assert digests() == before
    (tmp_path / "mine.yaml").write_text("task: mine\n")
    after = digests()
    assert [new != old for new, old in zip(after, before, strict=True)] == [True, True, False]
    (tmp_path / "mine.yaml").write_text("task: mine\nmetric_list: []\n")
    assert digests()[1] not in (before[1], after[1])


def closure(stage: str) -> set[str]:
    file = provenance.PACKAGE / "stages" / f"{stage.replace('-', '_')}.py"
    return {str(path.relative_to(provenance.PACKAGE)) for path in provenance._closure(file)}


def test_the_digest_of_a_stage_has_no_code_without_effect_on_its_result() -> None:
    training = {
        "training/kernels/attention.py",
        "training/layout.py",
        "training/engine.py",
    }
    loss = {"algorithm/loss.py", "algorithm/advantages.py", "algorithm/mismatch.py"}
    assert "trackers/events.py" not in closure("update")
    assert closure("update") >= training | loss, "code with an effect is covered"
    for stage in ("prompts", "rollout", "score", "evaluate", "harness"):
        assert not closure(stage) & (training | loss), stage
    assert closure("rollout") >= {"rollout/sampler.py", "rollout/groups.py", "seeds.py", "artifacts/policy.py"}
    for stage in ("rollout", "evaluate", "harness"):
        assert "rollout/vllm_internals.py" in closure(stage), "replaced kernels decide values"
    assert closure("reference") >= {"training/kernels/attention.py", "training/layout.py", "training/policy_model.py"}
    assert {stage for stage in STAGES if "trackers/events.py" in closure(stage)} == set()
    assert {stage for stage in STAGES if any(name.startswith("before_run/") for name in closure(stage))} == set()


def test_modules_without_effect_exist() -> None:
    missing = [
        name for name in provenance.WITHOUT_EFFECT if not provenance._file_of(provenance.PACKAGE, name.split("."))
    ]
    assert missing == [], "a module that moved counts again"


def test_what_was_read_of_a_file_is_kept_for_its_content_and_read_anew_where_that_is_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "mine.py"
    file.write_text(MINE.replace("beside.ONE", "len(beside.__doc__)"))

    def digest_in_a_new_process() -> str:
        for cached in (syntax.facts, syntax._kept, syntax._file):
            cached.cache_clear()
        digest = syntax.facts(file).digest
        assert [*provenance._with_text_flag(frozenset({file}))] == [(file, b"__doc__" in file.read_bytes())]
        syntax.keep()
        return digest

    parsed = []
    parse = ast.parse
    monkeypatch.setattr(ast, "parse", lambda text: parsed.append(text) or parse(text))
    first = digest_in_a_new_process()
    assert digest_in_a_new_process() == first
    assert len(parsed) == 1
    [cache] = (tmp_path / "rloo_pipeline").iterdir()
    cache.write_text(cache.read_text().replace(first, first[::-1]))
    assert digest_in_a_new_process() == first
    assert len(parsed) == 2
    file.write_text(MINE + "ONE = 1")
    assert digest_in_a_new_process() != first
    for cached in (syntax.facts, syntax._kept, syntax._file):
        cached.cache_clear()
