"""Checks a model by its config.json: it exists, can be trained, and has the context length that the run needs."""

import io
import shlex
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts import model_dims, model_files, vision
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.before_run import dataset_inputs
from rloo_pipeline.config import Config, Dataset, ModelSource, distillation
from rloo_pipeline.data import building
from rloo_pipeline.errors import UserError
from rloo_pipeline.training import model_support


def local_model(model: ModelSource, key: str = "model") -> Path | None:
    """The model's folder if the configuration names a local one; None if it is on the Hub or built by a function.

    Args:
        model: configuration section of the model.
        key: key of that section, for messages.

    Raises:
        UserError: the name is the path of a folder that is missing or has no config.json.
    """
    name = model.name_or_path
    if name is None:
        return None
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").exists():
            what = "no config.json, so this is not a model folder"
            if (path / model_files.ADAPTER).exists():
                merge = "`rloo export RUN --merge --out MODEL`"
                what = f"an adapter on another model; merge it into that model (if a run made it: {merge})"
            raise UserError(f"{name}: {what} ({key}.name_or_path)")
        return path
    dataset_inputs.require_hub_name(name, path, f"{key}.name_or_path")
    return None


def model_folder(model: ModelSource, key: str = "model") -> Path | None:
    """The folder with the model's config.json, local or in the Hub's cache; None if a function builds the model or it
    is not downloaded yet.

    Arguments and errors are as for `local_model`.
    """
    folder, name = local_model(model, key), model.name_or_path
    return folder if folder is not None or name is None else model_files.here(name, model.revision)


def shape(config: Config, asset: str = "model") -> model_dims.ModelDims:
    """The dimensions of the model. If a function builds the model and it is not an asset yet, it is built to read them.

    Raises:
        UserError: the model is not on this machine, cannot be trained, or lacks the dimensions of a transformer.
    """
    assets = Path("results") / config.run / "assets" / asset
    source = model_folder(config.model) if config.model.build is None else assets
    if source is None:
        raise UserError(
            f"{config.model.name_or_path}: neither a folder nor in the Hub's cache; planning needs only its "
            f"config.json, so download that where there is internet: {fetch_config(config.model)}"
        )
    if config.model.build is None or (assets / "config.json").exists():
        return _trainable_shape(config, source)
    with tempfile.TemporaryDirectory() as folder:
        try:
            build(config, Path(folder))
        except ImportError as error:
            raise UserError(f"{config.model.build} needs the environment of the stages ({error})") from error
        with building.named_in_errors(config.model, Path(folder)):
            return _trainable_shape(config, Path(folder))._replace(source=config.model.build)


