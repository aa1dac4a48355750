"""The executor plugin `rloo-slurm` of Snakemake: the SLURM plugin as rloo_pipeline.snakemake_ext.slurm_executor has it.

Snakemake finds it by the name of this package. A profile asks for it with `executor: rloo-slurm`; its settings are
those of the SLURM plugin, with the prefix `rloo-slurm-` in place of `slurm-`.
"""

from rloo_pipeline.snakemake_ext.slurm_executor import Executor, plugin

ExecutorSettings, common_settings = plugin.ExecutorSettings, plugin.common_settings
__all__ = ["Executor", "ExecutorSettings", "common_settings"]
