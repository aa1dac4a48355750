"""warmstart: the base model → policy 0, unchanged or trained on demonstrations first (SFT)."""

from pathlib import Path

from rloo_pipeline.artifacts import assets as asset_files
from rloo_pipeline.artifacts import lineage, model_files
from rloo_pipeline.artifacts.files import atomic_folder, link_or_copy
from rloo_pipeline.artifacts.manifest import folder_files
from rloo_pipeline.artifacts.policy import Policy, seal
from rloo_pipeline.before_run import checkpointing
from rloo_pipeline.config import Config
from rloo_pipeline.runtime import devices
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.training import model_support, plain_model, policy_model, self_check, tokenizer_ids
from rloo_pipeline.training.sft import sft


def warmstart(config: Config, assets: Path, prompts: Path, output: Path) -> None:
    """Writes policy 0; with SFT, every rank calls this.

    Args:
        config: the stage's configuration.
        assets: folder that `stage-assets` wrote.
        prompts: folder that `prompts` wrote.
        output: the policy.

    Raises:
        UserError: the model is incomplete or cannot be trained as configured, or no demonstrations are left.
    """
    if config.update.lora is not None and devices.device_type() == "cuda":
        model_support.check_dtype_on_gpu(config.model.dtype)  # otherwise the first adapter fails, after round 1
    model = Policy(asset_files.model_of(assets), config.model.trust_remote_code)
    model_support.check_run(config, model)
    model_files.check_finite(model.weights)
    result = self_check.load_or_run(model, config.dataset.shows_images)
    policy_model.check_layers_of_run(config, model, result.form)
    if (section := config.warmstart.sft) is not None:
        sft(checkpointing.resolve(config, model.dimensions, section.optimizer), section, model, assets, prompts, output)
        return
    if config.model.quantization is None:  # otherwise they are loaded below
        plain_model.check_tensors(model)
    model.tokenizer  # noqa: B018, fails here where it cannot be loaded
    with atomic_folder(output) as temporary:
        if config.model.quantization is not None:
            from rloo_pipeline.training import quantized

            quantized.write_rounded(model, temporary, config.model.dtype)
            policy_model.copy_side_files(model.folder, temporary)
        else:
            for file in folder_files(model.folder):
                if file.suffix not in model_files.PICKLES:
                    link_or_copy(file, temporary / file.relative_to(model.folder))
            (temporary / model_files.SELF_CHECK).unlink(missing_ok=True)  # may be hard-linked to the model's
        result.write(temporary)
        tokenizer_ids.keep(temporary, config.model.trust_remote_code)
        seal(temporary, output.name, seed=config.seed, assets=lineage.assets_digest(assets))
    change = f"rounded to {config.model.quantization}" if config.model.quantization else "unchanged"
    say(f"policy 0 is {model}, {change}")