def build(config: Config, folder: Path) -> None:
    """Builds the model into a folder, without the messages that libraries print."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        building.build(config.model, config.seed, config.data_dir, folder)


def teacher_shape(config: Config) -> model_dims.ModelDims | None:
    """The dimensions of the largest teacher; None without a teacher, or if a teacher is not on this machine yet.

    Raises:
        UserError: as for `local_model`.
    """
    shapes = []
    for name, of_teacher in config.teachers.items():
        built = Path("results") / config.run / "assets" / distillation.asset_of(name)
        folder = built if of_teacher.model.build else model_folder(of_teacher.model, distillation.key_of(name))
        if folder is None or not (folder / "config.json").exists():
            return None
        shapes.append(model_dims.read(folder, Policy(folder).config))
    return max(shapes, key=lambda shape: shape.parameters, default=None)


def _trainable_shape(config: Config, folder: Path) -> model_dims.ModelDims:
    model = Policy(folder)
    model_support.check_run(config, model)
    check_sampler(config, model)
    return model_dims.read(folder, model.config)


def check_model(config: Config, model: Policy) -> None:
    """Checks from config.json that a model can be sampled and trained as configured.

    Raises:
        UserError: the folder contains a pipe, socket or device, the model is not supported in training, or its context
            is too short even for completions alone.
    """
    model_files.check_files(model.folder)
    model_support.check_run(config, model)
    check_images(config.dataset, model.config, str(model.config_file))
    check_context(config, model.config, 1, str(model))


def check_sampler(config: Config, model: Policy) -> None:
    """Checks that vLLM can split the model over `vllm.tensor_parallel_size` GPUs, and that its context is as long as
    `evaluation.harness` needs; raises UserError if not.
    """
    parts = config.vllm.tensor_parallel_size
    heads = int(model.text_config.get("num_attention_heads") or parts)
    model_support.check_heads(heads, parts, model.config_file, "GPUs of vllm.tensor_parallel_size")
    longest = config.evaluation.harness.max_model_len if config.evaluation.harness else None
    if longest is not None and model.context is not None and longest > model.context:
        raise UserError(
            f"{model}: the model's context is {model.context} tokens; lower evaluation.harness.max_model_len "
            f"({longest}), or leave it out"
        )


def check_teacher(config: Config, teacher: Policy, student: Policy) -> None:
    """Checks that a teacher can score the student's samples.

    Args:
        config: one of `config.teachers`.
        teacher: the teacher.
        student: the model to train.

    Raises:
        UserError: as for `check_model`; or the teacher's tokenizer has no id or a different id for a token of the
            student; or the teacher has fewer tokens than `top_k`.
    """
    distillation.require_vocabulary(config.algorithm.teacher_top_k, teacher.vocabulary, str(teacher))
    check_model(config.override({"update.lora": None}), teacher)
    ids, teacher_ids = (model.tokenizer.get_vocab() for model in (student, teacher))
    others = sorted(token for token, id_ in ids.items() if teacher_ids.get(token) != id_)
    if others:
        raise UserError(
            f"{teacher}: algorithm.teacher scores the student's token ids, but {len(others)} of {len(ids)} tokens have "
            f"a different id or none in its tokenizer, such as {others[0]!r}; name a teacher with the tokenizer of "
            f"{student}"
        )


def check_images(dataset: Dataset, hf_config: dict[str, Any], path: str) -> None:
    """Checks that a run with images has an image model that training supports.

    Raises:
        UserError: it is not.
    """
    if dataset.shows_images and not vision.takes_images(hf_config):
        raise UserError(
            f"{path}: dataset.image_column is set, but {hf_config.get('model_type')} is not a supported image "
            f"model ({', '.join(vision.KINDS)}); use one of these, or leave the key out"
        )


def check_context(config: Config, hf_config: dict[str, Any], longest_prompt: int, path: str) -> None:
    """Checks that prompts and completions fit into the model's context.

    Args:
        config: the run's configuration.
        hf_config: the model's config.json.
        longest_prompt: length of the longest prompt in tokens; 1 if unknown.
        path: file or folder that the message names.

    Raises:
        UserError: they do not fit.
    """
    context = model_dims.context(hf_config)
    for key, tokens in completion_lengths(config).items():
        if context is not None and longest_prompt + tokens > context:
            prompt = "a prompt" if longest_prompt == 1 else f"the longest prompt ({longest_prompt} tokens)"
            raise UserError(
                f"{path}: the model's context is {context} tokens, too few for {prompt} and {key} ({tokens}); lower "
                f"{key}{'' if longest_prompt == 1 else ' or dataset.max_prompt_length'}, or use a model with a longer "
                "context"
            )


def completion_lengths(config: Config) -> dict[str, int]:
    """Maximum completion lengths in tokens, by their configuration key."""
    lengths = {"rollout.max_completion_length": config.rollout.max_completion_length}
    if config.evaluation.max_completion_length is not None:
        lengths["evaluation.max_completion_length"] = config.evaluation.max_completion_length
    return lengths


def tight_context(config: Config, hf_config: dict[str, Any]) -> str:
    """A note if prompts of maximum length would not fit into the context, otherwise an empty string.

    This is not an error, since only the stage `prompts` knows the real lengths.
    """
    context, longest = model_dims.context(hf_config), max(completion_lengths(config).values())
    if context is None or longest + config.dataset.max_prompt_length <= context:
        return ""
    return (
        f"the model's context is {context} tokens: with completions of {longest} there is room for prompts of "
        f"{context - longest}, but dataset.max_prompt_length ({config.dataset.max_prompt_length}) allows longer ones"
    )


def fetch_config(model: ModelSource) -> str:
    """A command that downloads only the config.json of a Hub model."""
    revision = ["--revision", model.revision] if model.revision else []
    return shlex.join(["hf", "download", str(model.name_or_path), "config.json", *revision])
