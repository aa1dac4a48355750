"""A model's own dropout is off in training; if configured, it is on in both sides of a ratio."""

import pytest
import torch
from cases import RIGHT, write
from trainers import trainer_settings

from rloo_pipeline.config import Lora
from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.packing import Sequences

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("engines")]

SEQUENCES = Sequences([[5, 6, 7]] * 2, [[8, 9, 10], [11, 12]])


def log_probs(engine: Engine) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Old log-probs, computed twice, and the log-probs in an optimizer step."""
    step_logps = []

    def loss_of(_, logps, mask, __):
        step_logps.append(logps.detach().clone())
        return (logps * mask).sum()

    old = [engine.logps(SEQUENCES, 100, lambda _: None) for _ in range(2)]
    engine.step(SEQUENCES, range(2), 100, loss_of, lambda _: None)
    return *old, step_logps[0]


@pytest.mark.parametrize("dropout", ["nowhere", "by the model", "of the adapter"])
def test_a_step_and_its_old_log_probs_both_have_dropout_or_neither_has(tmp_path, dropout) -> None:
    folder = write(tmp_path, "gpt2", RIGHT["gpt2"])
    lora = Lora(lora_dropout=0.5, target_modules=["c_attn"]) if dropout == "of the adapter" else None
    engine = Engine(folder, trainer_settings(lora=lora, disable_dropout=dropout != "by the model"), 0)
    if lora is not None:
        with torch.no_grad():
            for name, weights in engine.model.named_parameters():
                if "lora_B" in name:
                    weights.normal_()
    first, again, stepped = log_probs(engine)
    if dropout == "nowhere":
        torch.testing.assert_close(first, again, rtol=0, atol=0)
        torch.testing.assert_close(first, stepped, rtol=0, atol=1e-6)
    else:
        assert not torch.equal(first, again), "old log-probs drop something"
        assert not torch.allclose(again, stepped, atol=1e-3), "and so does the step"
