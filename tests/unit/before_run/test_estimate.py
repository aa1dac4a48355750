"""What `rloo plan` counts, what does not fit, and which settings would."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, Project, mini, printed, rloo

from rloo_pipeline.artifacts import model_dims
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.before_run import advice, cards, checkpointing, estimate, memory, speeds
from rloo_pipeline.before_run.estimate import GpuEstimate
from rloo_pipeline.before_run.memory import MicroBatch, RunMemory
from rloo_pipeline.commands import plan
from rloo_pipeline.commands.plan import plan_run
from rloo_pipeline.config import Algorithm, Config, Offload
from rloo_pipeline.config.distillation import Teacher
from rloo_pipeline.config.loading import load, read_mapping
from rloo_pipeline.config.run_set import read_runs
from rloo_pipeline.errors import UserError

QWEN3_4B = {
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


@pytest.fixture
def qwen(tmp_path) -> model_dims.ModelDims:
    """The dimensions of Qwen3-4B, which has 4,022,468,096 parameters."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    return Policy(tmp_path).dimensions


def gsm8k(**changes) -> Config:
    return load(ROOT / "config" / "gsm8k-qwen3-4b.yaml").override(changes)


def test_parameters_are_counted_or_computed(qwen, tiny_model) -> None:
    assert qwen.parameters == pytest.approx(4_022_468_096, rel=1e-4)
    from rloo_pipeline.training import policy_model

    model = policy_model.load(Policy(tiny_model), "float32")
    counted = Policy(tiny_model).dimensions
    assert counted.parameters == sum(weights.numel() for weights in model.parameters())
    assert model_dims._estimate_parameters(counted, tied=True) == pytest.approx(counted.parameters, rel=0.01)


def test_a_folder_without_sizes_gives_a_one_line_error(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"config\.json: does not give the sizes of a transformer"):
        model_dims.read(tmp_path, Policy(tmp_path).config)


def test_jobs_are_those_that_snakemake_plans(tmp_path) -> None:
    changes = {"rounds": 3, "rollout": {"refill": 2}, "algorithm": {"filter_zero_variance": True}}
    on_gpus = [{**reward, "gpus": 1} if reward["name"] == "format" else reward for reward in mini()["rewards"]]
    changes |= {"rewards": on_gpus, "report_to": ["mlflow"]}
    counts = estimate.jobs(Config(**mini(**changes)))
    outcome = Project(tmp_path / "project").snakemake("--dry-run", "--quiet", "rules", "--", "all", **changes)
    planned = dict(re.findall(r"^(\w+) +(\d+)$", outcome.stdout + outcome.stderr, re.MULTILINE))
    del planned["all"], planned["total"]
    by_stage: dict[str, int] = {}
    for rule, count in planned.items():
        name = "update" if rule.startswith("update") else rule.replace("_", "-")
        by_stage[name] = by_stage.get(name, 0) + int(count)
    assert counts == by_stage
    assert "reference" not in estimate.jobs(Config(**mini(algorithm={"beta": 0})))


def test_the_number_of_files_counts_those_of_jobs_and_of_policies_that_stay(qwen) -> None:
    config = gsm8k().model_copy(update={"rounds": 4, "keep_every": 2})
    jobs = sum(estimate.jobs(config).values())
    assert estimate.files(RunMemory(config, qwen)) == 6 * jobs + (8 + 17) * 3, "8.04 GB of weights, policies 0, 2 and 4"


def test_zero_splits_memory_over_processes(qwen) -> None:
    """Bytes per parameter of a 16-bit model: 2 for weights, 2 for gradients, 4 for their sum in float32 and 12 for the
    optimizer, 20 in total as in ZeRO's paper. Without ZeRO, DeepSpeed uses ZeRO 1.
    """
    bytes_by_stage = {}
    for stage in range(4):
        config = gsm8k(**{"deepspeed.zero_stage": stage, "deepspeed.processes": 8})
        terms = RunMemory(config, qwen, "cuda").update(MicroBatch(0, 0, several=True))
        bytes_by_stage[stage] = (memory.total(terms) - terms["process"]) / qwen.parameters
    assert [bytes_by_stage[stage] for stage in range(4)] == pytest.approx([8 + 12 / 8, 8 + 12 / 8, 2 + 18 / 8, 20 / 8])


