"""The limits of checks and symptoms stand beside them, and are keys of the configuration under their names."""

import pytest
from helpers import mini

from rloo_pipeline.checks.registry import CHECKS, SYMPTOMS
from rloo_pipeline.config import CheckLimits, Gates
from rloo_pipeline.config.loading import validate
from rloo_pipeline.errors import UserError


def test_the_configuration_has_a_key_for_each_check_and_each_limit_of_a_symptom() -> None:
    assert CheckLimits.model_fields.keys() == CHECKS.keys()
    for name, rule in SYMPTOMS.items():
        assert Gates().of(name).limits() == {limit: default for limit, (_, default) in rule.limits.items()}
    assert sum(len(rule.limits) for rule in SYMPTOMS.values()) > len(SYMPTOMS)


def test_a_limit_has_the_value_of_its_decorator_or_of_the_configuration() -> None:
    changes = {
        "checks": {"limits": {"mixed": [0.3, 0.1], "logprob_difference": None}},
        "gates": {"kl_explosion": {"max_kl": 0.3, "action": "stop"}},
    }
    config = validate(mini(**changes), "test")
    limits = config.checks.limits.by_name("float16")
    assert (limits["mixed"], limits["teaching"], limits["logprob_difference"]) == ((0.3, 0.1), (0.2, 0.01), (0.02, 0.1))
    gate = config.gates.of("kl_explosion")
    assert (gate.action, gate.limits()) == ("stop", {"max_kl": 0.3, "growth": 4.0})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checks": {"limits": {"mixd": [0, 0]}}}, "unknown key 'checks.limits.mixd'; did you mean 'mixed'?"),
        (
            {"gates": {"kl_explosion": {"max_kls": 1}}},
            "unknown key 'gates.kl_explosion.max_kls'; did you mean 'max_kl'?",
        ),
        (
            {"gates": {"kl_explosion": {"growth": 1}}},
            "gates.kl_explosion.growth: Input should be greater than 1, got 1",
        ),
        ({"gates": {"memory": {"action": "stop"}}}, "gates.memory.action: Input should be 'off' or 'warn', got 'stop'"),
    ],
)
def test_a_wrong_name_or_value_of_a_limit_is_refused_by_name(change, message) -> None:
    with pytest.raises(UserError) as error:
        validate(mini(**change), "test")
    assert str(error.value) == f"test: {message}"
