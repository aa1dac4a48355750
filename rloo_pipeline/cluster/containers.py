"""Finds the image in which stages run with `snakemake --sdm apptainer`, and binds the folders and devices that they
need.

Snakemake wraps each stage in `apptainer exec --home $PWD IMAGE`. Everything else is passed in environment variables on
the node where the stage runs: APPTAINER_BIND, APPTAINER_NV, and the engines' cache folders, which are outside the image
because it is read-only.
"""

import hashlib
import os
import re
import shlex
import socket
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from rloo_pipeline import import_string
from rloo_pipeline.artifacts.files import OUTPUT_CACHE
from rloo_pipeline.config import Config, Container, provenance
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import caches, devices
from rloo_pipeline.version import __version__

KINDS = ("cuda", "cpu")
PACKAGE = "/opt/rloo/src/rloo_pipeline"
"""Path of this package in the image. The host's package is bound over it, so that edits do not require a new image."""

COMPILED = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "HUMMING_CACHE_DIR": "humming/cache",
    "HUMMING_TMP_DIR": "humming/tmp",
}
"""Environment variables for folders of code that engines compile → subfolder of `compiled_folder`. Several nodes may
write at once: Triton renames finished files into place, FlashInfer locks a file per kernel, and vLLM and compiled
layers compile inside `caches.compiling`.
"""
CACHES = {"XDG_CACHE_HOME": "", "HF_HOME": "huggingface", **COMPILED}
"""All variables for cache folders, which are below the cache folder by default."""
OF_HUB = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "HF_XET_CACHE")
"""Variables for parts of HF_HOME that users keep elsewhere."""
CERTIFICATES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
"""Variables with a file of certificates, without which stage-assets and trackers in the image reach no server."""
CLEAN = ("CLEANENV", "CONTAINALL")
"""Options with which Apptainer passes no environment variables on."""
ENGINES = "rloo_pipeline/engines"
"""Subfolder of the cache folder for compiled code."""


def image(section: Container, project: Path) -> str:
    """The image of a run: `container.image`, or else the one that `rloo images` builds from `project`.

    The GPU image is used if it has been built, or if no image has been built and this machine has a GPU. The name
    changes with the pinned requirements and the definition file. The image is in images/ of the working folder or, if
    the run has its own folder, of `project`.
    """
    if section.image:
        return section.image
    names = [_image_name(kind, project) for kind in KINDS]
    candidates = [*names, *(str(project / name) for name in names)]
    return next((name for name in candidates if Path(name).exists()), names[0] if devices.has_gpu() else names[-1])


def _image_name(kind: str, project: Path) -> str:
    """The path that containers/build gives to an image. Unless built for x86-64, its name ends with the
    architecture.
    """
    digest = hashlib.sha256()
    for file in (project / "requirements" / f"{kind}.txt", project / "containers" / f"rloo-{kind}.def"):
        digest.update(file.read_bytes() if file.exists() else b"")
    machine = os.uname().machine
    suffix = "" if machine == "x86_64" else f"-{machine}"
    return f"images/rloo-{kind}-{__version__}-{digest.hexdigest()[:12]}{suffix}.sif"


def require(name: str) -> None:
    """Checks that an image exists.

    Raises:
        UserError: the name is a path and the file does not exist.
    """
    if "://" not in name and not Path(name).exists():
        raise UserError(
            f"{name}: no such image on {socket.gethostname()}; build it with `rloo images cuda` (or cpu), or name "
            "another one in container.image, on a file system that all nodes see"
        )


def refuse_missing_binds(in_job: bool) -> None:
    """Checks the folders that the user has Apptainer bind. `in_job` is as for `prepare`, which leaves out those of
    APPTAINER_BIND.

    Raises:
        UserError: a folder does not exist on this machine.
    """
    for kind in ("BINDPATH",) if in_job else ("BIND", "BINDPATH"):
        name = f"APPTAINER_{kind}" if os.environ.get(f"APPTAINER_{kind}") else f"SINGULARITY_{kind}"
        for folder in (bind.partition(":")[0] for bind in _split_binds(os.environ.get(name, ""))):
            if not Path(folder).exists():
                raise UserError(f"{name} names {folder}, which {socket.gethostname()} does not have; take it out")


def refuse_clean_environment(arguments: str) -> None:
    """Checks that Apptainer passes environment variables on to stages: the copies of functions, the fence, the caches.

    Args:
        arguments: Snakemake's `--apptainer-args`.

    Raises:
        UserError: Apptainer would start stages with an empty environment.
    """
    names = [f"{program}_{option}" for program in ("APPTAINER", "SINGULARITY") for option in CLEAN]
    if name := next((name for name in names if os.environ.get(name, "").lower() in ("1", "t", "true")), None):
        raise UserError(f"{name} is set, so stages would not get the environment variables that they need; unset it")
    options = re.compile("--(cleanenv|containall)(=[1tT].*)?|-[ceC]*[eC][ceC]*")
    if option := next(filter(options.fullmatch, shlex.split(arguments)), None):
        raise UserError(
            f"--apptainer-args has {option}, so stages would not get the environment variables that they need; take "
            "it out"
        )


