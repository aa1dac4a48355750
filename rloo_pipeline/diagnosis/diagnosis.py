"""The symptoms of a run: metrics of its rounds in, what is wrong since when, why one thinks so, and what helps, out.

Pure: the same metrics and thresholds give the same list, whether the run is finished, stopped or in flight.

**How a gate ends a run.** Between round r and the rollouts of round r+1 stands the rule `gate`. It writes
`rounds/r/diagnosis.json`; where a symptom shows whose action is `stop`, it writes `stopped.json`, says so in one
sentence and fails, with no output to delete: every policy, table and trainer state stays. Then the workflow's `onerror`
calls Snakemake once more with `rounds=r`, since a stopped run *is* a run of r rounds: policy r is evaluated and the
report is made by the ordinary rules, on the same cluster. The same command, with the gate set to `warn` or another
cure, goes on as any run does that is extended.

Why so: an update that fails would lose its policy; checkpoints would let Snakemake plan one round only; jobs that end
at once without doing their work would leave files that are not what they say. The gate's file is an `ancient` input of
rollouts, and no parameter of the rule `gate` is of its thresholds, so a change of them, or of this module, runs nothing
again; another learning rate makes new metrics, which are judged again. There is no gate behind the last round, where
nothing is left to stop, so an extended run is judged there before it goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from rloo_pipeline.config import JSON, Gates, Reward
from rloo_pipeline.diagnosis.symptoms import REGISTRY, Metrics, Seen


class Symptom(NamedTuple):
    """Something that is wrong with a run."""

    name: str
    """Its key in `gates`."""
    title: str
    action: Literal["warn", "stop"]
    first: int
    """The first round that showed it."""
    last: int
    """The latest round that showed it."""
    evidence: str
    """As of the latest round that showed it."""
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
) -> list[Symptom]:
    """The symptoms that rounds showed, those that began first to the front; one that is `off` is not looked for.

    Args:
        rounds: metrics.json of rounds 1, 2, … as far as they are there.
        gates: thresholds; their defaults where not given.
        monitors: reward functions that should not fall (`monitors_of` a configuration).
        evaluations: summary.json of evaluated policies, by the policy's number (0 is the warm start), with
            distance.json under `distance` where there is one.
        out_of_memory: by round, what a log says of memory.
        planned: the run's last round.
    """
    gates = gates or Gates()
    found = []
    for name, known in REGISTRY.items():
        gate = getattr(gates, name)
        if gate.action == "off":
            continue
        shown = []
        for count in range(1, len(rounds) + 1):
            seen = Seen(rounds[:count], monitors, evaluations or {}, out_of_memory or {}, planned)
            if evidence := known.evidence(seen, gate):
                shown.append((seen.round, evidence))
        if shown:
            (first, _), (last, evidence) = shown[0], shown[-1]
            found.append(Symptom(name, known.title, gate.action, first, last, evidence, known.cure))
    return sorted(found, key=lambda symptom: symptom.first)


def showing(symptoms: Sequence[Symptom], number: int) -> list[Symptom]:
    """Those that show in round `number`, where that is the latest."""
    return [symptom for symptom in symptoms if symptom.last == number]


def monitors_of(rewards: Sequence[Reward]) -> list[str]:
    """Reward functions that are measured and do not teach."""
    return [reward.column for reward in rewards if reward.weight == 0]
