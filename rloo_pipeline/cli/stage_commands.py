"""The stages of the DAG, which Snakemake's rules call as `rloo STAGE`, phase by phase as in workflow/rules/."""

from rloo_pipeline.cli import evaluation_stages, prepare_stages, round_stages

COMMANDS = (*prepare_stages.COMMANDS, *round_stages.COMMANDS, *evaluation_stages.COMMANDS)
