"""Before a model trains or scores, chooses the form of batch in which it computes what plain transformers computes.

The check runs once per model configuration, on a small copy with that configuration (`small`), in float32 on the CPU
(`against_plain`), and takes the first form of `batch_forms` that is right. Its result is stored beside the weights as
`self_check.json` and copied from policy to policy, so that later rounds and stages only read it. It is valid for one
configuration, this code and these library versions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts.manifest import digest as digest_of
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import JSON
from rloo_pipeline.errors import UserError, one_line
from rloo_pipeline.training import model_support
from rloo_pipeline.training.batch_forms import FORMS, Packed
from rloo_pipeline.training.kernels import attention
from rloo_pipeline.training.self_check import against_plain, small
from rloo_pipeline.training.self_check.against_plain import SelfCheck
from rloo_pipeline.training.self_check.small import Unsuitable

LOGPS, GRADIENT = 1e-3, 1e-2
"""Largest differences that float32 rounding explains: nats of a log-prob, and relative error of a parameter's gradient.
Correct models stay below a tenth of these, wrong ones exceed them a hundredfold (tests/families).
"""
IMAGES = "prompts with images are not packed"
IGNORED_KEYS = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
"""Configuration keys that do not change a float32 result."""
Prepare = Callable[[Any], None]
_results: dict[str, SelfCheck] = {}


def load_or_run(policy: Policy, images: bool | None = None) -> SelfCheck:
    """The result for a full model, or the base of an adapter: from memory, from its file, or from a check run now.

    Args:
        policy: the model.
        images: True if the run's prompts have images; None reads it from the file (False without a file).

    Raises:
        UserError: the check fails or cannot run.
    """
    model_support.check_model(policy.config, file=policy.config_file)
    hf_config = policy.transformers_config.to_dict()
    model_support.check_model(hf_config)
    result = SelfCheck(**policy.self_check) if policy.self_check else None
    if images is None:
        images = result is not None and result.images
    digest = _digest(hf_config, policy.base, images)
    if digest not in _results:
        if result is None or result.digest != digest:
            result = run(policy.transformers_config, policy.trust_remote_code, images)._replace(digest=digest)
        _results[digest] = result
    return _results[digest]


def run(
    config: Any,
    trust_remote_code: bool,
    images: bool = False,
    forms: Sequence[Packed] = (),
    prepare: Prepare | None = None,
) -> SelfCheck:
    """Runs the check for a transformers configuration; the result has no digest yet.

    Args:
        config: the model's configuration.
        trust_remote_code: allows the model's own code to run.
        images: True if prompts have images.
        forms: the forms to try; all by default.
        prepare: moves the small model to its device, and installs the kernels that are to be checked.

    Raises:
        UserError: see `load_or_run`.
    """
    attention.register()
    kind, problems = config.model_type, list[str]()
    for shrink in small.Shrink:
        try:
            plain = against_plain.PlainModel(config, shrink, trust_remote_code, images)
        except Exception as error:
            problems.append(_summary(error))
            continue
        if not plain.causal_within <= LOGPS:
            raise UserError(
                f"{kind}: it does not attend causally (a log-prob changes by {plain.causal_within:.2g} nats with the "
                "tokens after it), so it cannot be sampled from; use another model"
            )
        problems = [IMAGES] if images else []  # reasons against the faster forms
        for form in forms or [form for form in FORMS.values() if not (images and form.name == Packed.name)]:
            try:
                result = _checked_form(plain, form, prepare)
            except Exception as error:
                problems.append(_summary(error))
            else:
                return result._replace(why="; ".join(dict.fromkeys(problems)), images=images)
    raise UserError(
        f"{kind}: no form of batch gives what plain transformers gives for a sequence alone "
        f"({'; '.join(dict.fromkeys(problems))}); use another model"
    )


def _checked_form(plain: against_plain.PlainModel, form: Packed, prepare: Prepare | None) -> SelfCheck:
    """The result for a form that is right; raises `Unsuitable` for another one."""
    result = plain.compare(form, prepare)
    if result.logps <= LOGPS and result.gradient <= GRADIENT:  # not NaN
        return result
    raise Unsuitable(
        f"{form.name}, log-probs differ by up to {result.logps:.2g} nats and the gradient of "
        f"{result.parameter} by {result.gradient:.2g} of itself"
    )


def _digest(hf_config: JSON, folder: Path, images: bool) -> str:
    """Digest of everything that the result depends on."""
    here = Path(__file__).parent
    names = ("batch_forms", "layout", "logprobs", "packing", "plain_model", "model_support")
    ours = [*(here.parent / f"{name}.py" for name in names), *sorted((here.parent / "kernels").glob("*.py"))]
    ours += [here.parents[1] / "artifacts" / f"{name}.py" for name in ("model_dims", "vision")]
    code = [*ours, *sorted(here.glob("*.py")), *sorted(folder.glob("*.py"))]
    relevant = {key: value for key, value in hf_config.items() if key not in IGNORED_KEYS}
    parts = [json.dumps(relevant, sort_keys=True, default=str), *(digest_of(file) for file in code)]
    parts += [version(name) for name in ("torch", "transformers")] + ["images"] * images
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _summary(error: Exception) -> str:
    if isinstance(error, UserError | Unsuitable):
        return str(error)
    if isinstance(error, KeyError) and error.args == (attention.NAME,):
        return "it does not support custom attention functions"
    return f"{type(error).__name__}: {one_line(error)}"