def prepare(config: Config, image: str, in_job: bool = False) -> None:
    """Sets the environment variables that Apptainer and the engines in the image read.

    Args:
        config: the run's configuration.
        image: the run's image.
        in_job: True if this process inherits these variables from one on another node, whose folders may not exist
            here.

    Raises:
        UserError: Apptainer cannot bind a file or folder.
    """
    # Apptainer reads SINGULARITY_BIND only without APPTAINER_BIND
    inherited = _split_binds(os.environ.get("APPTAINER_BIND") or os.environ.get("SINGULARITY_BIND", ""))
    if in_job:
        inherited = [bind for bind in inherited if Path(bind.partition(":")[0]).exists()]
    cache_folders = dict(_cache_folders(image))
    if not Path(os.environ.setdefault("TMPDIR", tempfile.gettempdir())).is_dir():
        del os.environ["TMPDIR"]  # a folder of the node that submitted the job, which does not exist on this one
    os.environ.update(cache_folders)
    paths = [*cache_folders.values(), os.environ.get("TMPDIR"), *_outside_folders(config)]
    named = (os.environ.get(name, "") for name in CERTIFICATES)
    paths += [str(Path(file).absolute()) for file in named if Path(file).is_file()]
    read_only = {str(Path(__file__).parent.parent): PACKAGE}
    if "://" not in image and not (file := Path(image).resolve()).is_relative_to(Path.cwd().resolve()):
        read_only[str(file)] = str(file)  # the report records the image
    # Apptainer's escapes do not help: with one, it leaves out the binds that follow
    if odd := next((path for path in (*filter(None, paths), *read_only) if re.search("[,:]", path)), None):
        raise UserError(f"{odd}: Apptainer cannot bind a path with a comma or a colon in it; rename it")
    binds = [*inherited, *paths, *(f"{path}:{inside}:ro" for path, inside in read_only.items())]
    os.environ["APPTAINER_BIND"] = ",".join(dict.fromkeys(filter(None, binds)))
    if devices.has_gpu():
        os.environ.setdefault("APPTAINER_NV", "1")


def _split_binds(text: str) -> list[str]:
    """The binds in a variable, each with its options, between which there is a comma too: `data.img:/data:ro,id=1`."""
    parts = re.split(r",(?!\s*(?:r[ow]\s*(?:,|$)|id=|image-src=))", text)
    return [bind for part in parts if (bind := part.strip())]


def _cache_folders(image: str) -> Iterator[tuple[str, str]]:
    """Creates the cache folders, and yields their variables and paths. Without them, engines would write to HOME, which
    is the working folder in the image.
    """
    root = caches.cache_folder()
    compiled = compiled_folder(image)
    for name in (*CACHES, *filter(os.environ.get, OF_HUB)):
        default = (compiled if name in COMPILED else root) / CACHES.get(name, "")
        chosen = os.environ.get(name, "") if name != "XDG_CACHE_HOME" else ""
        # a job inherits the folder for the GPU model of the node that submitted it
        folder = default if not chosen or f"/{ENGINES}/" in chosen else Path(chosen).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        yield name, str(folder)


def compiled_folder(image: str) -> Path:
    """The folder for code that an image's engines compile for this machine's GPU model or CPU."""
    card = re.sub(r"\W+", "-", devices.card()).strip("-")
    return caches.cache_folder() / ENGINES / f"{identity(image)}-{card}"


def identity(image: str) -> str:
    """A digest that differs between two builds of an image; if the image is not a file, a digest of its name."""
    file = Path(image)
    # the first bytes of an image hold its UUID and timestamps; reading all of it would take seconds
    start = file.open("rb").read(1 << 16) if file.is_file() else image.encode()
    return hashlib.sha256(start).hexdigest()[:12]


def _outside_folders(config: Config) -> Iterator[str]:
    """Folders outside the working folder that the configuration names, or that links in these and in results/ point
    to.
    """
    working_folder = Path.cwd().resolve()
    paths = chain.from_iterable(map(_link_by_link, chain(_named_paths(config), _links(config))))
    for path in filter(Path.exists, paths):
        real = path.resolve()
        folder = real if real.is_dir() else real.parent
        if not folder.is_relative_to(working_folder):
            yield str(folder)
            if path.is_absolute():
                yield str(path if path.is_dir() else path.parent)


def _named_paths(config: Config) -> Iterator[Path]:
    """Files and folders that the configuration names, results/, and Snakemake's cache."""
    yield from map(Path, ("results", *config.container.binds, *config.rollout.environment_read_only))
    yield from _with_rows_or_weights(config)
    if config.evaluation.harness and config.evaluation.harness.include_path:
        yield Path(config.evaluation.harness.include_path)
    references = provenance.functions(config, Config.model_fields)
    modules = (import_string.of_library(reference)[0].rpartition(":")[0] for reference in references)
    yield from (Path(module) for module in modules if module.endswith(".py"))
    if config.deepspeed.nvme_path:
        yield Path(os.path.expandvars(config.deepspeed.nvme_path))
    if config.node_folder:
        yield config.node_folder
    if cache := os.environ.get(OUTPUT_CACHE):
        yield Path(cache)


def _with_rows_or_weights(config: Config) -> Iterator[Path]:
    """The data folder, and files and folders of datasets and models that are not on the Hub."""
    data_dir = Path(config.data_dir or ".")
    yield data_dir
    yield from (data_dir / place for source in config.row_sources.values() if (place := source.path or source.name))
    yield from (Path(model.name_or_path) for model in config.model_sources if model.name_or_path)


def _links(config: Config) -> Iterator[Path]:
    """Links in results/, in the run's folder, and in folders of datasets and models. Links in the Hub's cache point to
    its blobs.
    """
    results, (_, *folders) = Path("results"), _with_rows_or_weights(config)
    paths = (results.glob("*"), results.glob(f"{config.run}/*"), *(folder.rglob("*") for folder in folders))
    yield from (path for path in chain(*paths) if path.is_symlink())


def _link_by_link(path: Path) -> Iterator[Path]:
    """A path and, if it is a link, every path along the chain of links."""
    yield path
    while path.is_symlink() and path.exists():
        path = Path(os.path.normpath(path.parent / path.readlink()))
        yield path
