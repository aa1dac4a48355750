"""An update that trains with the experts in its table of rollouts, which is written by hand here."""

from collections.abc import Callable

import model_folders
import pyarrow as pa
import pytest
import torch
from helpers import Round, succeeded

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.training import forward_only
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.packing import Sequences

pytestmark = pytest.mark.slow

ONE_STEP = {"algorithm": {"steps_per_generation": 1}}
"""In a second step, the routers would choose by other weights."""


class WithExperts(Round):
    """Rollouts in which each token has the experts that a function chooses."""

    choose: Callable[[list[int], list[int]], list[int]]

    def _save(self, number: int, shard: int, rollouts, scores, reference) -> None:
        if tables.EXPERTS not in rollouts.column_names:
            rows = zip(rollouts["prompt_ids"].to_pylist(), rollouts["completion_ids"].to_pylist(), strict=True)
            experts = pa.array([self.choose(*row) for row in rows], pa.list_(pa.uint16()))
            rollouts = rollouts.append_column(tables.WITH_EXPERTS.field(tables.EXPERTS), experts)
        super()._save(number, shard, rollouts, scores, reference)


def test_the_routers_own_experts_give_the_same_policy_and_others_another_one(tmp_path) -> None:
    model = model_folders.build(tmp_path / "model", 0, "qwen3_moe")
    module = TokenLogProbs(forward_only.load(Policy(model), "float32"), 1.0)

    def own(prompt: list[int], completion: list[int]) -> list[int]:
        chosen: list[torch.Tensor] = []
        hooks = [
            router.register_forward_hook(lambda _, __, out: chosen.append(out[-1])) for router in module.replay.routers
        ]
        with torch.no_grad():
            module(Sequences([prompt], [completion]).pick([0]).to(module.full_model.device))
        for hook in hooks:
            hook.remove()
        return torch.stack(chosen, 1).flatten().tolist()

    def others(prompt: list[int], completion: list[int]) -> list[int]:
        return [(expert + 1) % 4 for expert in own(prompt, completion)]

    rounds = {"plain": Round(tmp_path / "plain", model, **ONE_STEP).write(1)}
    for name, choose in {"own": own, "others": others}.items():
        rounds[name] = WithExperts(tmp_path / name, model, rollout={"router_replay": True}, **ONE_STEP)
        rounds[name].choose = choose
        rounds[name].write(1)
    weights = {}
    for name, each in rounds.items():
        succeeded(each.update())
        weights[name] = each.weights()
    assert all(torch.equal(weights["plain"][name], weight) for name, weight in weights["own"].items())
    changed = {name for name, weight in weights["others"].items() if not torch.equal(weights["plain"][name], weight)}
    assert any("gate" in name for name in changed)
    assert any("experts" in name for name in changed)
