"""With `reproducible: true`, engines compute the same bytes in any batch, and a run stays on one kind of card."""

import argparse

import pytest
import torch
import yaml
from helpers import mini

from rloo_pipeline.artifacts import lineage, tables
from rloo_pipeline.cli import stage_options
from rloo_pipeline.config import Config
from rloo_pipeline.errors import IncompatibleEngine, UserError
from rloo_pipeline.runtime import devices, reproducible


@pytest.fixture(autouse=True)
def fresh(monkeypatch) -> None:
    """A process that has run no stage yet."""
    monkeypatch.setattr(reproducible, "_asked", None)
    for name in reproducible.VARIABLES:
        monkeypatch.setenv(name, "unset")


@pytest.mark.parametrize(("asked", "gpu", "value"), [(True, True, "1"), (True, False, "unset"), (False, True, "unset")])
def test_vllm_is_batch_invariant_where_it_is_asked_for_and_there_is_a_gpu(asked, gpu, value, monkeypatch) -> None:
    monkeypatch.setattr(devices, "has_gpu", lambda: gpu)
    reproducible.prepare(asked)
    assert reproducible.os.environ["VLLM_BATCH_INVARIANT"] == value


def test_a_worker_that_has_loaded_other_kernels_starts_again() -> None:
    reproducible.prepare(False)
    reproducible.prepare(False)
    with pytest.raises(IncompatibleEngine):
        reproducible.prepare(True)


def test_torch_refuses_what_has_no_deterministic_kernel() -> None:
    try:
        reproducible.use_torch(1, True)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        reproducible.use_torch(1, False)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_stage_refuses_what_another_kind_of_card_has_made(tmp_path, monkeypatch) -> None:
    table = tmp_path / "rounds/00001/reference/000.parquet"
    rows = [{"prompt_id": "a", "sample": 0, "reference_logps": [0.0]}]
    with tables.common_facts(sampler_card="NVIDIA A100", logprobs_card="NVIDIA H100"):
        tables.write(table, rows, tables.REFERENCE, "reference", seed=mini()["seed"])
    assert lineage.cards_of([table]) == {"sampler_card": "NVIDIA A100", "logprobs_card": "NVIDIA H100"}
    monkeypatch.setattr(devices, "card", lambda: "NVIDIA H200")
    monkeypatch.setattr(stage_options.fence, "acquire", lambda *_: None)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(mini(reproducible=True)))
    arguments = argparse.Namespace(config=None, output=tmp_path / "rounds/00001/reference/001.parquet", rollouts=table)
    with pytest.raises(
        UserError, match="made on NVIDIA H100, but this machine has NVIDIA H200, which computes different"
    ):
        stage_options.stage_config(arguments, "reference")
    assert stage_options.card_facts(Config.model_validate(mini(reproducible=True)), "score") == {}, "it has no engine"


def test_the_facts_of_a_policy_name_the_cards_of_its_round() -> None:
    facts = lineage.of_policy(0, None, "abc", {"sampler_card": "NVIDIA H100"})
    assert facts["sampler_card"] == "NVIDIA H100"


@pytest.mark.parametrize(
    ("visible", "card"), [("MIG-7", "NVIDIA H100 80GB HBM3 3g.40gb"), ("GPU-1", "NVIDIA H100 80GB HBM3")]
)
def test_a_slice_of_a_gpu_is_a_card_of_its_own(visible, card, monkeypatch) -> None:
    listed = ["GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)", "  MIG 3g.40gb     Device  0: (UUID: MIG-7)"]
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setattr(devices, "nvidia_smi", lambda *_: listed)
    monkeypatch.setattr(devices, "gpu_facts", lambda _: ["NVIDIA H100 80GB HBM3"] * 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.card() == card


def test_a_machine_without_a_gpu_names_its_processor() -> None:
    assert devices.has_gpu() or devices.card()
