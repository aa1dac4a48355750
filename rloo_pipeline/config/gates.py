"""Section `gates`: the reaction to each symptom. Each symptom has its limits beside it, in checks/symptoms.py.

Gates do not change results, so a new limit reruns nothing. It applies to rounds that are judged from then on.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, create_model

from rloo_pipeline.checks import symptoms  # noqa: F401, registers them
from rloo_pipeline.checks.registry import SYMPTOMS, SymptomRule
from rloo_pipeline.config.section import JSON, Section, with_fields

OFF = BeforeValidator(lambda action: "off" if action is False else action)
"""YAML parses an unquoted `off` as false."""


class Gate(Section):
    """The reaction to one symptom, and its limits."""

    action: Annotated[Literal["off", "warn", "stop"], OFF] = "warn"
    """`off`: do not look for it. `warn`: print a line on the terminal. `stop`: end the run after this round."""

    def limits(self) -> JSON:
        """The keyword arguments of the symptom's function."""
        return {name: getattr(self, name) for name in type(self).model_fields if name != "action"}


class LogGate(Gate):
    """The reaction to a symptom whose evidence is in logs."""

    action: Annotated[Literal["off", "warn"], OFF] = "warn"
    """`warn`: `rloo diagnose` and the report show it. `off`: they do not look for it."""


def _key(name: str, rule: SymptomRule) -> tuple[Any, Any]:
    """Section and default of a symptom, for pydantic."""
    title = "".join(word.capitalize() for word in name.split("_"))
    base = Gate if rule.evidence else LogGate
    limits: JSON = {**rule.limits}
    section = create_model(title, __base__=base, __doc__=rule.description, **limits)
    return section, Field(section(), description=rule.description)


@with_fields({name: _key(name, rule) for name, rule in SYMPTOMS.items()})
class Gates(Section):
    """Symptoms that a gate looks for after each round, and the action for each; `memory` has no `stop`. `rloo diagnose
    RUN` prints them at any time. docs/monitoring.md lists them.
    """

    def of(self, name: str) -> Gate:
        """The gate of a symptom."""
        gate: Gate = getattr(self, name)
        return gate
