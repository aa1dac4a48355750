"""Defines stages as commands, and the options that several stages share."""

import argparse
import ast
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts import assets, fence, function_copies, lineage
from rloo_pipeline.artifacts.policy import Policy, chosen_of
from rloo_pipeline.cli.command import CONFIG, Command, Option, call, command, option
from rloo_pipeline.cluster import nodes
from rloo_pipeline.config import Config, Rollout
from rloo_pipeline.config.loading import load
from rloo_pipeline.errors import RefusedPolicyError, UserError
from rloo_pipeline.runtime import environment, gpu_claims, ranks, reproducible
from rloo_pipeline.workers import engine_cache, gpu_shares

STAGES = Path(__file__).parents[1] / "stages"
TYPES = {"int": int, "str": str}
"""Parameters of any other type are files or folders."""
EXPLAINED = re.compile(r"^ {4}(\w+(?:, \w+)*): (.+(?:\n {8}.+)*)", re.MULTILINE)
"""A parameter, or several, in the section `Args` of a docstring."""


def stage(name: str, about: str, *options: Option) -> Command:
    """Makes a stage command. It calls the function of the same name in `stages/` with the sections of the configuration
    that the stage may read, and with the options that the function takes as keyword arguments. Its engine in the table
    of stages decides which threads, GPUs and ranks it has.

    Args:
        name: name of the stage.
        about: one sentence for the help.
        options: options that the signature of its function does not give, or that replace those that it gives.
    """
    function = name.replace("-", "_")
    given = {one.name: one for one in options_of(name)}
    all_options = given | {one.name: one for one in options}
    taken = [all_options[name] for name in given]

    def start(arguments: argparse.Namespace) -> None:
        config = stage_config(arguments, name)
        if not runs_here(arguments, config, name):
            return
        _open_policies(config, arguments)
        from rloo_pipeline.artifacts import tables

        try:
            facts = lineage.decided(config, name, getattr(arguments, "only", None)) | card_facts(config, name)
            with tables.common_facts(**facts):
                config = with_reward_model(config, getattr(arguments, "reward_model", None))
                call(f"rloo_pipeline.stages.{function}:{function}", taken, arguments, config)
        except RefusedPolicyError:
            from rloo_pipeline.stages.report_so_far import write_page

            folder = arguments.output.absolute().parents[1]
            write_page(whole_config(arguments).only("report"), folder, "about the failed checks")
            raise
        except UserError:
            raise
        except Exception as error:
            from rloo_pipeline.before_run import out_of_memory

            out_of_memory.refuse(error, gpu_shares.role_of(name), whole_config(arguments), _model_of(arguments))
            raise

    return command(name, start, about, CONFIG, *all_options.values())


def options_of(stage: str) -> tuple[Option, ...]:
    """The options of a stage but `--config`, in the order of its function's parameters, explained by its docstring.

    Reads the function's file, because importing it would import an engine before the command has prepared its
    environment.

    Args:
        stage: name of the stage, and of its function in `stages/` but for dashes.
    """
    name = stage.replace("-", "_")
    text = (STAGES / f"{name}.py").read_text(encoding="utf-8")
    start = text.index(f"\ndef {name}(")
    end = text.index('"""', text.index('"""', start) + 3) + 3  # the end of the docstring
    (function,) = ast.parse(text[start:end]).body
    assert isinstance(function, ast.FunctionDef)
    abouts = dict[str, str]()
    for names, about in EXPLAINED.findall(ast.get_docstring(function) or ""):
        abouts |= dict.fromkeys(names.split(", "), " ".join(about.split()).removesuffix("."))
    _, *parameters = function.args.args
    optional = [one.arg for one in parameters[len(parameters) - len(function.args.defaults) :]]
    return tuple(
        _option(one.arg, ast.unparse(one.annotation or one), one.arg in optional, abouts.get(one.arg, ""))
        for one in parameters
    )


