"""`rloo plan --gpus N`: what fits, how long it takes, and that the parts of a plan agree with each other."""

import json
import re

import pytest
import yaml
from helpers import ROOT, printed

from rloo_pipeline.artifacts import manifest, model_dims
from rloo_pipeline.before_run import cards, exchange, layouts, queueing, speeds
from rloo_pipeline.before_run.estimate import GpuEstimate
from rloo_pipeline.commands import plan as plan_module
from rloo_pipeline.commands.plan import plan_run
from rloo_pipeline.commands.plan_gpus import plan_gpus
from rloo_pipeline.config import Config, Lora, Mismatch, Offload
from rloo_pipeline.config.loading import load
from rloo_pipeline.config.run_set import RunSet
from rloo_pipeline.config.section import merge
from rloo_pipeline.errors import UserError

H100, H200 = cards.card_of("h100"), cards.card_of("h200")
CONFIG = load(ROOT / "config" / "gsm8k-qwen3-4b.yaml")
LARGE = load(ROOT / "config" / "llama-70b.yaml")
FOUR = model_dims.ModelDims(2560, 36, 4096, 1024, 9728, 151936, 4_022_468_096, query_heads=32)
SEVENTY = model_dims.ModelDims(8192, 80, 8192, 1024, 28672, 128256, 70_553_706_496, query_heads=64)


def hours(config: Config, pace: str = "typical") -> dict[str, float]:
    return GpuEstimate(config, FOUR, H100).hours(pace)


def output(config: Config, shape: model_dims.ModelDims, gpus: int) -> str:
    return printed(plan_gpus, config, shape, H100, gpus, width=80)


def test_speeds_are_those_that_were_measured() -> None:
    """The round of tools/gpu/round.yaml, sampled and trained on an H200, is within the range of its estimate."""
    rows = json.loads((ROOT / "tools" / "gpu" / "measured" / "1-nvidia-h200.json").read_text())["rows"]
    shares = [rows[f"step-{size}"]["figures"]["deepspeed share of peak"] for size in ("0.5B", "1.5B")]
    assert [speeds.TRAINING.slow, speeds.TRAINING.fast] == shares
    start = speeds.STARTS["rollout"]
    assert (start.fast, start.slow) == tuple(rows["sampling"]["figures"][name] for name in ("start s", "first start s"))
    assert f"{speeds.BETWEEN.typical} s from the end of update" in rows["round"]["note"]
    config = load(ROOT / "tools" / "gpu" / "round.yaml")
    config = config.override({"deepspeed.gradient_checkpointing": False})
    shape = model_dims.ModelDims(2048, 28, 2048, 1024, 6144, 151936, 1_720_567_808)
    slow, fast = (
        queueing.side_seconds(config, GpuEstimate(config, shape, H200).hours(pace)) for pace in ("slow", "fast")
    )
    assert fast.sampling <= rows["round"]["figures"]["sampling s"] <= slow.sampling
    assert fast.training <= rows["round"]["figures"]["training s"] + speeds.BETWEEN.typical <= slow.training


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_the_parts_of_a_layout_add_up(gpus) -> None:
    for layout in layouts.layouts(CONFIG, FOUR, H100, gpus):
        parts, wall = layout.sides, queueing.wall_seconds(layout.config, hours(layout.config))
        assert parts.sampling + parts.training == pytest.approx(sum(wall.values()) / CONFIG.rounds)
        assert layout.seconds["typical"] == parts.round_seconds(layout.config.rollout.lag)
        assert layout.hours() * layout.gpus == pytest.approx(layout.gpu_hours)
        assert layout.hours("fast") < layout.hours() < layout.hours("slow")
        used = queueing.gpus_of(layout.config)
        at_once = used["rollout"] + used["update"] if layout.config.rollout.lag else max(used.values())
        assert at_once <= layout.gpus <= gpus, layout.name


def test_the_hours_of_stages_add_up_to_those_of_the_plan(monkeypatch) -> None:
    monkeypatch.setattr(plan_module.model_inputs, "shape", lambda _: SEVENTY)
    monkeypatch.setattr(plan_module.inputs, "require", lambda _: ())
    text = printed(plan_run, LARGE, "h100:80", width=200)
    (total,) = re.findall(r"GPU-hours: about ([\d.]+);", text)
    stages = re.findall(r"  \w+ +([\d.]+) GPU-hours on (\d+) GPUs", text)
    assert sum(float(value) for value, _ in stages) == pytest.approx(float(total), abs=0.1)
    assert {gpus for _, gpus in stages} == {"32"}, "not 128: shards of the reference wait for each other"


@pytest.mark.parametrize(
    ("changes", "least", "most"),
    [
        ({"update.lora": Lora()}, 0.6, 0.9),
        ({"deepspeed.offload": Offload(optimizer="cpu"), "deepspeed.zero_stage": 2}, 1.01, 2),
        ({"deepspeed.offload": Offload(optimizer="cpu", parameters="cpu"), "deepspeed.zero_stage": 3}, 1.1, 4),
        ({"deepspeed.offload": Offload(optimizer="nvme"), "deepspeed.zero_stage": 3}, 1.02, 4),
        ({"deepspeed.gradient_checkpointing": True}, 1.1, 1.4),
    ],
)
def test_what_makes_an_update_slower_or_faster_changes_its_hours(changes, least, most) -> None:
    # in rounds of long completions an optimizer in host memory is hardly noticed
    one = {"deepspeed.processes": 1, "deepspeed.gradient_checkpointing": False, "rollout.max_completion_length": 1024}
    plain = CONFIG.override(one)
    before, after = hours(plain), hours(plain.override(changes))
    assert least < after["update"] / before["update"] < most
    assert after["rollout"] == before["rollout"]


