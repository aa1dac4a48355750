"""Replacements for DeepSpeed's own writing of a trainer state."""

import errno
from types import SimpleNamespace

import pytest
import torch

from rloo_pipeline.training.deepspeed_internals import deepspeed_config


@pytest.mark.parametrize("failing", [1, 3, 6])
def test_the_error_of_a_write_is_raised_and_not_what_torch_makes_of_it(tmp_path, monkeypatch, failing) -> None:
    """A quota is reached here, which the free space of the disk does not show."""
    write, calls = deepspeed_config.DigestedFile.write, iter(range(1, 100))

    def write_until_full(file: deepspeed_config.DigestedFile, content: object) -> int:
        if next(calls) == failing:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return write(file, content)

    monkeypatch.setattr(deepspeed_config.DigestedFile, "write", write_until_full)
    with pytest.raises(OSError, match="Disk quota exceeded"):
        deepspeed_config.save_reproducibly({"weights": torch.ones(1000)}, tmp_path / "state.pt")


def test_a_state_of_any_python_can_be_loaded(tmp_path, monkeypatch) -> None:
    """Python 3.11.2, which Debian 12 and the images have, pickles members of an Enum as calls of getattr."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    monkeypatch.setattr(ZeroStageEnum, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self.name)))
    deepspeed_config.save_reproducibly({"zero_stage": ZeroStageEnum.gradients}, tmp_path / "state.pt")
    assert deepspeed_config.load_values(str(tmp_path / "state.pt")) == {"zero_stage": ZeroStageEnum.gradients}


def test_the_bytes_of_a_state_are_the_same_on_any_device(tmp_path, monkeypatch) -> None:
    state = {"weights": torch.ones(10), "step": 3}
    here = deepspeed_config.save_reproducibly(state, tmp_path / "here.pt")
    monkeypatch.setattr(torch.serialization, "location_tag", lambda _: "cuda:1")
    assert deepspeed_config.save_reproducibly(state, tmp_path / "there.pt") == here
    torch.save(state, tmp_path / "plain.pt")
    assert b"cuda:1" in (tmp_path / "plain.pt").read_bytes()


def test_gradients_are_clipped_to_the_norm_that_is_set_and_smaller_ones_keep_their_bytes() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]} for _ in range(2)]
    parameters = [parameter for group in groups for parameter in group["params"]]
    engine = SimpleNamespace(optimizer=SimpleNamespace(param_groups=groups))
    for limit, expected in ((2.5, [1.5, 2.0]), (5.01, [3.0, 4.0])):
        parameters[0].grad, parameters[3].grad = torch.tensor([3.0]), torch.tensor([4.0])
        deepspeed_config.clip_plainly(engine, limit)
        engine.clip_fp32_gradients()
        assert engine._global_grad_norm == 5.0
        clipped = [parameters[0].grad.item(), parameters[3].grad.item()]
        assert clipped == (expected if limit > 5 else pytest.approx(expected))
