"""Links this project's profiles to where `snakemake --profile NAME` finds them from any folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rloo_pipeline.errors import UserError


def install(profiles: Path, target: Path | None = None) -> Iterator[str]:
    """Links every profile of a folder but `default`, which Snakemake finds by itself; says what was done.

    Raises:
        UserError: there are no profiles, or another one has the name already.
    """
    found = [file.parent for file in sorted(profiles.glob("*/profile.v9+.yaml")) if file.parent.name != "default"]
    if not found:
        raise UserError(f"{profiles}: no profiles here; call it in the project's folder")
    target = target or _snakemakes_folder()
    target.mkdir(parents=True, exist_ok=True)
    for profile in found:
        link = target / profile.name
        if link.is_symlink():
            link.unlink()
        elif link.exists():
            raise UserError(f"{link}: a profile of yours has this name; rename it and try again")
        link.symlink_to(profile.resolve())
        yield f"{link} -> {profile.resolve()}"


def _snakemakes_folder() -> Path:
    """Where Snakemake looks for a user's profiles: ~/.config/snakemake, or XDG_CONFIG_HOME/snakemake."""
    from snakemake.common import get_appdirs

    return Path(get_appdirs().user_config_dir)
