"""`gradient_checkpointing: auto` is on exactly where an update does not fit without it."""

import json

import pytest
from helpers import ROOT, mini

from rloo_pipeline.artifacts.model_dims import ModelDims
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.before_run import cards, checkpointing, memory
from rloo_pipeline.before_run.estimate import GpuEstimate
from rloo_pipeline.before_run.memory import MicroBatch, RunMemory
from rloo_pipeline.config import Config, Offload
from rloo_pipeline.config.loading import load
from rloo_pipeline.runtime import devices

SHAPE = ModelDims(1024, 16, 1024, 512, 3072, 32000, 300_000_000)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
@pytest.mark.parametrize("sft", [False, True])
def test_it_is_on_where_the_estimate_without_it_exceeds_the_room(sft, optimizer) -> None:
    """SFT has an optimizer of its own."""
    other = {"warmstart": {"sft": {"optimizer": optimizer}}} if sft else {"update": {"optimizer": optimizer}}
    config = Config(**mini(deepspeed={"gradient_checkpointing": "auto", "max_tokens_per_micro_batch": 65536}, **other))
    without = config.override({"deepspeed.gradient_checkpointing": False, "update.optimizer": optimizer})
    batch = MicroBatch(65536, 65536, several=True) if sft else None
    edge = memory.total(RunMemory(without, SHAPE, "cuda").update(batch)) / memory.ROOM
    for room, expected in ((edge * 0.999, True), (edge * 1.001, False)):
        resolved = checkpointing.resolve_for(config, SHAPE, "cuda", room, optimizer if sft else None)
        assert resolved.deepspeed.gradient_checkpointing is expected
        assert resolved.update == config.update


@pytest.mark.parametrize("value", [True, False])
def test_an_explicit_setting_is_kept(value) -> None:
    config = Config(**mini(deepspeed={"gradient_checkpointing": value, "max_tokens_per_micro_batch": 512}))
    assert checkpointing.resolve_for(config, SHAPE, "cuda", 0 if value is False else 1e15) is config


def test_a_stage_decides_by_the_memory_of_its_process_and_its_own_sections(tmp_path, monkeypatch) -> None:
    facts = {"hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    stages = {stage: Config(**mini()).only(stage) for stage in ("update", "warmstart")}
    for room, expected in ((1e6, True), (1e15, False)):
        monkeypatch.setattr(devices, "training_bytes", lambda room=room: room)
        for name, stage in stages.items():
            whole = None if name == "update" else "adamw"
            assert (
                checkpointing.resolve(stage, Policy(tmp_path).dimensions, whole).deepspeed.gradient_checkpointing
                is expected
            )
    stage = stages["update"]
    (tmp_path / "config.json").write_text("{}")
    assert checkpointing.resolve(stage, Policy(tmp_path).dimensions).deepspeed.gradient_checkpointing is False, (
        "sizes are not known"
    )


@pytest.mark.parametrize("optimizer", [None, "adafactor"])
@pytest.mark.parametrize("recomputed", [True, False])
def test_micro_batches_are_as_large_as_the_card_allows(optimizer, recomputed) -> None:
    config = Config(**mini(deepspeed={"gradient_checkpointing": recomputed}))
    assert config.deepspeed.micro_batch_tokens == 16384

    def needed(tokens: int) -> float:
        plain = config.override({"update.optimizer": optimizer or config.update.optimizer})
        copies = 1.0 if optimizer else memory.copies(config, config.rollout.max_completion_length / 4)
        batch = MicroBatch(tokens, tokens, several=True, copies=copies)
        return memory.total(RunMemory(plain, SHAPE, "cuda").update(batch)) / memory.ROOM

    def chosen(room: float, device: str = "cuda") -> int | str:
        resolved = checkpointing.resolve_for(config, SHAPE, device, room, optimizer)
        assert resolved.update == config.update
        return resolved.deepspeed.max_tokens_per_micro_batch

    assert [chosen(needed(tokens) + 1e6) for tokens in (2048, 20480)] == [2048, 20480]
    assert (chosen(0.0), chosen(1e15)) == (checkpointing.STEP, checkpointing.MOST)
    assert chosen(1e15, "cpu") == "auto"


def test_the_estimate_holds_where_it_was_measured() -> None:
    """1.5 billion weights on an H200: 11,200 tokens took 65.8 GB, and 37 thousand more than there is (gpus.md)."""
    shape = ModelDims(1536, 28, 1536, 256, 8960, 151_936, 1_543_714_304)
    config = Config(**mini(model={"dtype": "bfloat16"}, deepspeed={"gradient_checkpointing": False}))
    chosen = checkpointing.resolve_for(config, shape, "cuda", 143_771 * 2**20).deepspeed.max_tokens_per_micro_batch
    assert 11_200 < chosen < 37_000


def test_ranks_share_the_memory_of_a_job(monkeypatch) -> None:
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "100")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert devices.machine_bytes() == 100 * 2**20
    assert devices.training_bytes() == 25 * 2**20 or devices.has_gpu()


LLAMA_70B = ModelDims(8192, 80, 8192, 1024, 28672, 128256, 70_553_706_496)


@pytest.mark.parametrize(("nodes", "card", "fits"), [(4, "h100:80", True), (2, "h100:80", False), (2, "h200", True)])
def test_70_billion_weights_fit_on_four_nodes_and_on_two_of_larger_cards(nodes, card, fits) -> None:
    config = load(ROOT / "config" / "llama-70b.yaml")
    config = config.override({"deepspeed.nodes": nodes, "deepspeed.processes": 8 * nodes})
    resolved = checkpointing.resolve_for(config, LLAMA_70B, "cuda", 80e9)
    assert resolved.deepspeed.gradient_checkpointing is True
    by_stage = {fit.stage: fit for fit in GpuEstimate(resolved, LLAMA_70B, cards.card_of(card)).fits()}
    assert by_stage["update"].fits is fits
    assert by_stage["reference"].fits, "log-probs are computed by all processes"
    assert by_stage["rollout"].fits
    offload = resolved.override({"deepspeed.offload": Offload(optimizer="cpu")})
    assert next(iter(GpuEstimate(offload, LLAMA_70B, cards.card_of(card)).fits())).fits