def _option(name: str, annotation: str, has_default: bool, about: str) -> Option:
    kind = annotation.removesuffix(" | None")
    required = not has_default and kind == annotation
    keywords: dict[str, Any] = {"type": TYPES.get(kind, Path), "required": required}
    if kind.startswith(("Sequence[", "list[")):
        keywords |= {"nargs": "+"} if required else {"nargs": "*", "default": []}
    elif not required:
        keywords["nargs"] = "?"  # a rule leaves it empty in runs without such a file
    if kind == "Policy":
        about += ": its folder, or that of `stage-assets` for the base model"
    word = name.strip("_")
    keywords |= {"dest": name, "metavar": word.upper()}
    return option(f"--{word.replace('_', '-')}", help=about.replace("%", "%%"), **keywords)


def with_reward_model(config: Config, measured: Path | None) -> Config:
    """Fills the run's own reward model into the options of the rewards that use it.

    Args:
        config: the stage's configuration.
        measured: checks.json of the reward model, next to its folder; None if the run trains none.

    Raises:
        UserError: a file of the model is missing or damaged, or checks.json is about another model.
    """
    if measured is None or "rewards" not in vars(config):
        return config
    from rloo_pipeline.artifacts.policy import measured_reward_model

    return config.with_reward_model(str(measured_reward_model(measured)))


def _open_policies(config: Config, arguments: argparse.Namespace) -> None:
    """Replaces folders in the options by policies. The folder of `stage-assets` has the base model."""
    # `score` does not get the section model
    trusted = getattr(getattr(config, "model", None), "trust_remote_code", False)
    for name in ("policy", "sampler", "start"):
        if (folder := getattr(arguments, name, None)) is not None:
            setattr(arguments, name, Policy(assets.policy_of(folder), trusted))


def _model_of(arguments: argparse.Namespace) -> Policy | None:
    """The stage's policy, or the model that it starts from; None if it has several or none, or makes a reward model."""
    if hasattr(arguments, "policy"):
        return arguments.policy  # type: ignore[no-any-return]
    makes_policy = hasattr(arguments, "assets") and not hasattr(arguments, "model")
    return Policy(assets.model_of(arguments.assets)) if makes_policy else None


def take_sampler(config: Config) -> None:
    """Claims threads and GPUs for a sampler, for reward functions that take turns with it, and for environments."""
    environment.use_threads(config.vllm.threads)
    gpus = (reward.gpus for reward in getattr(config, "rewards", ()))
    rollout: Rollout | None = getattr(config, "rollout", None)  # lm-eval's tasks have no environments
    beside = rollout.environment_gpus if rollout else 0
    gpu_claims.claim(max(config.vllm.gpus, *gpus, 1) + beside)
    gpu_claims.set_aside(beside)


def path(name: str, about: str, **keywords: Any) -> Option:
    """Makes a required option that takes a path."""
    return option(f"--{name}", type=Path, required=True, help=about, **keywords)


OUTPUT = path("output", "file or folder to write")
REWARD_MODEL = option("--reward-model", type=Path, nargs="?", help="checks.json of the run's own reward model")
OUTPUTS = ("output", "output_scores", "model", "held_out", "metrics", "events", "table", "summary", "greedy")
"""Arguments of stages that name files to write; other paths are inputs."""


def stage_config(arguments: argparse.Namespace, stage: str) -> Config:
    """The sections of the configuration that the stage may read.

    Without `--config`, this is the configuration in the run's folder, with the run's frozen functions, and the fence
    makes this process the only writer of the output.
    """
    if arguments.config:
        config = load(arguments.config)
        reproducible.prepare(config.reproducible)
        return config.only(stage)
    run = run_folder(arguments)
    # an experiment's selection is in its own folder
    selection: Path | None = getattr(arguments, "selection", None)
    fence.acquire(selection.absolute().parent if selection else run, arguments.output)
    function_copies.use(run)
    config = load(run / "config.yaml")
    reproducible.prepare(config.reproducible)
    lineage.require_own(config.seed, _inputs(arguments), card_facts(config, stage))
    lineage.require_configured(config, _inputs(arguments))
    return config.only(stage)