@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_the_block_to_paste_is_a_configuration_that_fits(gpus) -> None:
    text = output(CONFIG, FOUR, gpus)
    first, _, rest = text.partition("\n")
    assert ("GB of a node's memory" in text) == ("optimizer: cpu" in text)
    assert first == f"gsm8k-qwen3-4b on {gpus} × h100 (80 GB): set"
    block = yaml.safe_load(rest.partition("    hours")[0])
    assert block["deepspeed"].keys() >= {"processes", "zero_stage", "max_tokens_per_micro_batch", "offload"}
    assert (block["rollout"].keys(), block["vllm"].keys()) == ({"shards", "lag"}, {"tensor_parallel_size"})
    pasted = Config.model_validate(merge(CONFIG.model_dump(mode="json"), block))
    assert not GpuEstimate(pasted, FOUR, H100).problem
    assert max(map(len, text.splitlines())) <= 80


def test_the_first_line_and_the_status_say_that_a_run_does_not_fit(monkeypatch) -> None:
    monkeypatch.setattr(plan_module.model_inputs, "shape", lambda _: SEVENTY)
    monkeypatch.setattr(plan_module.inputs, "require", lambda _: ())
    with pytest.raises(UserError, match="does not fit on 1 × h100"):
        plan_gpus(LARGE, SEVENTY, H100, 1)
    with pytest.raises(UserError, match="does not fit, see the first line"):
        plan_run(LARGE, "a100:40")


@pytest.mark.parametrize(("gpus", "splits", "step"), [(8, 7, 1), (1024, 127, 8), (10_000, 124, 80)])
def test_very_many_nodes_are_divided_in_no_more_ways_than_128(gpus, splits, step) -> None:
    first = [next(candidates) for candidates in layouts._side_by_side(CONFIG, gpus)]
    assert [changes["deepspeed.processes"] for changes in first] == [step * part for part in range(1, splits + 1)]


def test_what_does_not_fit_says_what_would(capsys) -> None:
    with pytest.raises(UserError):
        plan_gpus(LARGE, SEVENTY, H100, 2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("does not fit on 2 × h100 (80 GB): ")
    count = int(re.findall(r"It fits on (\d+) of these GPUs", lines[1])[0])
    assert not layouts.layouts(LARGE, SEVENTY, H100, count)[0].problem
    assert any(line.startswith("  sample, then train: update takes ") for line in lines)


@pytest.mark.parametrize("cut", [1.0, 0.9])
def test_an_optimizer_that_needs_one_process_is_why_a_run_fits_no_eight_gpus(capsys, cut) -> None:
    """Samples of a cut distribution rule out a lag too, so every layout is refused."""
    config = CONFIG.override({"update.optimizer": "muon", "update.lora": None, "rollout.top_p": cut})
    config = config.override({"algorithm.mismatch": Mismatch(), "algorithm.old_logps": "trainer"})
    with pytest.raises(UserError, match="does not fit on 8 × h100"):
        plan_gpus(config, FOUR, H100, 8)
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert "update.optimizer: muon needs whole matrices" in first
    assert "deepspeed.processes: 1" in first
    assert second == "It does not fit on more of these GPUs either."
    assert any(layouts.BESIDE.split()[0] in line for line in rest) == (cut == 1)


def test_engines_are_split_over_as_many_gpus_as_divide_the_attention_heads() -> None:
    """vLLM does not start otherwise."""
    split = {
        heads: {one.config.vllm.tensor_parallel_size for one in layouts.layouts(LARGE, shape, H100, 16)}
        for heads in (64, 60)
        for shape in [SEVENTY._replace(query_heads=heads)]
    }
    assert 8 in split[64], split
    assert all(heads % parts == 0 for heads, sizes in split.items() for parts in sizes)


def test_sampling_beside_training_is_an_alternative_with_its_own_correction() -> None:
    beside = next(one for one in layouts.layouts(CONFIG, FOUR, H100, 8) if one.name == layouts.BESIDE)
    assert beside.config.rollout.lag == 1
    assert beside.config.algorithm.mismatch.correction == "sequence_tis"
    assert beside.seconds["typical"] == max(beside.sides.sampling, beside.sides.training)


@pytest.mark.parametrize(("gpus", "nodes"), [(16, 2), (32, 4)])
def test_the_policy_of_a_70b_is_written_by_all_ranks_and_read_by_each_node(gpus, nodes) -> None:
    best = layouts.layouts(LARGE, SEVENTY, H100, gpus)[0]
    policy, seconds = 2 * SEVENTY.parameters, best.seconds["typical"]
    written = policy / (speeds.WRITING.typical * gpus)
    parallel = best.config.vllm.tensor_parallel_size
    rate = 1 / (1 / (manifest.READERS * speeds.DIGESTING.typical) + 1 / (parallel * speeds.LOADING.typical))
    bandwidth = (1 + 1 + nodes) * policy / (seconds / 10)
    text = printed(plan_gpus, LARGE, SEVENTY, H100, gpus, width=200)
    times = f"writing takes about {written:.1f} s and reading {policy / rate:.1f} s"
    assert f"policy of a round: 141.1 GB; {times}" in text
    assert f"gives {bandwidth / 1e9:.1f} GB/s to all nodes" in text


def test_the_queue_is_not_estimated_for_settings_that_are_compared() -> None:
    with pytest.raises(UserError, match=r"--profile: .* --gpus compares several; leave one out"):
        plan_module.plan(RunSet({CONFIG.run: CONFIG}), None, 60.0, 8)


def test_an_adapter_is_too_small_to_mention() -> None:
    assert list(exchange.lines(CONFIG, FOUR, 60))
    assert not list(exchange.lines(CONFIG.override({"update.lora": Lora()}), FOUR, 60))
