"""Links the profiles of this project into the folder where `snakemake --profile NAME` looks for them."""

from collections.abc import Iterator
from pathlib import Path

from rloo_pipeline.errors import UserError


def install(profiles: Path, target: Path | None = None) -> Iterator[str]:
    """Links every profile except `default`, which Snakemake finds by itself.

    Args:
        profiles: folder with the profiles.
        target: folder for the links; None for ~/.config/snakemake, or for snakemake in XDG_CONFIG_HOME.

    Yields:
        A line for each link.

    Raises:
        UserError: there are no profiles, or a profile of the user has the same name.
    """
    from snakemake.common import get_appdirs

    folders = [file.parent for file in sorted(profiles.glob("*/profile.v9+.yaml")) if file.parent.name != "default"]
    if not folders:
        raise UserError(f"{profiles}: no profiles here; run this in the project's folder")
    target = target or Path(get_appdirs().user_config_dir)
    target.mkdir(parents=True, exist_ok=True)
    for profile in folders:
        link = target / profile.name
        if link.is_symlink():
            link.unlink()
        elif link.exists():
            raise UserError(f"{link}: a profile of yours has this name; rename it and try again")
        link.symlink_to(profile.resolve())
        yield f"{link} -> {profile.resolve()}"
