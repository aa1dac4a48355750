"""A model held against itself before it trains or scores: packed, it computes what plain transformers do.

Once for a configuration, on a small copy that is made from it (`small`), in float32 on the CPU (`compare`). What came
out lies beside the weights as `self_check.json` and goes with them from policy to policy, so that later rounds and
stages read it; it holds for this configuration, this code and these versions of libraries.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Self

from rloo_pipeline.artifacts.files import digest as digest_of
from rloo_pipeline.artifacts.files import read_json, write_json
from rloo_pipeline.config import JSON
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import import_shims
from rloo_pipeline.training import model_support

RECORD = "self_check.json"
LOGPS, GRADIENT = 1e-3, 1e-2
"""Nats of a token's log-prob and share of a parameter's gradient that float32 explains. What is right is below a tenth
of it, what is wrong above a hundred times (tests/families).
"""
FAR = 10**9
PASSING = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
"""Keys of a configuration that change no result of a model in float32."""
_known: dict[str, SelfCheck] = {}


class SelfCheck(NamedTuple):
    """What came out."""

    model: str
    """Its class."""
    logps: float
    """Largest difference of a token's log-prob, nats."""
    gradient: float
    """Largest difference of a parameter's gradient, as a share of it."""
    parameter: str
    """Which parameter that is."""
    digest: str
    """Of configuration, code and versions."""

    @classmethod
    def from_json(cls, found: JSON) -> Self:
        """What `write` wrote."""
        return cls(**found)

    def write(self, folder: Path) -> None:
        """Leaves it in a policy's folder."""
        write_json(folder / RECORD, self._asdict())


def of(folder: Path, trust_remote_code: bool) -> SelfCheck:
    """Of the model in a folder (no adapter's): as it lies there, as this process knows it, or made now.

    Raises:
        UserError: the model is not computed right, or cannot be tried.
    """
    model_support.refuse(folder)
    import_shims.prepare_transformers()
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError) as error:
        raise UserError(f"{folder / 'config.json'}: not of a model that transformers know ({_words(error)})") from error
    facts = config.to_dict()
    model_support.refuse(facts)
    digest = _digest(facts, folder)
    if digest not in _known:
        record = folder / RECORD
        found = SelfCheck.from_json(read_json(record)) if record.exists() else None
        if found is None or found.digest != digest:
            found = of_config(config, trust_remote_code)._replace(digest=digest)
        _known[digest] = found
    return _known[digest]


def of_config(config: Any, trust_remote_code: bool) -> SelfCheck:
    """Of a model of a configuration of transformers', made now.

    Raises:
        UserError: as `of`.
    """
    from rloo_pipeline.training.kernels import attention
    from rloo_pipeline.training.self_check import compare, small

    attention.register()
    window = model_support.limit(config.to_dict())
    kind, troubles = config.model_type, list[str]()
    for narrow in (True, False):
        try:
            copy = small.copy_of(config, narrow, window is None)
            found = compare.compare(copy, trust_remote_code, window.tokens if window else FAR)
        except UserError as error:
            raise UserError(f"{kind}: {error}") from error
        except small.TooLargeError as error:
            troubles.append(str(error))
            continue
        except Exception as error:
            troubles.append(_words(error))
            continue
        made = SelfCheck(found.model, found.logps, found.gradient, found.parameter, "")
        _judge(kind, made)
        return made
    raise UserError(
        f"{kind}: it cannot be tried on a small copy whether it is computed right ({'; '.join(troubles)}); take a "
        "model whose layers take transformers' attention interface"
    )


def _judge(kind: str, found: SelfCheck) -> None:
    """Raises where float32 does not explain what was found."""
    if not (found.logps <= LOGPS and found.gradient <= GRADIENT):  # NaN is no good either
        raise UserError(
            f"{kind} ({found.model}): packed, it is another model than in plain transformers (log-probs differ by "
            f"up to {found.logps:.2g} nats, the gradient of {found.parameter} by {found.gradient:.2g} of itself; "
            f"float32 explains {LOGPS:g} and {GRADIENT:g}); {model_support.OUTSIDE}, so take another model"
        )


def _digest(facts: JSON, folder: Path) -> str:
    """Of all that the outcome follows from."""
    own = Path(__file__).parent
    names = ("dropout", "layout", "logprobs", "packing", "model_support", "model_types")
    ours = [*(own.parent / f"{name}.py" for name in names), *sorted((own.parent / "kernels").glob("*.py"))]
    code = [*ours, *sorted(own.glob("*.py")), *sorted(folder.glob("*.py"))]
    told = {key: value for key, value in facts.items() if key not in PASSING}
    parts = [json.dumps(told, sort_keys=True, default=str), *(digest_of(file) for file in code)]
    parts += [version(name) for name in ("torch", "transformers")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _words(error: Exception) -> str:
    from rloo_pipeline.training.kernels import attention

    if isinstance(error, KeyError) and error.args == (attention.NAME,):
        return "it takes no attention from outside"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
