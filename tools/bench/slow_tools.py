"""Tokens/s of the engine with a few slow tools, as a share of that with none: `slow_tools.py results/tools-demo`.

Samples one round of the run again and again, with a calculator that takes its time for some expressions and with one
that does not, in turn, with the same engine. The tokens are the same, so the share is one of times. Log-probs may
differ in their last digits, since the engine batches what is there.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.config import Config
from rloo_pipeline.config.loading import load
from rloo_pipeline.rollout import groups
from rloo_pipeline.rollout.requests import SamplingConfig
from rloo_pipeline.rollout.sampler import Sampler

TOOL = '''
import time
from rloo_pipeline.environments import tools

SLOW = {slow!r}

def calculator(expression: str) -> str:
    """Computes.

    Args:
        expression: a product
    """
    if expression in SLOW:
        time.sleep({seconds})
    return tools.calculator(expression)
'''


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a finished run of config/tools-demo.yaml")
    parser.add_argument("--slow", type=int, default=8, help="number of slow calls")
    parser.add_argument("--seconds", type=float, default=2.0, help="what each of them takes")
    parser.add_argument("--pairs", type=int, default=3, help="how often both are measured")
    options = parser.parse_args()
    config, policy = load(options.run / "config.yaml"), sorted((options.run / "policies").iterdir())[-1]
    train = PromptSet(options.run / "prompts" / "train")
    rows = train.rows([*range(config.rollout.num_prompts)])
    sampler = groups.load_sampler(Policy(policy), config, train, config.rollout.max_completion_length)
    assert isinstance(sampler, Sampler), "a run with tools has one engine"
    with tempfile.TemporaryDirectory() as folder:
        quick = _with_tool(config, Path(folder) / "quick.py", [], options.seconds)
        first, _ = _sample(sampler, quick, rows)
        called = [expression for row in first for expression in _called(row)]
        once = [expression for expression in called if called.count(expression) == 1][: options.slow]
        assert len(once) == options.slow, f"only {len(once)} expressions are called once"
        slow = _with_tool(config, Path(folder) / "slow.py", once, options.seconds)
        shares = []
        for _ in range(options.pairs):
            (quick_rows, quick_seconds), (slow_rows, slow_seconds) = (
                _sample(sampler, one, rows) for one in (quick, slow)
            )
            for row, *others in zip(first, quick_rows, slow_rows, strict=True):
                assert all(row["completion_ids"] == other["completion_ids"] for other in others), row["prompt_id"]
            tokens = sum(len(row["completion_ids"]) for row in first)
            shares.append(quick_seconds / slow_seconds)
            print(
                f"{len(called)} calls: {tokens / quick_seconds:.0f} tokens/s; with {options.slow} of "
                f"{options.seconds:g} s: {tokens / slow_seconds:.0f} tokens/s, {shares[-1]:.2f} of it",
                flush=True,
            )
    print(f"median of {options.pairs}: {statistics.median(shares):.2f}")


def _with_tool(config: Config, file: Path, slow: list[str], seconds: float) -> Config:
    file.write_text(TOOL.format(slow=slow, seconds=seconds))
    return config.override({"rollout.tools": [f"{file}:calculator"]})


def _sample(sampler: Sampler, config: Config, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], float]:
    """Episodes, and the seconds that they took."""
    sampling = SamplingConfig.of_rollouts(config.rollout)
    draw = groups.Draw(rows, config.rollout.num_generations, sampling, config.seed, ("slow tools",))
    [episodes] = groups.sample_groups(sampler, config.dataset, config.rollout, draw)
    return episodes.to_pylist(), sampler.seconds


def _called(row: dict[str, Any]) -> list[str]:
    """Expressions that an episode had computed."""
    import json

    calls = [call for message in json.loads(row["messages"]) for call in message.get("tool_calls") or ()]
    return [call["function"]["arguments"].get("expression", "") for call in calls]


if __name__ == "__main__":
    main()
