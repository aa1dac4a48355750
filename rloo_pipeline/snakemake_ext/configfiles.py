"""Checks the configuration on Snakemake's command line: the files of `--configfile`, the keys of `--config`, and the
working folder of `--directory`.

Snakemake reads them before the Snakefile. It prints a traceback for a missing file or a malformed key, and a message
without the file's name for a broken file. It passes values inside a section of `--config` to the workflow as text.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime.installation import DEFAULT_CONFIG


def check(argv: Sequence[str] | None = None) -> None:
    """Checks the configuration files and the changed keys of a command line.

    Args:
        argv: the command line; None for that of this process. It is ignored unless it is Snakemake's.

    Raises:
        CliException: a file is missing, not YAML or not a mapping, a change is not KEY=VALUE, an option is given twice,
            or Snakemake cannot work in the folder. Snakemake prints this error without a traceback.
    """
    program, *options = sys.argv if argv is None else argv
    if not is_snakemake(program):
        return
    parser = _parser()
    parser.add_argument("--directory", "-d", type=Path, default=Path())
    named = parser.parse_known_args(options)[0]
    default = named.directory / DEFAULT_CONFIG
    files = named.files[-1] if named.files else [default] if os.access(default, os.F_OK) else []
    if files or named.changes or named.directory != Path():
        from snakemake.exceptions import CliException

        from rloo_pipeline.config.loading import read_changes, refuse_bad_files

        try:
            _refuse_folder(named.directory)
            _refuse_twice("--configfile", named.files)
            _refuse_twice("--config", named.changes)
            refuse_bad_files(files)
            read_changes(chain.from_iterable(named.changes))
        except UserError as error:
            raise CliException(str(error)) from None


def without(options: Sequence[str]) -> list[str]:
    """The options of Snakemake without `--configfile`, `--config` and their values."""
    return _parser().parse_known_args(options)[1]


def _parser() -> argparse.ArgumentParser:
    """Parses `--configfile` and `--config` into a list of values for each time they are given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--configfile", "--configfiles", action="append", nargs="+", type=Path, default=[], dest="files"
    )
    parser.add_argument("--config", "-C", action="append", nargs="*", default=[], dest="changes")
    return parser


def _refuse_folder(folder: Path) -> None:
    """Refuses a working folder that this user may not enter; Snakemake makes a missing one."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not os.access(f"{nearest}/.", os.X_OK if nearest == folder else os.X_OK | os.W_OK):
        raise UserError(f"--directory {folder}: {nearest} is not a folder that you may use; name another one")


def _refuse_twice(option: str, given: Sequence[Sequence[object]]) -> None:
    if len(given) > 1:
        together = shlex.join(map(str, chain.from_iterable(given)))
        raise UserError(
            f"{option} is given {len(given)} times, but Snakemake would use only the last; write it once: {option} "
            f"{together}"
        )


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
