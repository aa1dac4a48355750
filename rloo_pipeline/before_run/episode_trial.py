"""Plays one episode of each environment with a scripted model, for `rloo check`: everything except the engine is real.

The model calls each tool once, with example arguments that fit the tool's schema, and then answers. Its turns are
handled like sampled ones: they are token ids, the parser reads them, a separate process answers, and the chat template
continues.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.prompt_set import OBSERVATION
from rloo_pipeline.before_run.findings import EpisodeTrial, Finding, RunInputs, problems_of
from rloo_pipeline.before_run.reward_trial import WRONG_ANSWER
from rloo_pipeline.config import JSON, Config
from rloo_pipeline.data.rows import Row
from rloo_pipeline.data.tool_template import call_message
from rloo_pipeline.rollout import groups, resets
from rloo_pipeline.rollout.episode_loop import EpisodeRecord, Episodes
from rloo_pipeline.rollout.requests import Completion, Request, SamplingConfig
from rloo_pipeline.rollout.templating import Templater
from rloo_pipeline.rollout.tool_calls import MALFORMED

SHOWN = 60
"""Number of characters of an answer that are shown."""
EXAMPLES: Mapping[str, Any] = {"string": "1", "integer": 1, "number": 1.0, "boolean": False, "array": [], "object": {}}
"""Example arguments by JSON type."""
NO_LIMIT = SamplingConfig(1.0, 1.0, 0, None, 1 << 30)


def prepare(stack: ExitStack, config: Config, model: Policy | None) -> EpisodeTrial | None:
    """Starts the processes of tools and environments, which end with `stack`. None without tools or a model.

    Args:
        stack: holds the processes.
        config: the run's configuration.
        model: the model, if it exists.

    Raises:
        UserError: tools, environments, chat template or parser cannot be used.
    """
    pool = stack.enter_context(resets.pool_of(config.rollout))
    pool.check()
    if model is None:
        return None
    reader = groups.call_reader(model, config.dataset, config.rollout.tool_parser)
    return EpisodeTrial(config, pool, reader, Templater(config.dataset, model, pool))


def tools(inputs: RunInputs) -> Iterator[Finding]:
    """Checks that tools, environments and the tool-call parser work; sets `trial`."""
    if inputs.config.rollout.uses_tools:
        with problems_of("tools") as problems:
            inputs.trial = prepare(inputs.stack, inputs.config, inputs.model)
        yield from problems


def play(trial: EpisodeTrial, rows: Sequence[Row]) -> list[EpisodeRecord]:
    """Plays an episode for each of these rows of a prompt set.

    Raises:
        UserError: an environment violates the contract.
    """
    settings = trial.config.rollout.model_copy(update={"max_turns": None, "max_tool_calling_iterations": None})
    requests = [Request(row["prompt_ids"], number, NO_LIMIT) for number, row in enumerate(rows)]
    episodes = Episodes(settings, trial.pool, trial.reader, rows, requests)
    scripts = [[*_turns(trial, row), WRONG_ANSWER] for row in rows]
    while requests_now := list(episodes.requests(True)):
        for index, _ in requests_now:
            text = scripts[index].pop(0)
            tokenizer = trial.reader.template.tokenizer
            ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            episodes.take(index, Completion(ids, text, [0.0] * len(ids), "stop"))
    return episodes.episodes


def _turns(trial: EpisodeTrial, row: Row) -> Iterator[str]:
    """Yields the model's turns, in which it calls each tool once."""
    for schema in trial.pool.schemas(row):
        function = schema["function"]
        yield trial.reader.template.turn_text(call_message([(function["name"], _arguments(function))]))


def _arguments(function: JSON) -> JSON:
    """Example values for the arguments that a tool requires."""
    parameters = function["parameters"]
    return {name: _example(parameters["properties"][name]) for name in parameters.get("required", ())}


def _example(schema: JSON) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "string")
    return EXAMPLES.get(kind[0] if isinstance(kind, list) else kind, "1")


def findings(trial: EpisodeTrial, key: str, played: Sequence[EpisodeRecord]) -> Iterator[Finding]:
    """Yields a finding about the first episode of each environment.

    Args:
        trial: parts that played the episodes.
        key: key of the dataset that has their rows.
        played: the episodes.
    """
    first: dict[str, EpisodeRecord] = {}
    for episode in played:
        first.setdefault(trial.pool.environment_of(episode.row) or "", episode)
    for name, episode in first.items():
        yield _finding(trial, f"episode {name}".rstrip(), key, episode)


def _finding(trial: EpisodeTrial, subject: str, key: str, episode: EpisodeRecord) -> Finding:
    """Describes one episode."""
    if episode.lost:
        return Finding(subject, False, f"on a row of {key}: {episode.lost}")
    answers = [message for message in episode.messages if message["role"] == "tool"]
    schemas = trial.pool.schemas(episode.row)
    read = [message["content"] != MALFORMED for message in answers]
    if read.count(True) < len(schemas):
        unread = read.index(False) if False in read else len(read)
        return Finding(subject, False, _unreadable(trial, schemas[unread]["function"]))
    parts = [
        f"{_call(schema['function'])} gives {_excerpt(answer['content'])}"
        for schema, answer in zip(schemas, answers, strict=True)
    ]
    if observation := episode.row[OBSERVATION]:
        parts.insert(0, f"reset says {_excerpt(observation)}")
    if trial.pool.gives_reward(episode.row):
        parts.append(f"the reward is {'None' if episode.reward is None else f'{episode.reward:.4g}'}")
    limit = trial.config.rollout.max_completion_length
    too_long = len(episode.ids) > limit
    if too_long:
        parts.append(f"with {len(episode.ids)} tokens it is longer than rollout.max_completion_length ({limit})")
    return Finding(subject, True, f"on a row of {key}: {'; '.join(parts)}", note=too_long)


def _call(function: JSON) -> str:
    """The example call of a tool, in Python syntax."""
    return f"{function['name']}({', '.join(f'{name}={value!r}' for name, value in _arguments(function).items())})"


def _unreadable(trial: EpisodeTrial, function: JSON) -> str:
    name, template = function["name"], trial.reader.template
    text = template.turn_text(call_message([(name, _arguments(function))]))
    tokens = str(template.tokenizer.decode(template.tokenizer(text, add_special_tokens=False)["input_ids"]))
    return (
        f"the model cannot call {name}: the chat template writes {text.strip()!r:.120}, which the tokenizer turns into "
        f"{tokens.strip()!r:.120}, where the parser {trial.reader.name} does not find this call; use another "
        "tokenizer, or set another rollout.tool_parser"
    )


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    return repr(line) if len(line) <= SHOWN else f"{line[:SHOWN]!r}… ({len(text)} characters)"
