"""The stage `reward_model` in `rloo plan`."""

from helpers import ROOT, printed

from rloo_pipeline.artifacts.model_dims import BYTES, ModelDims
from rloo_pipeline.before_run import cards, estimate, model_inputs
from rloo_pipeline.before_run.memory import GB
from rloo_pipeline.commands.plan import plan_run
from rloo_pipeline.config import Config, RewardModel
from rloo_pipeline.config.loading import load

H100 = cards.card_of("h100")
FOUR = ModelDims(2560, 36, 4096, 1024, 9728, 151936, 4_022_468_096)
DEMO = load(ROOT / "config" / "preferences-demo.yaml")


def cost(card: cards.Card = H100, **changes: object) -> estimate.RewardModelCost:
    """Of a model of four billion weights, which is the run's own."""
    assert DEMO.reward_model is not None
    section = DEMO.reward_model.model_copy(update={"build": None, "name_or_path": None, **changes})
    found = estimate.reward_model(with_section(section), FOUR, card.gigabytes * GB, card)
    assert found is not None
    return found


def with_section(section: RewardModel | None) -> Config:
    deepspeed = DEMO.deepspeed.model_copy(update={"processes": 4, "zero_stage": 2})
    return DEMO.model_copy(update={"reward_model": section, "deepspeed": deepspeed})


def test_hours_follow_the_preferences() -> None:
    once, twice = cost(), cost(num_train_epochs=2)
    assert once.tokens == 16_384 * 2 * 1024
    assert once.hours is not None
    assert twice.hours is not None
    starts = 4 * 60 / 3600
    assert abs((twice.hours - starts) / (once.hours - starts) - 2) < 1e-6


def test_longer_conversations_take_memory_and_a_small_card_is_too_small() -> None:
    short, long = cost(max_length=16), cost(max_length=20_000)
    assert long.terms["activations"] > 10 * short.terms["activations"]
    assert short.terms["weights"] == long.terms["weights"] == FOUR.parameters * BYTES[DEMO.model.dtype]
    assert not short.problem
    assert cost(cards.card_of("t4")).problem.startswith("reward_model takes ")


def test_the_plan_shows_it_where_there_is_one(monkeypatch) -> None:
    monkeypatch.setattr(model_inputs, "shape", lambda *_: FOUR)  # else the demo's model is made
    assert "reward model, once: at most 33,554,432 tokens" in printed(plan_run, DEMO, "h100", width=120)
    assert estimate.reward_model(with_section(None), FOUR, 1e9, H100) is None
