"""Checks a run's model, and a user's loss and estimator, for `rloo check`. Loads them as the stages do."""

from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from rloo_pipeline import import_string
from rloo_pipeline.artifacts import model_files
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.before_run import model_inputs, node_checks
from rloo_pipeline.before_run.findings import Finding, RunInputs, problems_of
from rloo_pipeline.config import Algorithm, Rollout, distillation
from rloo_pipeline.data import building
from rloo_pipeline.errors import UserError, one_line
from rloo_pipeline.rollout import engine_arguments
from rloo_pipeline.runtime import devices
from rloo_pipeline.training import model_support, plain_model, policy_model, self_check, sequence_group

READ = 4 << 30
"""Maximum bytes of weights that `check` reads to look for non-finite values."""
STEP, TOLERANCE = 1e-6, 1e-5
"""Step of finite differences in float64, and the largest error in a derivative that rounding can explain."""
PROVEN = "its gradient is the derivative of its value, in float64"
DETACHED = "its gradient is not the derivative of its value; this is right only if you detach a factor on purpose"


def model(inputs: RunInputs) -> Iterator[Finding]:
    """Checks that the model can be trained as configured; sets `model`."""
    with problems_of("model") as problems, building.named_in_errors(inputs.config.model, inputs.scratch / "model"):
        found = _model(inputs)
        if found is None:
            name = inputs.config.model.name_or_path
            message = f"{name} is neither a folder here nor in the Hub's cache yet, so it was not checked"
            yield Finding("model", True, message, note=True)
        else:
            yield _finding(inputs, found)
            inputs.model = found
    yield from problems


def weights(inputs: RunInputs) -> Iterator[Finding]:
    """Checks that the weights are complete safetensors files with exactly the model's tensors, as `warmstart`
    requires.
    """
    config = inputs.config
    if inputs.model is None:
        return
    folder = inputs.model.folder
    is_local = config.model.build is not None or Path(str(config.model.name_or_path)).is_dir()
    if not is_local and not any(folder.glob("*.safetensors")):
        yield Finding("weights", True, "not in the Hub's cache yet, so they were not checked", note=True)
        return
    with problems_of("weights") as problems:
        import transformers

        files = inputs.model.weights
        inputs.model.vocabulary  # noqa: B018, fails if config.json has none
        size = sum(file.stat().st_size for file in files)
        if size <= READ:
            model_files.check_finite(files)
        if config.model.quantization is None:
            transformers.logging.set_verbosity_error()
            transformers.logging.disable_progress_bar()
            plain_model.check_tensors(inputs.model)
        values = "" if size <= READ else "; `warmstart` reads them and looks for values that are not finite"
        yield Finding("weights", True, f"{node_checks.size_of(size)}, all tensors of the model{values}")
    yield from problems


def machine(inputs: RunInputs) -> Iterator[Finding]:
    """Checks that this machine can train and sample the model. Yields only notes, since stages may run on other
    machines.
    """
    for finding in node_checks.machine(inputs.config):
        yield finding._replace(ok=True, note=not finding.ok)
    if inputs.model is None:
        return
    dtype, rollout = inputs.config.model.dtype, inputs.config.rollout
    with problems_of("sampling") as problems:
        if devices.has_gpu():
            if inputs.config.update.lora is not None:
                model_support.check_dtype_on_gpu(dtype)
            if inputs.config.reproducible:
                engine_arguments.check_invariant(inputs.model, rollout.quantization)
        else:
            engine_arguments.check_on_cpu(inputs.model, dtype, rollout.quantization, rollout.router_replay)
            engine_arguments.check_configured_heads(inputs.model)
    for finding in problems:
        yield finding._replace(ok=True, note=True)


def tokenizer(inputs: RunInputs) -> Iterator[Finding]:
    """Checks that tokenizer and processor can be loaded; unsets `model` if not."""
    if inputs.model is None:
        return
    config, found, inputs.model = inputs.config, inputs.model, None
    with problems_of("model") as problems:
        found.stop_ids  # noqa: B018, fails if they cannot be read
        yield Finding("tokenizer", True, f"{len(found.tokenizer)} tokens, end token {found.tokenizer.eos_token}")
        if config.dataset.shows_images:
            yield Finding("images", True, f"{type(found.processor.image_processor).__name__} of the model")
        inputs.model = found
    yield from problems


def sampling(inputs: RunInputs) -> Iterator[Finding]:
    """Checks that vLLM takes the values of `rollout.generation_kwargs`."""
    rollout = inputs.config.rollout
    if inputs.model is None or rollout.generation_kwargs is None:
        return
    with problems_of("sampling") as problems:
        from rloo_pipeline.rollout import groups

        groups.check_kwargs(inputs.model, rollout)
        yield Finding("sampling", True, "vLLM takes rollout.generation_kwargs")
    yield from problems


def teacher(inputs: RunInputs) -> Iterator[Finding]:
    """Checks that teachers can score the model's tokens. If a function builds a teacher, it is only looked up, since
    building takes long.
    """
    if inputs.model is None:
        return
    for name, config in inputs.config.teachers.items():
        with problems_of("teacher") as problems:
            folder, source = model_inputs.model_folder(config.model, distillation.key_of(name)), config.model
            if source.build is not None:
                import_string.check(source.build)
                yield Finding("teacher", True, f"{source.build} builds it in the first job, which checks it", note=True)
            elif folder is None:
                message = f"{source.name_or_path} is not in the Hub's cache yet, so it was not checked"
                yield Finding("teacher", True, message, note=True)
            else:
                model_inputs.check_teacher(config, Policy(folder, source.trust_remote_code), inputs.model)
                yield Finding("teacher", True, f"{source.name_or_path}: has the model's token ids")
        yield from problems


