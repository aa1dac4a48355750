"""Checks the configuration on Snakemake's command line: the files of `--configfile` and the keys of `--config`.

Snakemake reads both before the Snakefile. It prints a traceback for a missing file or a malformed key, and a message
without the file's name for a broken file. It passes values inside a section of `--config` to the workflow as text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime.installation import DEFAULT_CONFIG


def check(argv: Sequence[str] | None = None) -> None:
    """Checks the configuration files and the changed keys of a command line.

    Args:
        argv: the command line; None for that of this process. It is ignored unless it is Snakemake's.

    Raises:
        CliException: a file is missing, not YAML or not a mapping, or a change is not KEY=VALUE. Snakemake prints this
            error without a traceback.
    """
    program, *options = sys.argv if argv is None else argv
    if not is_snakemake(program):
        return
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--configfile", "--configfiles", nargs="+", type=Path, default=[], dest="files")
    parser.add_argument("--config", "-C", nargs="*", default=[], dest="changes")
    parser.add_argument("--directory", "-d", type=Path, default=Path())
    named = parser.parse_known_args(options)[0]
    default = named.directory / DEFAULT_CONFIG
    files = named.files or ([default] if default.exists() else [])
    if files or named.changes:
        from snakemake.exceptions import CliException

        from rloo_pipeline.config.loading import read_changes, refuse_bad_files

        try:
            refuse_bad_files(files)
            read_changes(named.changes)
        except UserError as error:
            raise CliException(str(error)) from None


def is_snakemake(program: str) -> bool:
    """True if argv[0] is the command `snakemake` or `python -m snakemake`."""
    return Path(program).name == "snakemake" or Path(program).parent.name == "snakemake"


def restore_values(config: MutableMapping[str, Any], as_text: Mapping[str, Any], changes: Sequence[str]) -> None:
    """Gives values of `--config` the types that they would have in a file.

    Args:
        config: the workflow's configuration, which is changed in place. That of a module may lack the keys of
            `--config`.
        as_text: `--config` as parsed by Snakemake, in which values inside a section are text.
        changes: `--config` as typed.

    Raises:
        UserError: a change is not KEY=VALUE, or its value is not YAML.
    """
    from rloo_pipeline.config.loading import read_changes
    from rloo_pipeline.config.section import merge

    for key, value in read_changes(changes).items():
        present = {key: config[key]} if key in config else {}
        if key in as_text and present and merge(present, {key: as_text[key]}) == present:
            config.update(merge(present, {key: value}))
