"""export: copies a policy to a standalone folder that transformers and vLLM can load without the run and without
PEFT.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts import files, manifest
from rloo_pipeline.artifacts.model_files import POLICIES
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import guard
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.transformers_internals import tokenizer_file

PROBE = "Hello  world, it's 1234567\n\n\tcafe\u0301 \u4f60\u597d, \U0001f600! <b>I'LL</b>\n"
"""Text that tokenizers of different classes encode with different ids."""


def export(config: Config, run: Path, output: Path, merge: bool, number: int | None = None) -> None:
    """Writes a policy of a run to a standalone folder.

    Args:
        config: the run's configuration.
        run: the run's folder.
        output: folder to write; it must not exist.
        merge: add an adapter to the weights of its base, in float32, and round the sum to `model.dtype`.
        number: number of the policy; the last one if None.

    Raises:
        UserError: the policy does not exist or is damaged, `merge` is needed or impossible, or the output exists.
    """
    folders = sorted(folder for folder in (run / POLICIES).glob("[0-9]*") if folder.name.isdigit())
    folder = folders[-1] if folders and number is None else run / POLICIES / f"{number or 0:05d}"
    if not folder.is_dir():
        raise UserError(f"{folder}: no such policy; pass the folder of a run, results/<run>, and a policy that it kept")
    if output.exists():
        raise UserError(f"{output}: exists; name a new folder")
    policy = Policy(folder, config.model.trust_remote_code)
    policy.verify()
    if policy.is_adapter and not merge:
        raise UserError(f"{folder}: an adapter, which only works together with its base; add --merge")
    with files.atomic_folder(output) as target:
        if policy.is_adapter:
            _merge(policy, config.model.dtype, target)
        else:
            for name in manifest.file_names(folder):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(folder / name, target / name)  # without its mode, which may forbid writing
        _keep_ids(target, config.model.trust_remote_code)
    say(f"wrote {folder} to {output}")


def _keep_ids(folder: Path, trust_remote_code: bool) -> None:
    """Names another class in tokenizer_config.json if transformers, with the class that stands there, would read other
    token ids than those of tokenizer.json, with which the policy was trained.
    """
    if not guard.is_installed("transformers"):  # in the environment of a light controller
        say("warn: not checked that other programs read the tokenizer's ids as training did: transformers is missing")
        return
    try:
        if _has_equal_ids(folder, trust_remote_code):
            return
    except UserError as error:
        say(f"warn: not checked that other programs read the tokenizer's ids as training did: {error}")
        return
    file = folder / "tokenizer_config.json"
    content = files.read_json(file) if file.exists() else {}
    # before version 5, this class would also return token_type_ids, which language models do not take
    names = content.get("model_input_names", ["input_ids", "attention_mask"])
    content |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": names}
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if _has_equal_ids(folder, trust_remote_code):
        say(f"{file.name} names PreTrainedTokenizerFast, so that other programs read the token ids of tokenizer.json")
    else:
        say(
            "warn: AutoTokenizer and vLLM read other token ids than those of tokenizer.json, with which this policy "
            "was trained; load the tokenizer with transformers' PreTrainedTokenizerFast.from_pretrained"
        )


def _has_equal_ids(folder: Path, trust_remote_code: bool) -> bool:
    """True if transformers in other programs encodes and decodes text with this tokenizer as this package does.

    Raises:
        UserError: the tokenizer cannot be loaded.
    """
    ours = Policy(folder, trust_remote_code).tokenizer
    with tokenizer_file.as_in_other_programs():
        try:
            theirs = Policy(folder, trust_remote_code).tokenizer
        except UserError:
            return False
    ids = ours(PROBE)["input_ids"]
    return bool(theirs(PROBE)["input_ids"] == ids and theirs.decode(ids) == ours.decode(ids))


def _merge(policy: Policy, dtype: str, target: Path) -> None:
    """Writes the base model with the policy's adapter merged into its weights.

    Raises:
        UserError: the adapter is on one of two layers that share weights, so it cannot be merged.
    """
    import torch

    from rloo_pipeline.training import plain_model, policy_model, weight_files

    model: Any = plain_model.load_plain(policy, "float32")
    ends = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    last = {name.rpartition(".")[2] for name in policy.adapter_modules}
    if ends[0] is ends[1] and (shared := last & {"lm_head", "embed_tokens"}):
        raise UserError(
            f"{policy}: its adapter is on {min(shared)}, which shares its weights with another layer, so it cannot be "
            "merged; load it with PEFT"
        )
    merged = plain_model.load_adapter(model, policy).merge_and_unload().to(getattr(torch, dtype))
    merged.config.dtype = getattr(torch, dtype)
    policy_model.save_beside(merged, target, policy)
    weight_files.write_together(merged, target)
