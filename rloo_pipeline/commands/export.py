"""export: copies a policy to a standalone folder that transformers and vLLM can load without the run and without
PEFT.
"""

import shutil
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts import files, manifest
from rloo_pipeline.artifacts.model_files import POLICIES, policy_folder
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import guard
from rloo_pipeline.runtime.import_shims import hidden_packages
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.training import tokenizer_ids


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
    folder = folders[-1] if folders and number is None else policy_folder(run, number or 0)
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
            with hidden_packages("deepspeed"):  # which warns that there is no GPU
                _merge(policy, config.model.dtype, target)
        else:
            for name in manifest.file_names(folder):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(folder / name, target / name)  # without its mode, which may forbid writing
        if guard.is_installed("transformers"):
            tokenizer_ids.keep(target, config.model.trust_remote_code)
        else:  # in the environment of a light controller
            say(f"warn: {tokenizer_ids.UNCHECKED}: transformers is missing")
    say(f"wrote {folder} to {output}")


def _merge(policy: Policy, dtype: str, target: Path) -> None:
    """Writes the base model with the policy's adapter merged into its weights.

    Raises:
        UserError: the adapter is on one of two layers that share weights, so it cannot be merged.
    """
    import torch
    import transformers

    from rloo_pipeline.training import plain_model, policy_model, weight_files

    transformers.logging.disable_progress_bar()
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
