"""The symptoms of a run, found in the metrics of its rounds: what is wrong, since when, the evidence, and what helps.

This is a pure function: the same metrics and thresholds give the same list, whether the run is finished, stopped or in
flight.

**How a gate ends a run.** The rule `gate` stands between round r and the rollouts of round r+1. It writes
`rounds/r/diagnosis.json`. If a symptom with the action `stop` shows, it writes `stopped.json`, prints one sentence and
fails. It has no other output that Snakemake would delete, so every policy, table and trainer state stays. The
workflow then calls Snakemake again with `rounds=r`, because a stopped run *is* a run of r rounds: the
ordinary rules evaluate policy r and make the report, on the same cluster. To continue the run, repeat the command with
the gate set to `warn` or with a cure in the configuration; the run is extended like any other.

**Alternatives that do not work.** An update that fails would lose its policy. Checkpoints would let Snakemake plan only
one round. Jobs that end at once without doing their work would leave files that do not hold what their names say.

**What reruns what.** The gate's file is an `ancient` input of rollouts, and the thresholds are not parameters of the
rule `gate`. So a change of thresholds, or of this module, reruns nothing; a different learning rate makes new metrics,
which are judged again. The last round has no gate, because nothing is left to stop; when a run is extended, its former
last round is judged before the next rollouts.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from rloo_pipeline.checks.history import Metrics, RoundHistory
from rloo_pipeline.checks.registry import SYMPTOMS
from rloo_pipeline.config import JSON, Gates, Reward

STOPPED = "stopped.json"
"""File in the run's folder, written by the gate that ends the run: the round and the symptoms."""


class Symptom(NamedTuple):
    """Something that is wrong with a run."""

    name: str
    """The symptom's key in `gates`."""
    title: str
    action: str
    """`warn` or `stop`."""
    first: int
    """The first round that showed it."""
    last: int
    """The latest round that showed it."""
    evidence: str
    """Evidence from the latest round that showed the symptom."""
    cure: str
    """Keys to change."""

    def line(self) -> str:
        """One line for the terminal."""
        return f"{self.action}: round {self.last}: {self.title}: {self.evidence}; try: {self.cure}"


def diagnose(
    rounds: Sequence[Metrics],
    gates: Gates | None = None,
    *,
    monitors: Sequence[str] = (),
    evaluations: Mapping[int, JSON] | None = None,
    out_of_memory: Mapping[int, str] | None = None,
    planned: int | None = None,
    since: int = 0,
    only: Collection[str] | None = None,
) -> list[Symptom]:
    """Finds the symptoms of a run. A symptom whose action is `off` is skipped.

    Args:
        rounds: metrics.json of rounds 1, 2, … without a gap.
        gates: actions and limits; the defaults if None.
        monitors: reward functions that should not fall (see `monitors_of`).
        evaluations: summary.json of evaluated policies by the policy's number (0 is the warm start), with
            distance.json, if any, under `distance`.
        out_of_memory: by round, the out-of-memory line in a log of its stages; round 0 stands for all before round 1.
        planned: the run's last round.
        since: the first round that is judged.
        only: names of symptoms to look for; None for all.

    Returns:
        Symptoms sorted by the round that showed them first.
    """
    gates = gates or Gates()
    looked_for = SYMPTOMS if only is None else only
    watched = {name: gate for name in SYMPTOMS if name in looked_for and (gate := gates.of(name)).action != "off"}
    evidence_by_round: dict[str, dict[int, str]] = {name: {} for name in watched}
    for count in range(max(since, 1), len(rounds) + 1):
        history = RoundHistory(rounds[:count], monitors, evaluations or {}, planned)
        for name, gate in watched.items():
            judge = SYMPTOMS[name].evidence
            if judge and (evidence := judge(history, **gate.limits())):
                evidence_by_round[name][history.round] = evidence
    if "memory" in watched:
        memory_lines = (out_of_memory or {}).items()
        evidence_by_round["memory"] = {number: line for number, line in memory_lines if number >= since}
    symptoms = [
        Symptom(name, rule.title, watched[name].action, min(shown), max(shown), shown[max(shown)], rule.cure)
        for name, rule in SYMPTOMS.items()
        if (shown := evidence_by_round.get(name))
    ]
    return sorted(symptoms, key=lambda symptom: symptom.first)


def showing(symptoms: Sequence[Symptom], number: int) -> list[Symptom]:
    """The symptoms that show in round `number`, which must be the latest."""
    return [symptom for symptom in symptoms if symptom.last == number]


def monitors_of(rewards: Sequence[Reward]) -> list[str]:
    """Reward functions of weight 0, which are measured but not trained on."""
    return [reward.column for reward in rewards if reward.weight == 0]
