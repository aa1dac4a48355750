"""Calls every reward function and the judge of a configuration on a few rows of its data, for `rloo check`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rloo_pipeline import import_string
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.before_run import reward_audit
from rloo_pipeline.before_run.findings import DatasetSample, Finding, RunInputs
from rloo_pipeline.config import Config, Judge, Reward, Warmstart
from rloo_pipeline.config.algorithm import estimators
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import devices
from rloo_pipeline.user_code.completion_text import as_completion, text_of
from rloo_pipeline.user_code.dispatch import WorkerPools
from rloo_pipeline.user_code.reward_call import OTHERS
from rloo_pipeline.user_code.score_batch import FunctionScores, RewardBatch
from rloo_pipeline.user_code.score_table import OF_PROMPTS, environment_columns, require_verdicts

PROMPTS, SAMPLES = 4, 2
"""Number of prompts that a function is called with, and of completions per prompt."""
ROUNDING = 0.01
"""Difference up to which the scores of two calls count as equal, as a share of the largest score."""
SHOWN = 600
"""Number of characters of a prompt or completion that are shown."""
WRONG_ANSWER = "I do not know."
"""A made-up completion, which should get a low score."""


class RewardInputs(NamedTuple):
    """Arguments for the reward functions."""

    batch: RewardBatch
    has_solutions: bool
    """True if the first completion of each prompt is the data's own solution."""


def rewards(inputs: RunInputs) -> Iterator[Finding]:
    """Yields a finding per reward function and dataset, from the scores of a few rows, and one for the judge."""
    config = inputs.config
    keys = [key for key in inputs.datasets if key.startswith("dataset.")]
    samples = {key: _inputs(config.warmstart, inputs.datasets[key], inputs.model) for key in keys}
    scores: dict[str, float | None] = {}
    for reward in config.rewards:
        obstacles = {
            "it needs a GPU, but there is none here": reward.gpus and not devices.has_gpu(),
            "the run trains its model first": reward.uses_own_model,
            "there are no rows to call it with": not samples,
            "no episode could be played": config.rollout.uses_tools and inputs.trial is None,
        }
        if reason := next((reason for reason, is_so in obstacles.items() if is_so), None):
            yield _not_called(reward, reason)
            continue
        for key in samples:
            finding, first = _call(config, reward, key, samples[key], inputs.model)
            yield finding
            if not finding.ok:
                break
            scores.setdefault(reward.column, first)
    if config.judge and (of_eval := samples.get("dataset.eval")):
        yield _call(config, config.judge, "dataset.eval", _in_pairs(of_eval), inputs.model)[0]
    if scores:
        yield _first_completion(samples[keys[0]], scores)


def _first_completion(inputs: RewardInputs, scores: Mapping[str, float | None]) -> Finding:
    """Shows the first completion as rewards see it, with each reward's score."""
    text = text_of(inputs.batch.completions[0])
    given = ", ".join(f"{name} {_text_of(score)}" for name, score in scores.items())
    whose = "the data's own solution to the first prompt" if inputs.has_solutions else "no solution in the data"
    return Finding("first completion", True, f"{given}: {in_one_line(text)} ({whose})")


def in_one_line(text: str) -> str:
    """Puts a text on one line, with control characters escaped as in Python. A long text is shortened to its two
    ends.
    """
    half = SHOWN // 2
    ends = text if len(text) <= SHOWN else f"{text[:half]} … {text[-half:]}"
    return repr(ends)[1:-1]


def _text_of(score: float | None) -> str:
    return "None" if score is None else f"{score:.4g}"


def _not_called(reward: Reward, reason: str) -> Finding:
    """Checks a function by its source text, without calling it."""
    subject = f"reward {reward.column}"
    try:
        import_string.check(reward.function)
    except UserError as error:
        return Finding(subject, False, str(error))
    return Finding(subject, True, f"{reward.function} exists; it was not called, because {reason}", note=True)


def _inputs(warmstart: Warmstart, dataset: DatasetSample, model: Policy | None) -> RewardInputs:
    rows = [row for row in dataset.rows[:PROMPTS] for _ in range(SAMPLES)]
    prompts = [prompt for prompt in dataset.prompts[:PROMPTS] for _ in range(SAMPLES)]
    names = ["completion", "solution", "answer"]
    if warmstart.sft is not None:
        names.insert(0, warmstart.sft.completion_column)
    solution = next((name for name in names if isinstance(rows[0].get(name), str | int | float)), None)
    texts = [str(row[solution]) if solution and not n % SAMPLES else WRONG_ANSWER for n, row in enumerate(rows)]
    completions = list(map(as_completion, texts, prompts))
    ids = [[*range(len(text.split()))] for text in texts]  # one per word, if there is no tokenizer
    if model is not None:
        ends = [model.tokenizer.eos_token_id]
        ids = [model.tokenizer(text, add_special_tokens=False)["input_ids"] + ends for text in texts]
    columns = {name: [row.get(name) for row in rows] for name in rows[0] if name not in OF_PROMPTS}
    columns["finish_reason"] = ["stop"] * len(rows)
    if dataset.episodes:
        episodes = [episode for episode in dataset.episodes[: len(dataset.rows[:PROMPTS])] for _ in range(SAMPLES)]
        for index in range(1, len(rows), SAMPLES):  # the wrong answer, after one call of each tool
            completions[index], ids[index] = episodes[index].messages, [*episodes[index].ids]
        columns |= environment_columns([(episode.reward, episode.state) for episode in episodes])
    return RewardInputs(RewardBatch(prompts, completions, ids, columns), solution is not None)