def test_a_stage_that_does_not_fit_comes_with_a_setting_that_does(qwen) -> None:
    card = cards.card_of("h100:80")
    config = gsm8k(**{"deepspeed.processes": 1, "deepspeed.zero_stage": 0})
    update = next(GpuEstimate(config, qwen, card).fits())
    assert not update.fits
    advised = dict(re.findall(r"(deepspeed\.\w+): (\w+)", update.advise()))
    changes = {key: value == "true" if value in ("true", "false") else int(value) for key, value in advised.items()}
    assert changes["deepspeed.processes"] > 1, "four billion weights with Adam do not fit on one card"
    assert next(GpuEstimate(config.override(changes), qwen, card).fits()).fits
    fewer = config.override(changes | {"deepspeed.processes": 1})
    assert not next(GpuEstimate(fewer, qwen, card).fits()).fits


def test_where_more_gpus_are_needed_the_memory_of_the_node_is_the_other_way(qwen) -> None:
    card = cards.card_of("h100:80")
    config = gsm8k(**{"deepspeed.processes": 1, "deepspeed.zero_stage": 0})
    update = next(GpuEstimate(config, qwen, card).fits())
    more, offload = update.advise().split("; or, without more GPUs, with ")
    assert "deepspeed.processes: 2" in more
    on_cpu = Offload(optimizer="cpu")
    changed = config.override({"deepspeed.offload": on_cpu, "deepspeed.zero_stage": 2})
    assert next(GpuEstimate(changed, qwen, card).fits()).fits
    host = memory.total(RunMemory(changed, qwen).offloaded()) / 1e9
    assert host == pytest.approx(16 * qwen.parameters / 1e9)
    assert offload == (
        f"deepspeed.offload: {{optimizer: cpu}}, deepspeed.zero_stage: 2, which takes {host:.1f} GB of the node's "
        "memory for each process"
    )
    other = config.override({"update.optimizer": "adamw_8bit", "deepspeed.gradient_checkpointing": True})
    text = next(GpuEstimate(other, qwen._replace(parameters=9_000_000_000), card).fits()).advise()
    assert "offload" not in text, "only AdamW can"
    assert "zero_stage: 3" not in text


@pytest.mark.parametrize(
    "changes",
    [
        {"update.optimizer": "muon"},
        {"update.optimizer": "adafactor"},
        {"model.train_vision": True, "dataset.image_column": "image"},
        {"deepspeed.processes": 3, "deepspeed.nodes": 3},
    ],
)
def test_nothing_is_advised_that_the_configuration_refuses(qwen, changes) -> None:
    config = gsm8k(**{"deepspeed.processes": 1, "deepspeed.zero_stage": 0} | changes)
    assert advice.is_allowed(config)
    text = next(GpuEstimate(config, qwen._replace(parameters=9_000_000_000), cards.card_of("h100")).fits()).advise()
    advised = dict(re.findall(r"(deepspeed\.(?:processes|zero_stage)): (\d)", text.partition(";")[0]))
    assert advice.is_allowed(config.override({key: int(value) for key, value in advised.items()})), text
    assert "deepspeed.processes" not in advised, "several processes are what they refuse"


def test_every_example_is_allowed_as_it_is() -> None:
    for file in sorted((ROOT / "config").glob("*.yaml")):
        if "model" in read_mapping(file):
            config = load(file)
            assert Config.model_validate(config.model_dump(mode="json")) == config, file.name


def test_the_hours_of_an_update_count_the_passes_that_it_takes(qwen) -> None:
    def hours(**changes) -> float:
        parts = {"deepspeed.gradient_checkpointing": False, "deepspeed.processes": 1, **changes}
        algorithm = Algorithm.model_validate({"beta": 0, "steps_per_generation": parts.pop("steps", 1)})
        config = gsm8k(**parts).model_copy(update={"algorithm": algorithm})
        work = GpuEstimate(config, qwen, cards.card_of("h100")).hours()["update"]
        return work - speeds.BETWEEN.typical * config.rounds / 3600

    assert hours(steps=2) == pytest.approx(hours() * 4 / 3), "log-probs of the policy before the first step"
    assert hours(**{"deepspeed.gradient_checkpointing": True}) == pytest.approx(hours() * 4 / 3)
    assert hours(**{"deepspeed.gradient_checkpointing": "auto"}) == hours(), "a plan decides it before"


