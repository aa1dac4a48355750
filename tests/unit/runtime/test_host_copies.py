"""Models that leave a GPU to another stage. On a CPU both places are host memory."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rloo_pipeline.runtime.host_copies import HostCopies
from rloo_pipeline.training import forward_only
from rloo_pipeline.training.kernels import attention
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.packing import Sequences

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
SEQUENCES = Sequences([[1, 2, 3], [4, 5]], [[6, 7], [8]])


def model() -> TokenLogProbs:
    attention.register()
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    config._attn_implementation = attention.NAME
    return TokenLogProbs(Qwen3ForCausalLM(config).requires_grad_(False).eval(), 1.0)


def logps_of(logprobs: TokenLogProbs) -> list[list[float]]:
    return forward_only.score(logprobs, SEQUENCES, 64, "test").logps


def test_a_model_that_left_and_returned_computes_the_same() -> None:
    logprobs = model()
    before = logps_of(logprobs)
    for _ in range(2):
        logprobs.offload()
        logprobs.offload()
        assert not any(weights.untyped_storage().nbytes() for weights in logprobs.parameters())
        logprobs.enter_gpu()
        logprobs.enter_gpu()
        assert logps_of(logprobs) == before


def test_only_what_changes_is_copied_again() -> None:
    """A storage that has both, as tied weights may, counts as changing."""
    copies, weights, frozen = HostCopies(), torch.ones(4), torch.ones(3)
    views = [weights, weights[2:]]
    for value in (1.0, 2.0):
        for tensor in (weights, frozen):
            tensor.fill_(value)
        copies.take(views, [frozen, weights[:1]])
        assert torch.equal(copies.of({"moments": weights})["moments"], torch.full((4,), value))
        copies.restore()
    assert torch.equal(views[1], torch.full((2,), 2.0))
    assert torch.equal(frozen, torch.ones(3)), "of the first time"


class Cuda:
    """CUDA's functions to pin and release memory."""

    def __init__(self, error: int) -> None:
        self.error, self.pinned = error, dict[int, int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert flags == 1
        if not self.error:
            self.pinned[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


@pytest.mark.parametrize("error", [0, 2])
def test_copies_are_pinned_once_where_cuda_can_and_released_with_their_owner(error, monkeypatch, caplog) -> None:
    cuda, weights, others = Cuda(error), torch.ones(4), (torch.zeros(0), torch.ones(129))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.UntypedStorage, "is_cuda", True)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: None)
    copies = HostCopies()
    with caplog.at_level("INFO"):
        for _ in range(2):
            copies.take([weights, *others])
            copies.restore()
    assert [*cuda.pinned.values()] == ([] if error else [512 * 3])
    assert caplog.text.count("CUDA cannot pin 0.0 GB of host memory (error 2), so moves are slower") == bool(error)
    del copies
    assert not cuda.pinned
    assert torch.equal(weights, torch.ones(4))


def test_a_model_that_is_not_kept_frees_its_memory() -> None:
    """The stages that load several, one after the other, discard each, delete it and collect."""
    logprobs = model()
    logps_of(logprobs)
    alive = weakref.ref(next(logprobs.parameters()))
    logprobs.discard()
    assert not any(tensor.untyped_storage().nbytes() for tensor in [*logprobs.parameters(), *logprobs.buffers()])
    del logprobs
    gc.collect()
    assert alive() is None


def test_log_probs_of_a_model_that_is_loaded_for_them_leave_none_of_it(monkeypatch) -> None:
    """As the stages `distance` and `prove-chosen` compute them, and an update with a lag."""
    loaded = list[weakref.ref[torch.Tensor]]()

    def load(*_: object) -> TokenLogProbs:
        found = model()
        loaded.append(weakref.ref(next(found.parameters())))
        return found

    monkeypatch.setattr(forward_only, "load_configured", load)
    sections = {"model": SimpleNamespace(dtype="float32"), "deepspeed": SimpleNamespace(micro_batch_tokens=64)}
    found = forward_only.logps_of_completions(SimpleNamespace(**sections), None, 1.0, SEQUENCES, "test")
    assert found == logps_of(model())
    assert [one() for one in loaded] == [None]
