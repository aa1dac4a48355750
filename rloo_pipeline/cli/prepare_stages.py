"""Stages before the first round: assets, prompts, policy 0 and its checks.

workflow/rules/prepare.smk and warmstart.smk call them.
"""

import argparse

from rloo_pipeline.cli.stage_options import ASSETS, POLICY, PROMPTS, REWARD_MODEL, SHARD, path, stage, whole_config
from rloo_pipeline.config import Config
from rloo_pipeline.errors import RefusedPolicyError


def _checks(config: Config, arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.checks import checks
    from rloo_pipeline.stages.report_so_far import write_page

    inputs = (arguments.assets, arguments.prompts, arguments.policy, arguments.probed)
    try:
        checks(config, *inputs, arguments.output, arguments.reward_model)
    except RefusedPolicyError:
        run = arguments.output.absolute().parents[1]
        write_page(whole_config(arguments).only("report"), run, "about the failed checks")
        raise


COMMANDS = (
    stage("stage-assets", "Fetch or copy model and datasets; may use the network."),
    stage("prompts", "Template and tokenize the prompts into Arrow.", ASSETS),
    stage(
        "warmstart", "Make policy 0: the model itself, or the model after SFT on demonstrations.", *(ASSETS, PROMPTS)
    ),
    stage(
        "reward-model",
        "Train a reward model from preferences.",
        *(ASSETS, PROMPTS, path("model", "folder of the reward model to write")),
    ),
    stage("probe", "Sample and score probe prompts with policy 0.", *(PROMPTS, POLICY, REWARD_MODEL)),
    stage(
        "checks",
        "Check policy 0 by its probe completions; fails if RLOO could not learn from them.",
        *(ASSETS, PROMPTS, POLICY, path("probe", "table that probe wrote", dest="probed", metavar="PROBE")),
        REWARD_MODEL,
        run=_checks,
    ),
    stage(
        "difficulty",
        "Measure how often policy 0 solves each training prompt of one shard.",
        *(PROMPTS, POLICY, SHARD, REWARD_MODEL),
    ),
)
