"""probe: a policy and some training prompts → completions with scores, for `checks` to judge."""

from pathlib import Path

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.config import Config
from rloo_pipeline.rollout import groups
from rloo_pipeline.seeds import derive, permutation
from rloo_pipeline.training import self_check
from rloo_pipeline.user_code.score_table import join_scores, score_tables
from rloo_pipeline.workers import kept_models


def probe(config: Config, prompts: Path, policy: Policy, output: Path) -> None:
    """Samples and scores completions of some training prompts.

    Args:
        config: the stage's configuration.
        prompts: folder that the stage `prompts` wrote.
        policy: policy 0.
        output: the table of completions and scores.

    Raises:
        UserError: the model cannot be trained.
    """
    # fails before an engine is started
    self_check.load_or_run(policy, config.dataset.shows_images)
    train = PromptSet(prompts / "train")
    indices = permutation(len(train), derive(config.seed, "probes"))[: config.checks.probe_prompts]
    sampler = groups.load_sampler(policy, config, train, config.rollout.max_completion_length)
    wanted = groups.WholeGroups.of_rollouts(config, train.rows(indices), "probe")
    [completions] = groups.sample_groups(sampler, config, wanted)
    [scores] = score_tables(config.rewards, config.scoring, [completions], train, policy, kept_models.elsewhere(config))
    joined = join_scores(config.rewards, completions, scores)
    about = {"num_generations": wanted.samples, **groups.sampling_facts(config.model, wanted.sampling)}
    tables.write(
        output, joined, joined.schema, "probe", run=config.run, seed=config.seed, policy=policy.digest, **about
    )