def _in_pairs(inputs: RewardInputs) -> RewardInputs:
    """The inputs of a judge that compares the two completions of each prompt."""
    completions = inputs.batch.completions
    others = [completions[place ^ 1] for place in range(len(completions))]
    return inputs._replace(batch=inputs.batch._replace(columns={**inputs.batch.columns, OTHERS: others}))


def _call(
    config: Config, reward: Reward, key: str, inputs: RewardInputs, model: Policy | None
) -> tuple[Finding, float | None]:
    """Scores the rows with one function, twice. Also returns the first row's score."""
    kind = "judge" if isinstance(reward, Judge) else "reward"
    subject, rows = f"{kind} {reward.column}", f"on rows of {key}"
    constants = {} if model is None else {"tokenizer_path": str(model.base)}
    samples = [SAMPLES] * (len(inputs.batch.prompts) // SAMPLES)
    try:
        with WorkerPools([reward], reward.threads) as pools:
            (scored,) = pools.score(inputs.batch, samples, constants, more=True)
            if isinstance(reward, Judge):
                require_verdicts(reward, scored)
            else:
                _require_success(config, reward, scored.scores)
            failure = next(filter(None, [*scored.errors, *scored.notes]), None)
            changed = "" if failure else _changed(pools, scored, inputs.batch, samples, constants)
    except UserError as error:
        return Finding(subject, False, f"{rows}: {error}"), None
    if failure:
        message = f"{rows}: {failure}; the run would continue (see on_error and on_timeout of this reward)"
        return Finding(subject, True, message, note=True), scored.scores[0]
    if set(scored.scores) == {None}:
        message = f"{rows}: None for all of the {len(samples)} rows tried; does it find the columns it needs?"
        return Finding(subject, True, message, note=True), None
    scores = list(map(_text_of, scored.scores))
    parts = [f"'{WRONG_ANSWER}' {', '.join(scores[1::SAMPLES])}"]
    if inputs.has_solutions:
        parts.insert(0, f"the data's own solutions {', '.join(scores[::SAMPLES])}")
        parts.append(reward_audit.verdict(config, reward, scored.scores[::SAMPLES], scored.scores[1::SAMPLES]))
    note = bool(changed or (inputs.has_solutions and parts[-1]))
    return Finding(subject, True, f"{rows}: {'; '.join(filter(None, [*parts, changed]))}", note=note), scored.scores[0]


def _require_success(config: Config, reward: Reward, scores: Sequence[float | None]) -> None:
    """Raises UserError if the only reward with a weight gave scores that `algorithm.advantage` refuses."""
    alone = reward.weight and sum(one.weight != 0 for one in config.rewards) == 1
    others = [score for score in scores if score not in (0, 1, None)]
    if alone and others and config.algorithm.advantage in estimators("of_success"):
        raise UserError(
            f"algorithm.advantage: {config.algorithm.advantage} needs scores of 0 and 1, but {others[0]:g} is another; "
            "use a reward that is 0 or 1, or a different estimator"
        )


def _changed(
    pools: WorkerPools, scored: FunctionScores, batch: RewardBatch, samples: Sequence[int], constants: Mapping[str, Any]
) -> str:
    """A warning if a second call, with each completion alone where a run may do that, fails or gives other scores.

    A model's scores depend on the batch by its rounding, in bfloat16 by up to a percent.
    """
    alone = pools.rewards[0].batch == "rows"
    try:
        (again,) = pools.score(batch, [1] * sum(samples) if alone else samples, constants)
        failure = next(filter(None, [*again.errors, *again.notes]), None)
    except UserError as error:
        failure = str(error)
    if failure:
        return f"a second call{', with each completion alone' * alone}, fails: {failure}"
    before, after = (np.array(result.scores, float) for result in (scored, again))
    largest = np.nanmax(np.abs([before, after]), initial=0)
    equal = np.isclose(before, after, rtol=0, atol=ROUNDING * largest, equal_nan=True)
    if equal.all():
        return ""
    differing = int(equal.argmin())
    first, second = (_text_of(result.scores[differing]) for result in (scored, again))
    return (
        f"row {differing} gets {first}, but {second} in a second call: scores must not depend on chance, the time or "
        f"earlier calls{', and if they depend on the other completions of a prompt, set batch: group' * alone}"
    )
