"""Samples K completions per prompt and returns them as a table of rollouts."""

import json
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from math import isfinite
from typing import Any, NamedTuple, Protocol, Self

import pyarrow as pa

from rloo_pipeline.artifacts import image_store, tables
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.config import JSON, Config, Dataset, Model, Rollout
from rloo_pipeline.data.tool_template import ToolTemplate
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout import vllm_internals
from rloo_pipeline.rollout.engine_arguments import LOGPROBS_MODE, EngineSettings
from rloo_pipeline.rollout.parallel_sampler import ParallelSampler
from rloo_pipeline.rollout.requests import Request, SamplingConfig, ShownImages, params_of
from rloo_pipeline.rollout.sampler import Sampler, refusals_told
from rloo_pipeline.rollout.tool_calls import CallReader
from rloo_pipeline.runtime import devices
from rloo_pipeline.seeds import derive
from rloo_pipeline.training import formats, plain_model
from rloo_pipeline.workers import engine_cache


def load_sampler(
    policy: Policy, config: Config, prompts: PromptSet, max_completion_length: int, for_rollouts: bool = True
) -> Sampler | ParallelSampler:
    """A sampler with the weights of a policy: the one that this worker keeps, or a new one.

    Args:
        policy: the policy.
        config: the stage's configuration.
        prompts: prompts to sample from.
        max_completion_length: tokens that the context must hold beside the longest prompt.
        for_rollouts: False for an evaluation, which `rollout.quantization` does not affect.

    Raises:
        UserError: the policy is damaged or incomplete, its model or this CPU does not fit the configuration, or no
            parser reads tool calls as its chat template writes them.
        IncompatibleEngine: this worker keeps a sampler that cannot take this policy.
    """
    most_images = prompts.about_images.most if prompts.about_images else 0
    settings = EngineSettings.of(config.model, config.vllm, config.rollout, most_images, for_rollouts)
    needed = prompts.longest + max_completion_length
    policy.digest  # noqa: B018, verifies its files before anything else reads them
    plain_model.check_tensors(policy)
    if config.rollout.uses_tools:
        call_reader(policy, config.dataset, config.rollout.tool_parser)  # to fail before an engine is started
    count = config.vllm.data_parallel_size
    key = (settings, count, config.seed)
    sampler: Sampler | ParallelSampler | None = engine_cache.take("sampler", key)
    if sampler is None:
        formats.refuse_old_gpu()
        if settings.dtype == ("bfloat16" if devices.has_gpu() else "float16"):  # any GPU has float16, any CPU bfloat16
            formats.check_dtype(settings.dtype)
        if policy.is_adapter:
            Policy(policy.base).verify()
        alone = (policy, settings, needed, config.seed)
        sampler = Sampler(*alone) if count == 1 else ParallelSampler(*alone, count)
    else:
        sampler.swap(policy, needed)
    engine_cache.keep("sampler", key, sampler)
    return sampler


def call_reader(policy: Policy, dataset: Dataset, parser: str) -> CallReader:
    """The reader of tool calls in a model's turns; its `template` renders the tools' answers.

    Args:
        policy: the policy.
        dataset: the section `dataset`, for its chat template.
        parser: `rollout.tool_parser`.

    Raises:
        UserError: vLLM has no parser `rollout.tool_parser`, or none reads a call as the chat template writes it.
    """
    return CallReader(ToolTemplate(policy, dataset), parser)


def check_kwargs(policy: Policy, rollout: Rollout) -> None:
    """Checks `rollout.generation_kwargs` as vLLM does when it gets a request, without an engine.

    Raises:
        UserError: vLLM refuses a value, such as a token id that the model does not have.
    """
    vllm_internals.import_vllm()
    with refusals_told(of_kwargs=True):
        params = params_of(Request([], 0, SamplingConfig.of_rollouts(rollout)), policy.stop_ids, policy.placeholder_ids)
        vllm_internals.check_parameters(params, policy.tokenizer, policy.vocabulary)


def sampling_facts(model: Model, sampling: SamplingConfig) -> dict[str, object]:
    """Sampling settings for the footer of a table."""
    return {
        "dtype": model.dtype,
        "logprobs_mode": LOGPROBS_MODE,
        **{f"sampling_{k}": v for k, v in sampling._asdict().items() if k != "kwargs" or v},
    }


def rollout_facts(
    config: Config, round_: int, shard: int, policy_digest: str, tools: Sequence[str] = ()
) -> dict[str, Any]:
    """Facts for the footer of a table of rollouts.

    Args:
        config: the stage's configuration.
        round_: number of the round, from 1.
        shard: number of the shard, from 0.
        policy_digest: digest of the policy that samples.
        tools: names of all tools.
    """
    return {
        "run": config.run,
        "round": round_,
        "shard": shard,
        "seed": config.seed,
        "policy": policy_digest,
        "policy_round": config.rollout.policy_of(round_),
        **({"quantization": config.rollout.quantization} if config.rollout.quantization else {}),
        **sampling_facts(config.model, SamplingConfig.of_rollouts(config.rollout)),
        **({tables.TOOLS: json.dumps(tools)} if tools else {}),
    }


