"""Lets other programs read the token ids of a policy as training does: from tokenizer.json.

With the class that tokenizer_config.json names, transformers may read other ids (see `tokenizer_file`).
"""

import json
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts import files
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.transformers_internals import tokenizer_file

PROBE = "Hello  world, it's 1234567\n\n\tcafe\u0301 \u4f60\u597d, \U0001f600! <b>I'LL</b>\n"
"""Text that tokenizers of different classes encode with different ids."""
UNCHECKED = "not checked that other programs read the tokenizer's ids as training does"


def keep(folder: Path, trust_remote_code: bool) -> None:
    """Names another class in tokenizer_config.json if transformers would read other ids with the one that stands there.

    Args:
        folder: a policy that is being written. A file that is linked to another folder's stays there as it is.
        trust_remote_code: `model.trust_remote_code`.
    """
    try:
        ids, theirs = _read(folder, trust_remote_code)
    except UserError as error:
        say(f"warn: {UNCHECKED}: {error}")
        return
    if theirs == ids:
        return
    file = folder / "tokenizer_config.json"
    text = file.read_text(encoding="utf-8") if file.exists() else "{}\n"
    content = json.loads(text)
    # before version 5, this class would also return token_type_ids, which language models do not take
    names = content.get("model_input_names", ["input_ids", "attention_mask"])
    content |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": names}
    files.write_text(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    if _read(folder, trust_remote_code) == (ids, ids):
        say(f"{file.name} names PreTrainedTokenizerFast, so that other programs read the token ids of tokenizer.json")
        return
    files.write_text(file, text)
    say(
        "warn: AutoTokenizer and vLLM read other token ids than those of tokenizer.json, with which this policy is "
        "trained; load the tokenizer with transformers' PreTrainedTokenizerFast.from_pretrained"
    )


def _read(folder: Path, trust_remote_code: bool) -> tuple[Any, Any]:
    """The ids and the text of PROBE as this package reads them, and as other programs do; None if they cannot.

    Raises:
        UserError: the tokenizer cannot be loaded.
    """
    ours = _encoded(Policy(folder, trust_remote_code))
    with tokenizer_file.as_in_other_programs():
        try:
            return ours, _encoded(Policy(folder, trust_remote_code))
        except UserError:
            return ours, None


def _encoded(policy: Policy) -> Any:
    ids = policy.tokenizer(PROBE)["input_ids"]
    return ids, policy.tokenizer.decode(ids)
