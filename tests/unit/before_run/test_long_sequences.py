"""Sequences that processes share (`deepspeed.sequence_parallel`): what is refused, and what a plan says of them."""

from contextlib import ExitStack

import pytest
from helpers import ROOT, mini

from rloo_pipeline.artifacts.model_dims import ModelDims
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.before_run import advice, cards, checkpointing, layouts, memory, model_trial
from rloo_pipeline.before_run.estimate import GpuEstimate
from rloo_pipeline.before_run.findings import RunInputs
from rloo_pipeline.before_run.memory import MicroBatch, RunMemory
from rloo_pipeline.commands import plan_gpus
from rloo_pipeline.config import Config
from rloo_pipeline.config.loading import load
from rloo_pipeline.training.self_check.against_plain import SelfCheck

H100 = cards.card_of("h100")
LONG = load(ROOT / "config" / "long-context.yaml")
QWQ = ModelDims(5120, 64, 5120, 1024, 27648, 152064, 32_763_876_352, query_heads=40)
SMALL = ModelDims(1024, 16, 1024, 512, 3072, 32000, 300_000_000, query_heads=16)
SHARED = {"processes": 2, "sequence_parallel": 2}
REFUSED = {
    r"sequence_parallel \(2\) does not divide processes \(3\)": {"deepspeed": {**SHARED, "processes": 3}},
    "dataset.image_column: image cannot be used with deepspeed.sequence_parallel: 2": {
        "deepspeed": SHARED,
        "dataset": {"image_column": "image"},
        "warmstart": {"sft": None},
    },
    r"decode_context_parallel_size \(2\) does not divide tensor_parallel_size \(1\)": {
        "vllm": {"decode_context_parallel_size": 2}
    },
    "router_replay cannot be used with vllm.decode_context_parallel_size: 2": {
        "vllm": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        "rollout": {"router_replay": True},
    },
    "model.dtype: float16 cannot be used with deepspeed.sequence_parallel: 2": {
        "deepspeed": SHARED,
        "model": {"dtype": "float16"},
    },
    "model.dtype: float16 cannot be used with deepspeed.gradient_checkpointing: offload": {
        "deepspeed": {"gradient_checkpointing": "offload"},
        "model": {"dtype": "float16"},
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_share_sequences_is_refused(message) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**mini(**REFUSED[message]))


def test_check_refuses_a_model_that_is_not_packed(tiny_model, monkeypatch) -> None:
    padded = SelfCheck("Mamba", 0.0, 0.0, "", "", form="padded", why="it has a state")
    monkeypatch.setattr(model_trial.self_check, "load_or_run", lambda *_: padded)
    monkeypatch.setattr(model_trial, "_model", lambda _: Policy(tiny_model))
    for shared, ok in ((SHARED, False), ({}, True)):
        (finding,) = model_trial.model(RunInputs(Config(**mini(deepspeed=shared)), tiny_model, ExitStack()))
        assert finding.ok is ok
        assert ok or "Mamba trains in padded batches, so its tokens cannot be split" in finding.message


def test_each_process_has_its_part_of_a_sequence() -> None:
    alone = Config(**mini(deepspeed={"max_tokens_per_micro_batch": 80}))
    shared = Config(**mini(deepspeed={**SHARED, "max_tokens_per_micro_batch": 80}))
    assert MicroBatch.largest(alone).tokens == 2 * MicroBatch.largest(shared).tokens
    whole, part = (RunMemory(config, SMALL, "cuda").update() for config in (alone, shared))
    assert part["activations"] == whole["activations"] / 2
    assert part["weights"] == whole["weights"]
    assert RunMemory(shared, SMALL).logits(MicroBatch(10**6, 10**6, True)) == 4 * 2**28
    whole, part = (RunMemory(config, SMALL, "cuda").reference() for config in (alone, shared))
    assert part["activations"] == whole["activations"] / 2
    assert shared.deepspeed.forward_processes == 2


def test_automatic_micro_batches_are_those_of_all_processes_that_share_one() -> None:
    config = Config(**mini(deepspeed={**SHARED, "gradient_checkpointing": True}))
    sizes = [
        checkpointing.resolve_for(one, SMALL, "cuda", 3e10).deepspeed.micro_batch_tokens
        for one in (config, config.override({"deepspeed.sequence_parallel": 1}))
    ]
    assert 1.9 < sizes[0] / sizes[1] < 2.2


def test_inputs_of_layers_in_host_memory_are_in_the_nodes_memory_of_a_plan() -> None:
    offloaded = LONG.override({"deepspeed.gradient_checkpointing": "offload"})
    on_gpu, moved = (RunMemory(config, QWQ, "cuda").update()["activations"] for config in (LONG, offloaded))
    inputs = MicroBatch.largest(LONG).tokens * 64 * 5120 * 2
    assert on_gpu - moved == inputs
    assert RunMemory(offloaded, QWQ).offloaded() == {"inputs of layers": inputs}
    assert RunMemory(LONG, QWQ).offloaded() == {}


def test_the_shipped_configuration_fits_only_with_sequences_that_gpus_share() -> None:
    assert GpuEstimate(LONG, QWQ, H100).problem == ""
    alone = LONG.override({"deepspeed.sequence_parallel": 1})
    assert "update takes 113 GB per GPU" in GpuEstimate(alone, QWQ, H100).problem
    text = (ROOT / "config" / "long-context.yaml").read_text().replace("\n# ", " ")
    terms, shared = (RunMemory(config, QWQ, "cuda").update() for config in (alone, LONG))
    assert f"{(terms['optimizer'] + 2 * terms['weights']) / 1e9:.0f} GB each" in text
    whole, part = (each["activations"] / 1e9 for each in (terms, shared))
    assert f"would take {whole:.0f} GB on one GPU, even recomputed" in text
    assert f"they take {part:.0f} GB on each" in text
    assert f"{memory.total(shared) / 1e9:.0f} GB per GPU in all" in text


def test_a_plan_for_gpus_shares_sequences_where_they_do_not_fit_otherwise() -> None:
    best = layouts.layouts(LONG.override({"deepspeed.sequence_parallel": 1}), QWQ, H100, 16)[0]
    assert best.problem == ""
    assert best.config.deepspeed.sequence_parallel == 4
    assert "sequence_parallel: 4" in plan_gpus.written(best)
    odd = layouts.layouts(LONG, QWQ._replace(query_heads=5), H100, 16)[0]
    assert odd.config.deepspeed.sequence_parallel == 1


def test_advice_is_to_share_sequences_before_more_gpus_are_taken() -> None:
    alone = LONG.override({"deepspeed.sequence_parallel": 1})
    assert "deepspeed.sequence_parallel: 4" in advice.nearest_update(alone, QWQ, H100.gigabytes * 1e9 * memory.ROOM)


def test_the_hours_of_long_sequences_are_those_of_attention_too() -> None:
    """A token attends to 32,768 others on average, with 2 products of 5,120 numbers in each of 64 layers."""
    hours, without = (GpuEstimate(LONG, shape, H100).hours("fast")["update"] for shape in (QWQ, QWQ._replace(heads=0)))
    products = 2 * 2 * 32768 * 5120 * 64 / (2 * QWQ.parameters)
    assert hours / without == pytest.approx(1 + products, rel=0.1)