def _model(inputs: RunInputs) -> Policy | None:
    """Checks and returns the model; None if it is not downloaded yet."""
    config = inputs.config
    folder = model_inputs.model_folder(config.model)
    if config.model.build is not None:
        folder = inputs.scratch / "model"
        model_inputs.build(config, folder)
    if folder is None:
        return None
    found = Policy(folder, config.model.trust_remote_code)
    model_inputs.check_model(config, found)
    model_inputs.check_sampler(config, found)
    return found


def _finding(inputs: RunInputs, found: Policy) -> Finding:
    config = inputs.config
    name = config.model.name_or_path or f"built by {config.model.build}"
    context = found.context or "unknown"
    checked = self_check.load_or_run(found, config.dataset.shows_images)
    policy_model.check_layers_of_run(config, found, checked.form)
    if config.deepspeed.sequence_parallel > 1 and checked.slow:
        raise sequence_group.refusal(checked.model, f"trains in {checked.form} batches")
    slow = f", {checked.slow}" if checked.slow else ""
    return Finding(
        "model", True, f"{name}: {found.config.get('model_type')}, context {context}, {config.model.dtype}{slow}"
    )


def own_functions(inputs: RunInputs) -> Iterator[Finding]:
    """Tries the user's loss and advantage estimator on random numbers."""
    algorithm = inputs.config.algorithm
    if (loss := algorithm.loss) is not None:
        from rloo_pipeline.training import objective

        yield from _tried("loss", loss, lambda: try_loss(loss, objective.own_loss(loss)))
    if ":" in algorithm.advantage:
        yield from _tried("advantage", algorithm.advantage, lambda: try_estimator(algorithm, inputs.config.rollout))


def _tried(key: str, name: str, trial: Callable[[], str]) -> Iterator[Finding]:
    with problems_of(key) as problems:
        try:
            note = trial()
        except UserError:
            raise
        except Exception as error:
            message = one_line(f"{type(error).__name__}: {error}", 200)
            raise UserError(f"algorithm.{key}: {name} raised {message}; correct it") from error
        yield Finding(key, True, f"{name}: {note}", note=note == DETACHED)
    yield from problems


def try_estimator(algorithm: Algorithm, rollout: Rollout) -> str:
    """Calls the estimator with the rewards of three prompts; one group has a missing reward, and in another all are
    equal.

    Returns:
        A sentence about its advantages.

    Raises:
        UserError: they are not finite or differ in shape from the rewards, a second call gives others, or the
            configuration uses the estimator with keys that it does not allow.
    """
    import torch

    from rloo_pipeline.training.batch import check_keys_of_estimator, load_estimator

    function = load_estimator(algorithm)
    rewards = torch.rand((3, 4), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rewards = rewards.round() if function.of_success else rewards
    rewards[0, 1], rewards[2] = torch.nan, 1.0
    if not torch.equal(function(rewards), function(rewards)):
        raise UserError(
            f"algorithm.advantage: {algorithm.advantage} returns different advantages when called again with the same "
            "rewards; make it depend on the rewards alone, since jobs run again and in new processes"
        )
    check_keys_of_estimator(algorithm, rollout, function)
    return "an advantage for each completion"


def try_loss(name: str, function: Callable[..., Tensor]) -> str:
    """Calls the loss with random numbers.

    Returns:
        A sentence about its gradient.

    Raises:
        UserError: it has no gradient, its value or gradient is not finite, or a completion or padding changes the loss
            of others.
    """
    import torch

    draw = torch.Generator().manual_seed(0)
    logps, old = -torch.rand((2, 4, 5), generator=draw, dtype=torch.float64) * 3
    advantages = torch.randn((4, 1), generator=draw, dtype=torch.float64).expand(4, 5)
    entropies = torch.rand((4, 5), generator=draw, dtype=torch.float64) * 3
    mask = torch.arange(5) < torch.tensor([[5], [2], [4], [1]])

    def loss(values: Tensor, rows: slice = slice(None)) -> Tensor:
        result = function(values[rows], old[rows], advantages[rows], mask[rows], entropies=entropies[rows])
        return torch.where(mask[rows], result, 0.0)

    leaf = logps.clone().requires_grad_()
    value = loss(leaf)
    [gradient] = torch.autograd.grad(value.sum(), leaf)
    if not bool(value.isfinite().all() and gradient.isfinite().all()):
        raise UserError(f"algorithm.loss: {name} returns values that are not finite for ordinary log-probs; correct it")
    alone = torch.cat([loss(logps, slice(row, row + 1)) for row in range(4)])
    if not torch.allclose(alone, value.detach()) or not torch.allclose(
        loss(torch.where(mask, logps, -7.0)), value.detach()
    ):
        raise UserError(
            f"algorithm.loss: in {name} a completion, or a token outside the mask, changes the loss of others; "
            "micro-batches split a step, so leave means over completions to loss_agg_mode, and use the mask"
        )
    steps = torch.eye(20, dtype=torch.float64).view(20, 4, 5) * STEP
    slopes = torch.stack([(loss(logps + step) - loss(logps - step)).sum() / (2 * STEP) for step in steps]).view(4, 5)
    if torch.allclose(slopes, gradient, rtol=TOLERANCE, atol=TOLERANCE):
        return PROVEN
    return DETACHED