def card_facts(config: Config, stage: str) -> dict[str, str]:
    """The GPU model of the stage's engine, which a reproducible run records; empty without an engine."""
    role = gpu_shares.role_of(stage)
    return reproducible.card(config.reproducible, role) if role in ("sampler", "logprobs", "trainer") else {}


def _inputs(arguments: argparse.Namespace) -> Iterator[Path]:
    """Yields the files and folders of the run that a stage reads."""
    for name, value in vars(arguments).items():
        if name not in OUTPUTS:
            yield from (path for path in (value if isinstance(value, list) else [value]) if isinstance(path, Path))
    if isinstance(held_out := getattr(arguments, "held_out", None), list):  # `score` has one to read and one to write
        yield held_out[0]


def whole_config(arguments: argparse.Namespace) -> Config:
    """The run's configuration with all its sections."""
    return load(arguments.config or run_folder(arguments) / "config.yaml")


def run_folder(arguments: argparse.Namespace) -> Path:
    """The folder of the run: the nearest one above the output that has a config.yaml, or the chosen run of a selection.

    Raises:
        UserError: no folder above the output has one, or none was chosen for the seed.
    """
    if selection := getattr(arguments, "selection", None):
        return chosen_of(selection, arguments.seed).run
    output: Path = arguments.output
    for folder in output.absolute().parents:
        if (folder / "config.yaml").exists():
            return folder
    raise UserError(f"{output}: no config.yaml in a folder above it; pass the configuration with --configfile")


def runs_here(arguments: argparse.Namespace, config: Config, stage: str) -> bool:
    """Claims threads and GPUs for a stage and then sets up torch; true if this process runs it, alone or as a rank.

    Otherwise, passes the arguments to ranks and waits for them. Starts the ranks unless this worker keeps some.
    """
    role = gpu_shares.role_of(stage)
    if role == "sampler":
        take_sampler(config)
    if role not in ("logprobs", "trainer"):
        return True
    section = config.deepspeed
    environment.use_threads(section.threads)
    processes = section.processes if role == "trainer" else section.forward_processes
    if stage == "warmstart" and not config.warmstart.sft:
        processes = 1
    if section.nodes == 1 and not ranks.is_rank():
        gpu_claims.claim(processes, from_the_end=True)
    if not ranks.is_rank():
        gpu_claims.refuse_too_few(1 if processes == 1 else processes // section.nodes)
    argv = without_log(arguments.argv)
    if section.nodes > 1 and processes == 1 and nodes.is_outside_image():  # the rule may have started the ranks instead
        nodes.launch(nodes.RankLayout(1, 1, section.threads), arguments.output, argv)
        return False
    if processes == 1 or ranks.is_rank():
        nodes.join()
        reproducible.use_torch(section.threads, config.reproducible)
        return True
    layout = nodes.RankLayout(section.nodes, processes, section.threads)
    if engine_cache.is_enabled():
        from rloo_pipeline.cluster.node_ranks import NodeRanks
        from rloo_pipeline.workers import kept_ranks

        over_nodes = partial(NodeRanks, layout, arguments.output)
        kept_ranks.run(processes, argv, over_nodes if section.nodes > 1 else None)
    elif section.nodes > 1:
        nodes.launch(layout, arguments.output, argv)
    else:
        ranks.torchrun(processes, argv)
    return False


def without_log(argv: Sequence[str]) -> list[str]:
    """The arguments without `--log`, since ranks write to the log of the process that starts them."""
    rest = [argument for argument in argv if not argument.startswith("--log=")]
    place = rest.index("--log") if "--log" in rest else len(rest)
    return rest[:place] + rest[place + 2 :]
