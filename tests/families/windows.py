"""Every type of causal language model that a tiny configuration makes, without an attention window and with one of 16.

`make models` counts them and writes the result into docs/generated/families.md; with types as arguments, they are only
printed.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import cases
import page
import torch
import transformers
from sweep import KINDS, Outcome, of_configuration
from transformers import AutoModelForCausalLM

from rloo_pipeline.training.self_check import small

BEGIN, END = "<!-- windows -->\n", "<!-- /windows -->\n"
WINDOW = 16


def configurations(kind: str) -> Iterator[tuple[int | None, Any]]:
    """The configurations of a type that are models: without a window and, where the type has any, with one."""
    for window in (None, WINDOW):
        facts = {**cases.EXPERTS, **cases.RIGHT.get(kind, {}), **cases.OTHERS.get(kind, {})}
        facts.pop("sliding_window", None)
        if window is None and "sliding_attention" in facts.get("layer_types", ()):
            facts["layer_types"] = ["full_attention"] * len(facts["layer_types"])
        try:
            has_window = hasattr(cases.config(kind, facts), "sliding_window")
            if window is not None and not has_window:
                continue
            use_window = {"use_sliding_window": True} if window else {}
            config = cases.config(kind, {**facts, **({"sliding_window": window, **use_window} if has_window else {})})
            _run(config)
        except Exception:  # of any kind: no model of these sizes
            continue
        yield window, config


@torch.no_grad()
def _run(config: Any) -> None:
    """Runs the plain model, unless it is large although its configuration is not."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if sum(weights.numel() for weights in model.parameters()) < small.MAX_WEIGHTS:
        AutoModelForCausalLM.from_config(config).eval()(torch.tensor([[3, 4, 5]]), use_cache=False)


def outcomes(kinds: list[str]) -> Iterator[tuple[str, Outcome]]:
    """Each case and its result."""
    for kind in kinds:
        for window, config in configurations(kind):
            name = f"`{kind}`" + (f" with a window of {window}" if window else "")
            yield name, _outcome(config)


def _outcome(config: Any) -> Outcome:
    try:
        return of_configuration(config, config.to_dict())
    except Exception as error:
        return Outcome("crashed", repr(error))


def text(outcomes: dict[str, Outcome]) -> str:
    """The counts, and the cases that are refused, with the reason."""
    verdicts = Counter(outcome.verdict for outcome in outcomes.values())
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    lines = list[str]()
    for name, outcome in outcomes.items():
        if outcome.verdict != "right":
            lines.append("| " + name + " | " + page.row(name.split("`")[1], outcome).split(" | ", 1)[1])
    head = ["| not right | | |", "|---|---|---|"]
    return "\n".join([f"{len(outcomes)} cases: {counts}.", "", *head, *lines]) + "\n"


def main(kinds: list[str]) -> None:
    """Tries the cases; without `kinds`, tries all cases and writes the page."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    results = {}
    for name, outcome in outcomes(kinds or KINDS):
        results[name] = outcome
        print(name, outcome.verdict, outcome.form, outcome.why[:200], flush=True)
    print(text(results))
    if not kinds:
        before, _, rest = page.PAGE.read_text().partition(BEGIN)
        page.PAGE.write_text(before + BEGIN + text(results) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main(sys.argv[1:])
