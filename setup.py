"""Puts the workflow into the wheel, as rloo_pipeline/project/; all else of the build is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PARTS = (
    *("Snakefile", "workflow", "profiles", "containers", "config", "requirements"),
    *("pyproject.toml", "README.md", "LICENSE"),  # which an image is built with
)
NOT_OF_USERS = ("__pycache__", ".*", "*.in", "*.sh", "overrides*", "excludes*")


class BuildWithWorkflow(build_py):
    """Copies what stands beside the package; an editable installation finds it there."""

    def run(self) -> None:
        """Builds the packages, then copies."""
        super().run()
        target = Path(self.build_lib, "rloo_pipeline", "project")
        if self.editable_mode:
            return
        shutil.rmtree(target, ignore_errors=True)
        for part in map(Path, PARTS):
            if part.is_dir():
                shutil.copytree(part, target / part, ignore=shutil.ignore_patterns(*NOT_OF_USERS))
            else:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(part, target / part)


setup(cmdclass={"build_py": BuildWithWorkflow})
