"""Finds the lines of a TRL script that draw random numbers, and those that seed them."""

import ast
import re
from collections.abc import Iterable, Iterator

from rloo_pipeline.commands.trl_script import TrlScript
from rloo_pipeline.commands.trl_syntax import all_nodes, name_of

SEEDING = ("seed", "manual_seed", "set_seed", "seed_everything")
"""Functions that seed Python's, NumPy's or torch's random numbers."""
GENERATORS = ("Random", "RandomState", "default_rng", "Generator", "manual_seed")
"""Functions that make or return a generator with numbers of its own."""
SEEDED = {"shared": "own", "own": "own", "rows": "own rows", "own rows": "own rows"}
"""Ways in which a function draws that seeds random numbers itself, by the way without that."""
DRAWING = re.compile(
    r"random\.\w+|numpy\.random\.\w+|torch\.(.+\.)?(rand\w*|multinomial|bernoulli|normal)|sklearn\..+\.train_test_split"
)
"""Functions that draw, by their full names."""
KINDS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
"""Statements that draw nothing themselves."""


def seeds(script: TrlScript, statement: ast.AST) -> bool:
    """True for a line that seeds random numbers with values that the script shows."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or _full_name(script, call.func).rpartition(".")[2] not in SEEDING:
        return False
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return bool(given) and all(script.holds(value) is not None for value in given)


def draws(script: TrlScript, node: ast.AST) -> set[str]:
    """How a statement or expression draws random numbers: `rows` for methods of a dataset without a seed, `shared` for
    other numbers that a line may seed, `own` for a generator of the script or in a function that seeds. Empty if it
    does not draw.
    """
    return set() if isinstance(node, KINDS) or seeds(script, node) else set(_draws(script, node, ()))


def _draws(script: TrlScript, node: ast.AST, inside: tuple[str, ...]) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Call):
            name, given = _full_name(script, part.func), {keyword.arg for keyword in part.keywords}
            is_sample = isinstance(part.func, ast.Attribute) and part.func.attr == "sample"  # of pandas
            if has_no_seed(part):
                yield "rows"
            elif name_of(part.func) in GENERATORS:
                yield "own"
            elif name.rpartition(".")[2] in SEEDING or given & {"random_state", "generator"}:
                continue
            elif is_sample or DRAWING.fullmatch(name):
                yield "shared"
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load) and part.id not in inside:
            for binding in script.bindings.get(part.id, ()):
                if binding.value is None and not isinstance(binding.statement, ast.Import | ast.ImportFrom):
                    kinds = _draws(script, binding.statement, (*inside, part.id))
                    has_seed = any(name_of(call.func) in SEEDING for call in all_nodes(binding.statement, ast.Call))
                    yield from (SEEDED[kind] if has_seed else kind for kind in kinds)
                elif isinstance(binding.value, ast.Call) and name_of(binding.value.func) in GENERATORS:
                    yield "own"


def has_no_seed(call: ast.Call) -> bool:
    """True if a call shuffles or splits a dataset without a seed, for which NumPy's numbers are drawn."""
    method = call.func.attr if isinstance(call.func, ast.Attribute) else None
    seeded = {one.arg for one in call.keywords if not (isinstance(one.value, ast.Constant) and one.value.value is None)}
    is_random = method == "train_test_split" or (method == "shuffle" and not call.args)
    return is_random and not seeded & {"seed", "generator", None}


def other_rows(
    script: TrlScript, parts: Iterable[ast.expr], chosen: Iterable[ast.stmt]
) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Yields lines and expressions for which data.py has other rows than the script, each with the reason.

    Args:
        script: the script.
        parts: expressions of the datasets.
        chosen: the statements that they depend on.
    """
    known, nodes = [*chosen], list[ast.stmt | ast.expr]([*chosen, *parts])
    ours = [one for one in nodes if draws(script, one)]
    last = max((one.lineno for one in ours), default=0)
    before = [one for one in script.statements if one.lineno < last and one.lineno not in script.afterwards]
    is_seeded = any(seeds(script, one) for one in before)
    for node in ours:
        kinds = draws(script, node)
        if "own rows" in kinds or ("rows" in kinds and is_seeded):
            yield node, "data.py draws it with seed=0, not with the script's seed"
        if "shared" in kinds and not is_seeded:
            yield node, "draws without a seed that the script shows; seed it in both functions of data.py"
    for one in before if is_seeded and ours else ():
        if one not in known and draws(script, one) and script.trainer not in ast.walk(one):
            script.taken.add(one.lineno)
            yield one, "draws before the data do, and data.py does not, so that rows differ from the script's"


def _full_name(script: TrlScript, function: ast.expr) -> str:
    """`numpy.random.choice` for `np.random.choice`, and for `choice` imported from there."""
    first, dot, rest = ast.unparse(function).partition(".")
    return script.imports.get(first, first) + dot + rest
