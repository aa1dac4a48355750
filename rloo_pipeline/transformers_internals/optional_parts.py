"""Imports transformers, or a part of it, without its optional dependencies.

transformers imports scikit-learn (assisted generation) and SciPy (losses of object detection), which takes a second at
the start of every stage, and reads the list of files of each installed package, to find the versions of three of them,
which takes another half. Qwen-VL's processors need torchvision only for videos, and PyTorch's CPU build from PyPI comes
without it; the processors based on PIL then handle images. Tool schemas need only the standard library. For vLLM see
`rollout/vllm_internals.py`.
"""

import importlib.metadata
import importlib.util
import logging
import sys
from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from rloo_pipeline.runtime import guard
from rloo_pipeline.runtime.import_shims import hidden_packages, replaced

PROCESSORS = ("Qwen2_5_VLProcessor", "Qwen3VLProcessor")
"""Classes of transformers whose video processor needs torchvision."""
SCHEMA_MODULE = "transformers.utils.chat_template_utils"


def prepare_transformers() -> None:
    """Makes transformers cache that scikit-learn and SciPy are missing; call it before importing any of its models.

    Raises:
        UserError: the installed transformers is not the version whose internals this package uses.
    """
    guard.require("transformers")
    on_demand = replaced(importlib.metadata, "packages_distributions", Distributions)
    with hidden_packages("sklearn", "scipy"), on_demand:
        from transformers.utils import import_utils

        import_utils.is_sklearn_available()
        import_utils.is_scipy_available()


class Distributions:
    """Stands for `importlib.metadata.packages_distributions()`, but looks for names when it is asked for them."""

    @staticmethod
    def get(package: str, default: list[str]) -> list[str]:
        """Names of the distributions of a package; the one named like it is enough, except for Flash Attention, of
        which two distributions have the same package.
        """
        try:
            named_alike = [] if package.startswith("flash_attn") else [importlib.metadata.distribution(package).name]
        except importlib.metadata.PackageNotFoundError:
            named_alike = []
        return named_alike or [*packages_distributions().get(package, default)]


def lacks_torchvision() -> bool:
    """True if torchvision cannot be used."""
    from transformers.utils import import_utils

    import_utils.is_torchvision_v2_available()  # so that transformers caches both answers
    return not import_utils.is_torchvision_available()


def prepare_processors() -> None:
    """Makes transformers load the processors of PROCESSORS without their video part, if torchvision is missing."""
    prepare_transformers()
    for name in PROCESSORS if lacks_torchvision() else ():
        processor: Any = getattr(import_module("transformers"), name)
        processor.get_attributes = classmethod(lambda _: ["image_processor", "tokenizer"])
        processor.video_processor = property(_no_videos)


def _no_videos(processor: Any) -> SimpleNamespace:
    """A stand-in for the video processor, which vLLM reads even if no prompt has a video."""
    from transformers.processing_utils import VideosKwargs

    images = processor.image_processor
    names = ("size", "patch_size", "temporal_patch_size", "merge_size")
    return SimpleNamespace(valid_kwargs=VideosKwargs, **{name: getattr(images, name) for name in names})


def schema_maker() -> Any:
    """The transformers module with `get_json_schema`, which makes the JSON schema of a tool, and with its errors."""
    return import_module(SCHEMA_MODULE)


def schema_file() -> str:
    """The file of that module in the installed transformers, found without importing it."""
    package = importlib.util.find_spec("transformers")
    return str(Path(str(package and package.origin)).parent / "utils" / "chat_template_utils.py")


def load_schema_maker(file: str) -> None:
    """Makes that module importable without transformers, which takes a second to import and which images may lack. Only
    the process that makes schemas calls this; processes of episodes do not.

    Schemas need only the standard library; the other imports of the file are replaced.

    Args:
        file: the result of `schema_file`.
    """
    absent = dict.fromkeys(("is_jinja_available", "is_torch_available", "is_vision_available"), lambda: False)
    _module("packaging", version=None)
    _module("transformers")
    _module("transformers.utils", logging=SimpleNamespace(get_logger=logging.getLogger))
    _module("transformers.utils.import_utils", **absent)
    spec = importlib.util.spec_from_file_location(SCHEMA_MODULE, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[SCHEMA_MODULE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _module(name: str, **content: object) -> None:
    module = sys.modules[name] = ModuleType(name)
    module.__dict__.update(content)