class Samples(Protocol):
    """Completions to sample, which become one table."""

    def prompts_of_requests(self) -> list[JSON]:
        """The row of each request's prompt."""

    def requests(self) -> list[Request]:
        """The requests, in the order of the rows."""

    def table(self, columns: Sequence[JSON], schema: pa.Schema) -> pa.Table:
        """The table of rollouts without a footer, ordered by (prompt, sample); `columns` has a row per request."""


class WholeGroups(NamedTuple):
    """K completions of each prompt."""

    rows: Sequence[dict[str, Any]]
    """Prompts with prompt_id and prompt_ids."""
    samples: int
    """K."""
    sampling: SamplingConfig
    seed: int
    """The run's seed."""
    names: tuple[str | int, ...]
    """The seed of each sample is derived from `seed`, these names, its prompt_id and its index (`seeds.derive`)."""
    expected: Mapping[str, float] = {}
    """Likely number of tokens of a completion, by prompt_id, where known."""

    @classmethod
    def of_rollouts(cls, config: Config, rows: Sequence[JSON], *names: str | int, samples: int | None = None) -> Self:
        """Groups that are sampled as rollouts are, by default with as many completions."""
        samples = samples or config.rollout.num_generations
        return cls(rows, samples, SamplingConfig.of_rollouts(config.rollout), config.seed, names)

    @classmethod
    def of_evaluations(
        cls, config: Config, rows: Sequence[JSON], samples: int, temperature: float, longest: int
    ) -> Self:
        """Groups of held-out prompts, with up to `longest` tokens a completion. No seed depends on the policy."""
        sampling = SamplingConfig.of_evaluations(config.rollout, temperature, longest)
        return cls(rows, samples, sampling, config.seed, ("evaluation",))

    def prompts_of_requests(self) -> list[JSON]:
        """Each prompt, K times."""
        return [row for row in self.rows for _ in range(self.samples)]

    def requests(self) -> list[Request]:
        """One request for each completion, by prompt and sample."""
        lengths = [self.expected.get(row["prompt_id"]) for row in self.rows]
        return [
            Request(row["prompt_ids"], self._seed_of(row, sample), self.sampling, _images_of(row), expected=expected)
            for row, expected in zip(self.rows, lengths, strict=True)
            for sample in range(self.samples)
        ]

    def table(self, columns: Sequence[JSON], schema: pa.Schema) -> pa.Table:
        """The table of rollouts."""
        rows = [
            {
                "prompt_id": row["prompt_id"],
                "sample": place % self.samples,
                "prompt_ids": row["prompt_ids"],
                **completion,
                "seed": self._seed_of(row, place % self.samples),
                image_store.IDS: row.get(image_store.IDS),
            }
            for place, (row, completion) in enumerate(zip(self.prompts_of_requests(), columns, strict=True))
        ]
        return pa.Table.from_pylist(rows, schema=schema)

    def _seed_of(self, row: JSON, sample: int) -> int:
        return derive(self.seed, *self.names, row["prompt_id"], sample)


def _images_of(row: dict[str, Any]) -> ShownImages | None:
    """The images of a prompt; None if it has none."""
    ids = row.get(image_store.IDS)
    return ShownImages(row[image_store.PIXELS], ids, row[image_store.PLACEHOLDERS]) if ids else None


def sample_groups(sampler: Sampler | ParallelSampler, config: Config, *wanted: Samples) -> list[pa.Table]:
    """Samples all groups at once, so that the engine batches them together.

    Args:
        sampler: a sampler that holds the policy.
        config: the stage's configuration.
        wanted: the groups of each table.

    Returns:
        The tables.

    Raises:
        UserError: a log-prob is NaN or infinite.
    """
    requests = [each.requests() for each in wanted]
    if config.rollout.uses_tools and isinstance(sampler, Sampler):
        prompts = [*chain(*(each.prompts_of_requests() for each in wanted))]
        columns = _play_episodes(sampler, config, prompts, [*chain(*requests)])
    else:
        columns = [completion.columns() for completion in sampler.sample([*chain(*requests)], "completions")]
    if not all(isfinite(logp) for completion in columns for logp in completion["sampling_logps"]):
        raise UserError(
            f"{sampler.policy}: the policy's log-probs are not finite, as happens with NaN in its weights; find the "
            "round whose update wrote such weights"
        )
    sampled, columns_of_tables = iter(columns), schema(config)
    return [
        each.table([*islice(sampled, len(own))], columns_of_tables) for each, own in zip(wanted, requests, strict=True)
    ]


def schema(config: Config) -> pa.Schema:
    """The schema of the tables of `sample_groups`."""
    if config.dataset.shows_images:
        return tables.WITH_IMAGES
    if config.rollout.router_replay:
        return tables.WITH_EXPERTS
    return tables.EPISODES if config.rollout.uses_tools else tables.ROLLOUTS


def _play_episodes(
    sampler: Sampler, config: Config, rows: Sequence[JSON], requests: Sequence[Request]
) -> list[dict[str, Any]]:
    """Plays the episodes of a run with tools; returns the columns of their completions."""
    from rloo_pipeline.rollout.episode_loop import Episodes
    from rloo_pipeline.rollout.resets import pool_of

    reader = call_reader(sampler.policy, config.dataset, config.rollout.tool_parser)
    with pool_of(config.rollout) as pool:
        episodes = Episodes(config.rollout, pool, reader, rows, requests)
        sampler.play(episodes, "episodes")
    return [episode.columns() for episode in episodes.episodes]
