"""The commands on reward functions that are no stages of a run: `rloo rescore` and `rloo reward-test`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from rloo_pipeline.config.loading import load, load_rewards, reward_from_arguments

AddCommand = Callable[..., argparse.ArgumentParser]


def add_commands(add: AddCommand) -> None:
    """Adds both to the parser; `add` makes a command of a name, a function and a sentence."""
    rescore = add("rescore", _rescore, "Score a finished run with other rewards; says what they would have changed.")
    rescore.add_argument("run", type=Path, metavar="RUN", help="folder of the run, results/<run>")
    rescore.add_argument("--rewards", type=Path, required=True, help="YAML file with a list `rewards`, as in a run's")
    rescore.add_argument("--out", dest="output", type=Path, required=True, help="folder for scores and rescore.json")
    rescore.add_argument("--workers", type=int, help="processes; by default scoring.workers of the run")
    test = add("reward-test", _reward_test, "Try a reward function on rows of data, before a run.")
    test.add_argument("function", metavar="FILE:FUNCTION", help="as in a configuration; or module:function")
    test.add_argument(
        "--data", type=Path, required=True, help="rows with the dataset's columns: .jsonl, .json, .parquet"
    )
    test.add_argument(
        "--completions",
        type=Path,
        help="file with a column `completion` (and `completion_ids`, where the function takes them), equally many "
        "neighbouring rows for each row of the data; without it the data's own column `completion` or `answer`",
    )
    test.add_argument(
        "--tokenizer",
        help="folder of a policy, for functions on token ids: makes `completion_ids` where there are none",
    )
    test.add_argument("--options", default="{}", help="further keyword arguments of the function, as JSON")
    test.add_argument("--workers", type=int, default=1, help="processes")
    test.add_argument("--timeout", type=float, default=60.0, help="seconds that a row may take")
    test.add_argument("--batch", choices=["rows", "group", "all"], default="rows", help="as the key of a reward")
    test.add_argument("--labels", metavar="COLUMN", help="column beside the completions with verdicts to agree with")
    test.add_argument("--threshold", type=float, default=1.0, help="score from which a completion counts as right")


def add_parts(score: argparse.ArgumentParser) -> None:
    """Adds to the stage `score` what it needs where a function is scored in a job of its own."""
    score.add_argument("--only", metavar="NAME", default=None, help="score with this function alone, for --parts")
    score.add_argument(
        "--parts", type=Path, nargs="*", default=[], help="what --only wrote for functions that are scored alone"
    )


def _rescore(arguments: argparse.Namespace) -> None:
    config = load(arguments.config or arguments.run / "config.yaml")
    rewards = load_rewards(arguments.rewards, config)
    from rloo_pipeline.commands.rescore import rescore

    rescore(config, arguments.run, rewards, arguments.output, arguments.workers or config.scoring.workers)


def _reward_test(arguments: argparse.Namespace) -> None:
    reward = reward_from_arguments(arguments.function, arguments.options, arguments.timeout, arguments.batch)
    from rloo_pipeline.commands.reward_test import Verdicts, reward_test

    verdicts = Verdicts(arguments.labels, arguments.threshold) if arguments.labels else None
    reward_test(reward, arguments.data, arguments.completions, arguments.workers, arguments.tokenizer, verdicts)