def test_the_hours_of_the_reference_count_what_is_sampled_and_every_gpu_that_starts(qwen) -> None:
    def hours(**changes) -> tuple[float, float]:
        config = gsm8k(**{"deepspeed.processes": 1, "deepspeed.zero_stage": 0, "rollout.shards": 2, **changes})
        jobs = config.rollout.shards * config.rounds
        work = GpuEstimate(config, qwen, cards.card_of("h100")).hours(warm=False)["reference"]
        gpus = config.deepspeed.forward_processes
        return work - gpus * jobs * speeds.STARTS["reference"].typical / 3600, gpus

    assert hours()[1] == 1
    assert hours(**{"rollout.oversample": 2.0}) == pytest.approx((2 * hours()[0], 1))
    assert hours(**{"deepspeed.processes": 4, "deepspeed.zero_stage": 3}) == pytest.approx((hours()[0], 4))
    assert hours(**{"deepspeed.processes": 4, "deepspeed.zero_stage": 2}) == pytest.approx(hours())


def test_a_teacher_costs_what_a_reference_of_its_size_would(qwen) -> None:
    teacher = {"algorithm.teacher": Teacher(name_or_path="teacher"), "algorithm.beta": 0.0}
    teacher["algorithm.importance_sampling_level"] = "token"
    card, larger = cards.CARDS["h100"], qwen._replace(parameters=3 * qwen.parameters)
    distilled = GpuEstimate(gsm8k(**teacher), qwen, card, larger).hours()
    assert distilled["teacher"] == GpuEstimate(gsm8k(**{"algorithm.beta": 0.1}), larger, card).hours()["reference"]
    fits = {fit.stage: fit for fit in GpuEstimate(gsm8k(**teacher), qwen, card, larger).fits()}
    assert fits["teacher"].terms["weights"] > 0
    assert "reference" not in fits


def test_the_plan_of_an_experiment_decides_on_checkpointing_for_its_card(tmp_path, qwen, monkeypatch) -> None:
    config = gsm8k(**{"deepspeed.gradient_checkpointing": "auto", "deepspeed.processes": 1, "deepspeed.zero_stage": 0})
    monkeypatch.setattr(plan.model_inputs, "shape", lambda _: qwen)
    card = cards.card_of("h100")
    for size, checkpoints in ((1e6, False), (1.0, True)):
        decided = config.override({"deepspeed.gradient_checkpointing": checkpoints})
        expected = GpuEstimate(decided, qwen, card._replace(gigabytes=size)).hours()
        assert plan._costs(config, card._replace(gigabytes=size), 0)[3] == pytest.approx(sum(expected.values()))


def test_the_plan_of_a_small_experiment_has_whole_numbers_of_tokens(tmp_path, qwen, monkeypatch) -> None:
    small = mini(rounds=1, rollout={"num_generations": 2, "generation_batch_size": 4, "max_completion_length": 5})
    (tmp_path / "base.yaml").write_text(json.dumps(small))
    (tmp_path / "small.yaml").write_text(
        "{experiment: small, base: base.yaml, vary: {algorithm.preset: [rloo, grpo]}, seeds: [1]}"
    )
    monkeypatch.setattr(plan.model_inputs, "shape", lambda _: qwen)
    rows = [line.split() for line in printed(plan.plan, read_runs(tmp_path / "small.yaml"), None).splitlines()]
    assert [row[2] for row in rows if row[0] in ("rloo", "grpo")] == ["20", "20"]


def test_a_model_too_large_for_eight_gpus_may_fit_with_its_weights_in_the_node(qwen) -> None:
    large = qwen._replace(parameters=70_000_000_000)
    config = gsm8k(**{"deepspeed.processes": 4, "deepspeed.zero_stage": 3})
    update = next(GpuEstimate(config, large, cards.card_of("a40")).fits())
    assert update.advise().startswith("would fit with deepspeed.offload: {optimizer: cpu, parameters: cpu}"), (
        update.advise()
    )


def test_checkpointing_is_the_first_advice_for_activations(qwen) -> None:
    config = gsm8k(**{"deepspeed.processes": 8, "deepspeed.zero_stage": 3, "deepspeed.gradient_checkpointing": False})
    config = config.override({"deepspeed.max_tokens_per_micro_batch": 32768})
    update = next(GpuEstimate(config, qwen._replace(vocabulary=16000), cards.card_of("h100")).fits())
    assert update.advise().startswith("would fit with deepspeed.gradient_checkpointing: true")


def test_a_model_that_is_too_large_to_sample_needs_more_cards(qwen) -> None:
    large = qwen._replace(parameters=32_000_000_000, layers=64, hidden=5120)
    config = gsm8k(**{"vllm.tensor_parallel_size": 1})
    rollout = list(GpuEstimate(config, large, cards.card_of("l40s")).fits())[-1]
    assert not rollout.fits
    assert rollout.advise() == "would fit with vllm.tensor_parallel_size: 2"
    odd = list(GpuEstimate(config, large._replace(query_heads=27), cards.card_of("l40s")).fits())[-1]
    assert odd.advise().startswith("no setting that was tried would fit"), "2 cards do not divide 27 heads"


