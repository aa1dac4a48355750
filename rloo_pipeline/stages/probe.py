"""probe: a policy and some training prompts → completions with scores, for `checks` to judge."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa

from rloo_pipeline.artifacts import policy, tables
from rloo_pipeline.artifacts.files import atomic_write, read_json
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.config import Config
from rloo_pipeline.rollout import groups
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.scoring.score_table import score_table
from rloo_pipeline.seeds import derive, permutation
from rloo_pipeline.training import self_check


def probe(config: Config, prompts: Path, folder: Path, earlier: Path | None, output: Path) -> None:
    """Samples and scores the probe prompts.

    Args:
        config: of the stage.
        prompts: what the stage `prompts` wrote.
        folder: a policy, or what `stage-assets` wrote: then the model as it is.
        earlier: a probe of the model as it is; where the policy is still that, it is taken over.
        output: the table.

    Raises:
        UserError: the model cannot be trained.
    """
    folder = resolve_policy(folder)
    digest = policy.digest(folder)
    if earlier and tables.footer(tables.read(earlier, "completions", ["sample"]))["policy"] == digest:
        with atomic_write(output) as beside:
            shutil.copyfile(earlier, beside)
        say("the policy is the model as it is, which has been probed")
        return
    self_check.of(folder, config.model.trust_remote_code)  # before an engine starts
    train = PromptSet(prompts / "train")
    drawn = permutation(len(train), derive(config.seed, "probes"))[: config.checks.probe_prompts]
    samples = config.checks.probe_num_generations or config.rollout.num_generations
    decoding = groups.sampling_config_of(config.rollout)
    sampler = groups.load_sampler(folder, config, train.longest, config.rollout.max_completion_length)
    made = groups.sample_groups(sampler, train.rows(drawn), samples, decoding, config.seed, ("probe",))
    rolled = pa.Table.from_pylist(made, schema=tables.ROLLOUTS)
    joined = join_scores(config, rolled, score_table(config, rolled, train, folder))
    about = {"num_generations": samples, **groups.sampling_facts(config.model, decoding)}
    tables.write(output, joined, joined.schema, "completions", run=config.run, seed=config.seed, policy=digest, **about)


def join_scores(config: Config, rolled: pa.Table, scored: pa.Table) -> pa.Table:
    """Completions and their scores in one table."""
    schema = tables.completions_schema([reward.column for reward in config.rewards])
    return pa.table([*rolled.columns, *scored.columns[len(tables.KEYS) :]], schema=schema)


def resolve_policy(folder: Path) -> Path:
    """The folder itself, or the model that `stage-assets` put in place."""
    assets = folder / "assets.json"
    return Path(read_json(assets)["model"]["path"]) if assets.exists() else folder
