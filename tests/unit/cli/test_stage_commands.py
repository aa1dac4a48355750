"""A stage takes threads and GPUs once, before its function imports torch; ranks use those of their launcher."""

import argparse
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from helpers import mini

from rloo_pipeline.cli import main, stage_options, stages
from rloo_pipeline.cluster import nodes
from rloo_pipeline.runtime import gpu_claims, installation, ranks, reproducible

WORDS = {
    "rollout": ("--prompts", "p", "--policy", "p", "--round", "1", "--shard", "0"),
    "refill": (
        *("--prompts", "p", "--policy", "p", "--round", "1"),
        *("--rollouts", "r", "--scores", "s", "--output-scores", "s"),
    ),
    "checks": ("--assets", "a", "--prompts", "p", "--policy", "p", "--probe", "p"),
    "warmstart": ("--assets", "a", "--prompts", "p"),
    "reference": ("--policy", "p", "--rollouts", "r"),
    "distance": ("--completions", "c", "--policy", "p", "--reference", "r"),
}


@pytest.fixture
def run_stage(tmp_path, monkeypatch):
    """A function that runs a stage without its work, and returns its claims of GPUs and launches of ranks."""

    def run(stage: str, **changes) -> list[object]:
        claims: list[object] = []
        work = ModuleType(stage)
        setattr(work, stage, lambda *_, **__: None)
        monkeypatch.setitem(sys.modules, f"rloo_pipeline.stages.{stage}", work)
        monkeypatch.setattr(
            gpu_claims, "claim", lambda needed, from_the_end=False: claims.append((needed, from_the_end))
        )
        monkeypatch.setattr(ranks, "torchrun", lambda count, _: claims.append(f"{count} ranks"))
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump(mini(**changes)))
        argv = [stage, "--configfile", str(config), "--output", str(tmp_path / "output"), *WORDS[stage]]
        arguments = main.parser().parse(argv)
        arguments.argv = argv
        arguments.command(arguments)
        return claims

    return run


@pytest.mark.parametrize("stage", ["rollout", "refill"])
def test_samplers_take_the_first_gpus_and_as_many_as_a_reward_function_beside_them(run_stage, stage) -> None:
    assert run_stage(stage, vllm={"tensor_parallel_size": 2}) == [(2, False)]
    rewards = [reward | {"gpus": 4} for reward in mini()["rewards"]]
    assert run_stage(stage, rewards=rewards) == [(4, False)]


def test_samplers_take_gpus_for_environments_too_and_hide_them_from_the_engine(run_stage, monkeypatch) -> None:
    monkeypatch.setattr(gpu_claims, "_set_aside", ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5")
    tools = ["rloo_pipeline.environments.tools:calculator"]
    assert run_stage("rollout", rollout={"tools": tools, "environment_gpus": 2}) == [(3, False)]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    assert gpu_claims.names_set_aside(2) == ("4", "5")


@pytest.mark.parametrize("stage", ["checks", "reference", "distance"])
def test_log_probs_take_the_last_gpu(run_stage, stage) -> None:
    assert run_stage(stage) == [(1, True)]


@pytest.mark.parametrize("stage", ["reference", "distance"])
def test_ranks_of_a_split_model_take_no_gpu_from_their_launcher(run_stage, stage, monkeypatch) -> None:
    split = {"processes": 2, "zero_stage": 3}
    assert run_stage(stage, deepspeed=split) == [(2, True), "2 ranks"]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    assert run_stage(stage, deepspeed=split) == []


def test_torch_computes_as_configured_in_stages_that_compute_with_it(run_stage, monkeypatch) -> None:
    used: list[object] = []
    monkeypatch.setattr(reproducible, "_asked", None)
    monkeypatch.setattr(reproducible, "use_torch", lambda *given: used.append(given))
    for stage in ("rollout", "reference", "warmstart"):
        run_stage(stage, reproducible=True, deepspeed={"threads": 3})
    run_stage("reference", reproducible=True, deepspeed={"threads": 3, "processes": 2, "zero_stage": 3})
    assert used == [(3, True), (3, True)]


def test_every_path_that_a_stage_does_not_write_must_be_of_the_run() -> None:
    names: dict[str, set[str]] = {"input": set(), "output": set()}
    for rules in (installation.root() / "workflow" / "rules").glob("*.smk"):
        for option, kind in re.findall(r"--([\w-]+)[ =]\{(input|output)", rules.read_text()):
            names[kind].add(option.replace("-", "_"))
    assert names["output"] == {*stage_options.OUTPUTS}
    assert names["input"] & names["output"] == {"held_out"}
    paths = {"output": Path("a"), "summary": Path("b"), "new": Path("c"), "held_out": [Path("d"), Path("e")]}
    arguments = argparse.Namespace(**paths, several=[Path("f"), Path("g")], round_=1)
    assert [path.name for path in stage_options._inputs(arguments)] == ["c", "f", "g", "d"]


@pytest.mark.parametrize(("trains", "started"), [(False, (1, 1)), (True, (2, 4))])
def test_a_warm_start_whose_rule_is_for_several_nodes_runs_in_the_image_also_without_training(
    run_stage, monkeypatch, trains, started
) -> None:
    """Such a rule starts the stage outside of the image, and the environment there may have no torch."""
    launched = []
    monkeypatch.setattr(nodes, "launch", lambda *argv: launched.append(argv[0][:2]))
    monkeypatch.setenv(nodes.IMAGE, "image.sif")
    monkeypatch.delenv("APPTAINER_CONTAINER", raising=False)
    spread = {"deepspeed": {"processes": 4, "nodes": 2}, "warmstart": {} if trains else {"sft": None}}
    run_stage("warmstart", **spread)
    assert launched == [started]
    monkeypatch.setenv("APPTAINER_CONTAINER", "/images/image.sif")
    monkeypatch.setenv("RLOO_MEETING", "file")  # as what srun has started
    monkeypatch.setattr(nodes, "join", lambda: None)
    run_stage("warmstart", **spread)
    assert launched == [started]


def test_the_docstring_of_a_stage_explains_every_option() -> None:
    unexplained = [
        (command.name, option.name)
        for command in stages.COMMANDS
        for option in command.options
        if not option.keywords["help"]
    ]
    assert unexplained == []


@pytest.mark.parametrize(
    ("stage", "missing"),
    [("pass-rates", "--round, --scores, --output"), ("reference", "--policy, --rollouts, --output")],
)
def test_parameters_without_a_default_are_required(stage, missing, capsys) -> None:
    with pytest.raises(SystemExit):
        main.parser().parse([stage])
    assert f"the following arguments are required: {missing};" in capsys.readouterr().err