def test_a_card_without_bfloat16_is_refused_for_each_arm(tmp_path) -> None:
    (tmp_path / "base.yaml").write_text(json.dumps(mini()))
    arms = {"one": {}, "two": {"model.dtype": "bfloat16"}}
    (tmp_path / "study.yaml").write_text(json.dumps({"experiment": "study", "base": "base.yaml", "arms": arms}))
    with pytest.raises(UserError, match=r"--gpu t4: .* set model.dtype to float16"):
        plan.plan(read_runs(tmp_path / "study.yaml"), "t4")


def printed_for(config: Config, gpu: str | None, wait: float | None = None) -> str:
    return printed(plan_run, config, gpu, wait, width=160)


def test_the_plan_names_its_assumptions(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    config = gsm8k(**{"model.name_or_path": str(tmp_path)})
    output = printed_for(config, "h100:80")
    for text in (
        "GPU-hours",
        "assumed: every completion",
        "policies (",
        "trainer state",
        "KV cache holds",
        "optimizer",
    ):
        assert text in output
    assert "--gpu h100:80" in printed_for(config, None)
    with pytest.raises(UserError, match=r"--gpu h1000: unknown card; name one of t4, .*h100:80"):
        printed_for(config, "h1000")
    with pytest.raises(UserError, match=r"--gpu t4: .* set model.dtype to float16"):
        printed_for(config, "t4")
    for size in ("much", "0", "-80", "nan", "inf"):
        with pytest.raises(UserError, match=f"--gpu h100:{size}: '{size}' is not a number of GB"):
            cards.card_of(f"h100:{size}")


@pytest.mark.parametrize(
    ("shown", "argument", "gigabytes"),
    [
        ("NVIDIA H200, 143771", "h200", 150.8),
        ("NVIDIA H200, 143771", "h200:100", 100),
        ("NVIDIA H200, 143771", "h100", 80),
        ("NVIDIA GeForce RTX 3090, 24576", "rtx3090", 25.8),
        ("NVIDIA RTX A4000, 16376", "a40", 48),
        ("NVIDIA H200, [N/A]", "h200", 141),
    ],
)
def test_a_plan_counts_on_the_memory_that_the_driver_shows_of_such_a_card(
    shown, argument, gigabytes, monkeypatch
) -> None:
    monkeypatch.setattr(cards.devices, "visible_gpus", lambda: ["0"])
    monkeypatch.setattr(cards.devices, "gpu_facts", lambda _: [shown])
    assert cards.card_here(argument).gigabytes == gigabytes
    monkeypatch.setattr(cards.devices, "visible_gpus", lambda: ["MIG-7"])
    assert cards.card_here(argument) == cards.card_of(argument)


def test_the_auto_that_a_plan_shows_is_that_of_an_update_on_this_card(tmp_path, qwen, monkeypatch) -> None:
    config = gsm8k(**{"model.name_or_path": str(tmp_path), "deepspeed.max_tokens_per_micro_batch": "auto"})
    facts = SimpleNamespace(total_memory=int(40e9))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    tokens = checkpointing.resolve(config, Policy(tmp_path).dimensions).deepspeed.micro_batch_tokens
    assert f"max_tokens_per_micro_batch: auto is {tokens}\n" in printed_for(config, "a100:40")


def test_an_unknown_model_is_one_line() -> None:
    outcome = rloo("plan", ROOT / "config" / "gsm8k-qwen3-4b.yaml", HF_HOME=str(Path("/nonexistent")))
    assert outcome.returncode == 1
    assert "Qwen/Qwen3-4B: neither a folder nor in the Hub's cache" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_a_model_that_cannot_be_trained_has_no_plan(tmp_path) -> None:
    dynamic = {**QWEN3_4B, "max_position_embeddings": 512, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(dynamic))
    config = gsm8k(**{"model.name_or_path": str(tmp_path), "model.revision": None})
    with pytest.raises(UserError, match=r"has a rotary embedding.*that changes beyond 512 tokens"):
        plan_run(config, None)


def test_float16_holds_all_logits_at_once(qwen) -> None:
    """Its loss scale is not known to the pieces."""
    configs = [gsm8k(**{"model.dtype": dtype}) for dtype in ("float16", "bfloat16")]
    whole, pieces = (RunMemory(config, qwen, "cpu").update()["logits"] for config in configs)
    assert whole == memory.LOGITS * 4 * MicroBatch.largest(configs[0]).completion_tokens * qwen.vocabulary > 10 * pieces
