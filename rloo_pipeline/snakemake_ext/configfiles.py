"""The files of `--configfile`, or the project's own where none is named, checked before Snakemake reads them.

Snakemake reads them before it reads the Snakefile. Of a missing file it prints a traceback, and of a broken one a
sentence without the file's name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime.installation import DEFAULT_CONFIG


def check(argv: Sequence[str] | None = None) -> None:
    """Checks the configuration files of a command line.

    Args:
        argv: the command line; this process's if not given. One of another program is not looked at.

    Raises:
        CliException: one is missing, not YAML, or no mapping; Snakemake prints this error without a traceback.
    """
    program, *options = sys.argv if argv is None else argv
    if not is_snakemake(program):
        return
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--configfile", "--configfiles", nargs="+", type=Path, default=[], dest="files")
    parser.add_argument("--directory", "-d", type=Path, default=Path())
    named = parser.parse_known_args(options)[0]
    default = named.directory / DEFAULT_CONFIG
    files = named.files or ([default] if default.exists() else [])
    if files:
        from snakemake.exceptions import CliException

        from rloo_pipeline.config.loading import refuse_bad_files

        try:
            refuse_bad_files(files)
        except UserError as error:
            raise CliException(str(error)) from None


def is_snakemake(program: str) -> bool:
    """Whether argv[0] is the command `snakemake` or `python -m snakemake`."""
    return Path(program).name == "snakemake" or Path(program).parent.name == "snakemake"
