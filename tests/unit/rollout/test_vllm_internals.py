"""vLLM's import; a batch for its attention on CPUs, split at images, within which the model attends both ways."""

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import forks
import pytest
import torch
from helpers import succeeded

from rloo_pipeline.rollout import vllm_internals


@dataclass
class Batch:
    """The fields of vLLM's CommonAttentionMetadata that are read or replaced."""

    num_reqs: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table_tensor: torch.Tensor
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None
    causal: Any = True


def batch(new: list[int], lengths: list[int], images: dict[int, list[tuple[int, int]]] | None) -> Batch:
    """Sequences of these lengths, of which so many tokens at the end are new."""
    starts = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    table = torch.arange(len(new), dtype=torch.int32).unsqueeze(-1)
    return Batch(len(new), starts, torch.tensor(lengths, dtype=torch.int32), table, images)


def test_each_image_and_the_text_between_images_is_a_sequence() -> None:
    split = vllm_internals.split_at_images(batch([12, 4], [12, 9], {0: [(6, 8), (2, 4)], 1: []}))
    assert split.num_reqs == 6
    assert split.query_start_loc.tolist() == [0, 2, 5, 6, 9, 12, 16]
    assert split.seq_lens.tolist() == [2, 5, 6, 9, 12, 9]
    assert split.block_table_tensor.flatten().tolist() == [0, 0, 0, 0, 0, 1]
    assert split.causal.tolist() == [1, 0, 1, 0, 1, 1]
    assert {part.dtype for part in (split.query_start_loc, split.seq_lens, split.causal)} == {torch.int32}


def test_tokens_in_the_cache_are_in_no_part() -> None:
    split = vllm_internals.split_at_images(batch([5], [12], {0: [(1, 3), (6, 8)]}))
    assert (split.query_start_loc.tolist(), split.seq_lens.tolist()) == ([0, 2, 5], [9, 12])
    assert split.causal.tolist() == [0, 1]


@pytest.mark.parametrize("images", [None, {}, {0: []}, {0: [(1, 3)]}])
def test_a_batch_without_new_tokens_of_images_is_as_it_was(images) -> None:
    given = batch([1], [12], images)
    assert vllm_internals.split_at_images(given) is given


def test_a_function_of_vllm_is_replaced_once_in_a_process() -> None:
    class Layer:
        def forward(self, value: int) -> int:
            return value

    Layer.forward.__module__ = "vllm"

    def forward(old: Any, self: Any, value: int) -> int:
        return old(self, value) + 1

    for _ in range(2):
        vllm_internals._replace(Layer, forward)
        assert Layer().forward(value=1) == 2


def test_vllm_is_imported_without_scikit_learn(tmp_path) -> None:
    """transformers would import it for vLLM; vLLM itself would import SciPy for sound and OpenTelemetry for traces."""
    program = tmp_path / "imports.py"
    program.write_text(
        "import sys\nfrom rloo_pipeline.rollout import vllm_internals\nvllm_internals.import_vllm()\n"
        "from vllm.multimodal.audio import scipy_signal\nfrom vllm.tracing import is_otel_available\n"
        "print(type(scipy_signal).__name__, is_otel_available(), *sys.modules)\n"
    )
    outcome = succeeded(forks.run(program, [], os.environ | {"PYTHONPATH": str(forks.ROOT)}))
    signal, traces, *loaded = outcome.stdout.split()
    assert (signal, traces) == ("_PlaceholderModuleAttr", "False")
    assert "vllm" in loaded
    assert "sklearn" not in loaded
    assert all(map(importlib.util.find_spec, ("sklearn", "scipy.signal", "opentelemetry.sdk"))), "there they are"


def numbers_of_gpus() -> tuple[list[int], bool]:
    """Indices for which vLLM takes the GPUs of a job with MIG slices; True if it inspects models in this process."""
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    os.environ["CUDA_VISIBLE_DEVICES"] = "MIG-cccc"
    vllm_internals.devices.gpu_of_slice = {"MIG-cccc": 1}.__getitem__
    vllm_internals.import_vllm()
    indices = [current_platform.device_control_id_to_physical_device_id(name) for name in ("MIG-cccc", "2")]
    return indices, registry._run_in_subprocess(os.getpid) == os.getpid()


def test_a_slice_is_the_gpu_that_holds_it() -> None:
    assert forks.call(numbers_of_gpus) == ([1, 2], True)
