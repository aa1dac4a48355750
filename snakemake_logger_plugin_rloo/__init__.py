"""The logger plugin `rloo` of Snakemake: what a run shows on the terminal.

Snakemake finds it by the name of this package. profiles/default asks for it with `logger: rloo`;
`--logger-rloo-plain` gives Snakemake's own output.
"""

from rloo_pipeline.snakemake_ext.logger import LogHandler, LogHandlerSettings

__all__ = ["LogHandler", "LogHandlerSettings"]
