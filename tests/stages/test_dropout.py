"""A model's own dropout is off in training; if configured, it is on in both sides of a ratio."""

import json
import shutil

import pyarrow.parquet as pq
import pytest
import torch
from cases import RIGHT, write
from helpers import Round
from trainers import trainer_settings, use_micro_batches

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Lora
from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.packing import Sequences

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("engines")]

SEQUENCES = Sequences([[5, 6, 7]] * 2, [[8, 9, 10], [11, 12]])
SEQUENCES_MASK = torch.tensor([[True, True, True], [True, True, False]])


def log_probs(engine: Engine) -> list[torch.Tensor]:
    """Old log-probs, computed three times, and the log-probs in an optimizer step; then entropies of the last two."""
    in_step: list[torch.Tensor] = []

    def loss_of(_, logps, mask, entropy):
        in_step.extend((logps.detach().to("cpu", copy=True), entropy.to("cpu", copy=True)))
        return (logps * mask).sum()

    old = [engine.logps(SEQUENCES) for _ in range(2)]
    use_micro_batches(engine, 1)
    logps, entropies = engine.outputs(SEQUENCES, lambda _: None, entropies=True)
    use_micro_batches(engine, 100)
    engine.step(SEQUENCES, range(2), loss_of)
    return [*old, logps, in_step[0], entropies, in_step[1]]


@pytest.mark.parametrize("dropout", ["nowhere", "by the model", "of the adapter"])
def test_a_step_and_its_old_log_probs_both_have_dropout_or_neither_has(tmp_path, dropout) -> None:
    folder = write(tmp_path, "gpt2", RIGHT["gpt2"])
    lora = Lora(lora_dropout=0.5, target_modules=["c_attn"]) if dropout == "of the adapter" else None
    engine = Engine(Policy(folder), trainer_settings(lora=lora, disable_dropout=dropout != "by the model"), 0)
    if lora is not None:
        with torch.no_grad():
            for name, weights in engine.model.named_parameters():
                if "lora_B" in name:
                    weights.normal_()
    first, again, with_entropies, stepped, entropies, of_step = log_probs(engine)
    if dropout == "nowhere":
        torch.testing.assert_close(first, again, rtol=0, atol=0)
        torch.testing.assert_close(first, stepped, rtol=0, atol=1e-6)
        torch.testing.assert_close(first, with_entropies, rtol=0, atol=1e-5)
        torch.testing.assert_close(entropies, of_step, rtol=0, atol=1e-5)
        assert (entropies[SEQUENCES_MASK] > 0).all()
    else:
        assert not torch.equal(first, again), "old log-probs drop something"
        assert not torch.allclose(again, stepped, atol=1e-3), "and so does the step"
        assert not torch.allclose(entropies, of_step, atol=1e-3), "and the pass for entropies"


def test_no_two_micro_batches_drop_the_same_not_even_on_two_ranks(tmp_path, tiny_model) -> None:
    """All completions are the same, each in a micro-batch of its own."""
    shutil.copytree(tiny_model, tmp_path / "model")
    file = tmp_path / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attention_dropout": 0.5}))
    keys = {"old_logps": "sampler", "beta": 0, "steps_per_generation": 1}
    ranks = {"processes": 2, "max_tokens_per_micro_batch": 1}
    changes = {"algorithm": keys, "deepspeed": ranks, "update": {"disable_dropout": False}}
    run = Round(tmp_path / "run", tmp_path / "model", **changes)
    run.alike = {"prompt_ids": [5, 6, 7], "completion_ids": [8, 9, 10, 2], "sampling_logps": [-3.0] * 4}
    for outcome in run.write(1).update_by_ranks():
        assert outcome.returncode == 0, outcome.stderr
    ratios = pq.read_table(run.run / "rounds/00001/train.parquet")["ratio"].to_pylist()
    assert len(set(ratios)) == len(ratios) == 64
