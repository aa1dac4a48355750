"""The image that stages run in with `snakemake --sdm apptainer`, and what they see of the machine around it.

Snakemake wraps each stage in `apptainer exec --home $PWD IMAGE`. Everything else that a stage needs is told to
Apptainer by the environment, on the node where the stage runs: APPTAINER_BIND, APPTAINER_NV, and where the engines keep
their caches, which is outside the image, since that cannot be written to.
"""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rloo_pipeline import __version__
from rloo_pipeline.config import Config, provenance
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import caches

KINDS = ("cuda", "cpu")
PACKAGE = "/opt/rloo/src/rloo_pipeline"
"""Where this package lies in the image. The one that plans the jobs is bound over it, so an edit needs no new image."""

CACHES = {
    "XDG_CACHE_HOME": "",
    "HF_HOME": "huggingface",
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "rloo_pipeline/triton",
    "TORCHINDUCTOR_CACHE_DIR": "rloo_pipeline/inductor",
    "TORCH_EXTENSIONS_DIR": "rloo_pipeline/torch_extensions",
}
"""Where engines keep their caches: variables, and their places in the cache folder where they are not set."""


def image(config: Config, project: Path) -> str:
    """The image of a run: as configured, else the one that `make images` makes of `project` as it is now.

    Where both kinds are built it is the one for GPUs. Another pinned list gives another name. It lies in images/ of the
    working folder or, for a run in a folder of its own, of `project`.
    """
    if config.container.image:
        return config.container.image
    names = [_name(kind, project) for kind in KINDS]
    candidates = [*names, *(str(project / name) for name in names)]
    return next((name for name in candidates if Path(name).exists()), names[-1])


def _name(kind: str, project: Path) -> str:
    """The name that containers/build gives to an image."""
    digest = hashlib.sha256()
    for file in (project / "requirements" / f"{kind}.txt", project / "containers" / f"rloo-{kind}.def"):
        digest.update(file.read_bytes() if file.exists() else b"")
    return f"images/rloo-{kind}-{__version__}-{digest.hexdigest()[:12]}.sif"


def require(name: str) -> None:
    """Looks for an image.

    Raises:
        UserError: it is a file, and not there.
    """
    if "://" not in name and not Path(name).exists():
        raise UserError(
            f"{name}: no such image on {socket.gethostname()}; build it with `make images`, or name another one in "
            "container.image, on a file system that all nodes see"
        )


def prepare(config: Config, image: str) -> None:
    """Sets what Apptainer reads from the environment of this process, and what the engines do in the image."""
    places = dict(_caches())
    if not Path(os.environ.setdefault("TMPDIR", tempfile.gettempdir())).is_dir():
        del os.environ["TMPDIR"]  # that of the node that submitted
    os.environ.update(places)
    folders = [*places.values(), os.environ.get("TMPDIR"), *_folders(config)]
    if "://" not in image and not (file := Path(image).resolve()).is_relative_to(Path.cwd().resolve()):
        folders.append(f"{file}:{file}:ro")  # the report reads which one it was
    binds = [*os.environ.get("APPTAINER_BIND", "").split(","), *filter(None, folders)]
    binds.append(f"{Path(__file__).parent.parent}:{PACKAGE}:ro")
    os.environ["APPTAINER_BIND"] = ",".join(dict.fromkeys(filter(None, binds)))
    if Path("/dev/nvidiactl").exists():
        os.environ.setdefault("APPTAINER_NV", "1")


def _caches() -> Iterator[tuple[str, str]]:
    """Where engines write beside their results: variables and folders, which are made. Without them it would be the
    working folder, which is HOME in the image.
    """
    root = caches.cache_folder()
    for name, place in CACHES.items():
        folder = root if name == "XDG_CACHE_HOME" else Path(os.environ.get(name, root / place)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        yield name, str(folder)


def _folders(config: Config) -> Iterator[str]:
    """Folders outside the working one that the configuration names, or that results/ links to."""
    sources = [config.dataset.train, config.dataset.eval]
    if config.warmstart.sft:
        sources.append(config.warmstart.sft.demonstrations)
    base = Path(config.data_dir or ".")
    named = [Path("results"), base, *map(Path, config.container.binds)]
    named += [base / source.path for source in sources if source.path]
    named += [Path(source.name) for source in sources if source.name]
    if config.model.name_or_path:
        named.append(Path(config.model.name_or_path))
    own = (reference.rpartition(":")[0] for reference in provenance.functions(config, Config.model_fields))
    named += [Path(file) for file in own if file.endswith(".py")]
    here = Path.cwd().resolve()
    for path in named:
        real = path.resolve()
        folder = real if real.is_dir() else real.parent
        if path.exists() and not folder.is_relative_to(here):
            yield str(folder)
            if path.is_absolute():
                yield str(path if path.is_dir() else path.parent)
