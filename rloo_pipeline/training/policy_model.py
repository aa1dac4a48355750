"""Loads and saves the model of a policy."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from rloo_pipeline.artifacts import manifest, vision
from rloo_pipeline.artifacts.model_files import GENERATION, INDEX, PICKLES, WEIGHTS
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import JSON, Config, Lora
from rloo_pipeline.errors import UserError, did_you_mean, one_line
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.training import batch_forms, faster_kernels, model_support, plain_model, self_check, tokenizer_ids
from rloo_pipeline.training.deepspeed_internals import split_model
from rloo_pipeline.training.kernels import attention
from rloo_pipeline.training.self_check.against_plain import SelfCheck
from rloo_pipeline.training.settings import TrainerSettings
from rloo_pipeline.transformers_internals.router_replay import RouterReplay

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load(
    policy: Policy,
    dtype: str,
    disable_dropout: bool = True,
    split: JSON | None = None,
    quantization: Literal["nf4"] | None = None,
    recomputes: bool = False,
) -> PreTrainedModel:
    """Loads the full model of a policy, or the base of its adapter, for the form of batch that the self-check chose.

    Args:
        policy: the policy.
        dtype: number format of the weights.
        disable_dropout: sets the dropout of the model's own config.json to 0, in training too.
        split: DeepSpeed's configuration with ZeRO 3, to split the model over the ranks from the start where it can be.
        quantization: holds linear layers in 4 bits; the policy must have been rounded to them.
        recomputes: stores only the inputs of the layers for the backward pass.

    Raises:
        UserError: the folder is incomplete, the architecture is unknown, or no form of batch is right for it.
    """
    checked = self_check.load_or_run(policy)
    attention.register()
    if checked.slow:
        say(f"{checked.model} trains in {checked.slow}")
    options = {"attn_implementation": batch_forms.FORMS[checked.form].attention}
    if quantization is not None:
        model = plain_model.load_nf4(policy, dtype, **options)
    elif split is not None and (unread := plain_model.load_one_by_one(policy, dtype, **options)):
        model, parameters = unread
        split_model.split_each(parameters, split)
    else:
        model = plain_model.load_plain(policy, dtype, **options)
    if disable_dropout:
        plain_model.remove_dropout(model)
    if recomputes:
        plain_model.recompute_layers(model)
    model.self_check = checked  # type: ignore[assignment]
    faster_kernels.install(model, policy, checked)
    return model


def load_trainable(policy: Policy, settings: TrainerSettings, split: JSON | None = None) -> Any:
    """Loads a policy for training: all weights, or with `settings.lora` the base with its adapter or a new one.

    `split` is as in `load`.

    Raises:
        UserError: see `load`; or a new adapter names a layer that the model lacks.
    """
    recomputes = settings.deepspeed.recomputes
    model: Any = load(policy, settings.dtype, settings.disable_dropout, split, settings.quantization, recomputes)
    if not settings.train_vision and vision.takes_images(model.config.to_dict()):
        _freeze_vision(model)
    if settings.lora is None:
        return model.train()
    if not policy.is_adapter:
        return _with_adapter(model, settings.lora).train()
    return plain_model.load_adapter(model, policy, trainable=True).train()


def check_layers(policy: Policy, lora: Lora | None, zero_stage: int = 0) -> None:
    """Checks before sampling that a full model has the layers that get an adapter, and none that ZeRO 3 cannot train.

    Raises:
        UserError: layers are missing, PEFT cannot make an adapter for them, vLLM cannot serve the adapter, or as
            `plain_model.check_gathered`.
    """
    if lora is None and zero_stage != 3:
        return
    model = plain_model.without_weights(policy)
    if zero_stage == 3:
        plain_model.check_gathered(model, policy)
    if lora is None:
        return
    adapted = _with_adapter(model, lora, low_cpu_mem_usage=True)
    if lora.is_pattern:
        names = {name.rpartition(".")[2] for name in adapted.targeted_module_names}
        model_support.check_lora(policy, lora.model_copy(update={"target_modules": sorted(names)}))


def check_layers_of_run(config: Config, policy: Policy, form: str) -> None:
    """As `check_layers`, for a run whose policy trains in this form of batch.

    Raises:
        UserError: as for `check_layers`, or vLLM would look for the adapter's layers under other names, or the layers
            cannot replay the sampler's experts or be compiled.
    """
    check_layers(policy, config.update.lora, config.deepspeed.zero_stage)
    if config.update.lora and not config.warmstart.sft and not config.model.quantization:
        _check_architecture(policy)
    if config.rollout.router_replay or config.update.torch_compile:
        model = plain_model.without_weights(policy)
        if config.rollout.router_replay:
            RouterReplay(model, model.config.get_text_config().num_hidden_layers).require(form)
        if config.update.torch_compile:
            faster_kernels.require_compilable(model, form)


def _check_architecture(policy: Policy) -> None:
    """Checks that vLLM and the trainer give the same names to the layers of a base that stays as it is."""
    architecture = str(next(iter(policy.config.get("architectures") or ()), ""))
    ours = type(plain_model.without_weights(policy)).__name__
    if architecture.endswith("ForConditionalGeneration") and architecture != ours:
        raise UserError(
            f"{policy.config_file}: an adapter would be for {ours}, the language model alone, whose layers vLLM does "
            f"not find in {architecture}; remove update.lora, or write the language model alone to a folder "
            "(AutoModelForCausalLM.from_pretrained, then save_pretrained) and use that"
        )


def _with_adapter(model: PreTrainedModel, lora: Lora, low_cpu_mem_usage: bool = False) -> Any:
    """Adds a new adapter to the model."""
    import peft

    _check_targets(model, lora)
    config = peft.LoraConfig(task_type="CAUSAL_LM", **lora.model_dump(), exclude_modules=_beside_language_model(model))
    try:
        return peft.get_peft_model(model, config, autocast_adapter_dtype=False, low_cpu_mem_usage=low_cpu_mem_usage)
    except ValueError as error:
        raise UserError(
            f"update.lora.target_modules: PEFT cannot make an adapter for {lora.target_modules} ({one_line(error)}); "
            "name other modules"
        ) from error


def _check_targets(model: nn.Module, lora: Lora) -> None:
    """Checks that the model has each layer that an adapter names; PEFT ignores a missing one if it finds others.

    Raises:
        UserError: the model has no layer of such a name.
    """
    if isinstance(lora.target_modules, str):
        return
    from transformers import Conv1D

    beside = re.compile(_beside_language_model(model) or r"(?!)")
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Embedding, Conv1D)) and not beside.fullmatch(name)
    ]
    for name in lora.target_modules:
        if not any(f".{layer}".endswith(f".{name}") for layer in layers):
            last = sorted({layer.rpartition(".")[2] for layer in layers})
            raise UserError(
                f"update.lora.target_modules: the model has no layer '{name}'{did_you_mean(name, last)}; "
                f"there are {', '.join(last)}"
            )


def _beside_language_model(model: Any) -> str | None:
    """A pattern of the modules that get no adapter, such as a vision encoder; None for a text model."""
    if model.config.get_text_config() is model.config:
        return None
    decoder = model.get_decoder()
    names = [re.escape(name) for name, module in model.named_modules() if module is decoder]
    return rf"(?!({'|'.join(names)}|lm_head)(\.|$)).*"


def _freeze_vision(model: Any) -> None:
    """Freezes everything except the language model: the vision encoder and its projector."""
    trained = {*model.base_model.language_model.parameters(), *model.get_output_embeddings().parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in trained)


def save_beside(model: PreTrainedModel, target: Path, previous: Policy) -> None:
    """Writes all files of a policy except its weights (`weight_files.py`): the configuration, and the tokenizer and
    other files of the previous policy. Call it before weights are written: transformers removes weights that it finds.

    Args:
        model: the model, for its configuration.
        target: empty folder to write to.
        previous: the previous policy, or an adapter on it.
    """
    _save_configuration(model, target, previous)
    (target / WEIGHTS).unlink(missing_ok=True)
    checked = getattr(model, "self_check", None)
    if isinstance(checked, SelfCheck):
        checked.write(target)
    copy_side_files(previous.base, target)
    if not (previous.base / manifest.MANIFEST).exists():  # a model, whose tokenizer no policy has taken over yet
        tokenizer_ids.keep(target, previous.trust_remote_code)


def _save_configuration(model: PreTrainedModel, target: Path, previous: Policy) -> None:
    """Does what `model.save_pretrained` does without weights.

    A policy's file of generation defaults stays as it is: a model may not have read it, and transformers would refuse
    to write some that it reads, such as a temperature without `do_sample`. A policy without the file gets one with the
    defaults of its config.json, and with the end tokens of the previous policy.
    """
    from transformers import GenerationConfig

    defaults: Any = getattr(model, "generation_config", None)
    model.generation_config = GenerationConfig()
    model.save_pretrained(target, state_dict={})
    model.generation_config = defaults
    if (previous.base / GENERATION).exists():
        (target / GENERATION).unlink(missing_ok=True)
    elif defaults is not None and (target / GENERATION).exists():
        ends = previous.stop_ids
        defaults.eos_token_id = ends if len(ends) > 1 else ends[0]
        defaults.to_json_file(target / GENERATION, keys_to_pop=["compile_config"])


def copy_side_files(source: Path, target: Path) -> None:
    """Copies a policy's files other than its weights: tokenizer, chat template, generation defaults, remote code.

    Files that exist in `target` stay.
    """
    for file in sorted(source.iterdir()):
        heavy = file.suffix in {".safetensors", ".gguf", ".h5", ".msgpack", *PICKLES} or file.name == INDEX
        if file.is_file() and not heavy and not file.name.startswith(".") and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)
