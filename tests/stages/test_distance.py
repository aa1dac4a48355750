"""The KL of a policy from policy 0 equals the one computed from transformers' logits."""

import json
import shutil
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from helpers import Round, done, rloo, succeeded
from synthetic_runs import completions_schema

from rloo_pipeline.artifacts import policy as policies
from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.files import read_json, write_json
from rloo_pipeline.artifacts.policy import Policy

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7]
SAID = [[8, 9, 2], [4, 2], [10, 11, 12, 13], [2]]


def completions(samples: int) -> list[dict]:
    """An evaluation's rows, with what the policy said."""
    return [
        {"prompt_id": f"p{place // samples}", "sample": place % samples, "prompt_ids": PROMPT, "completion_ids": ids}
        | {"completion": "", "sampling_logps": [0.0] * len(ids), "finish_reason": "stop", "seed": 0}
        | {"scores/answer": 0.0, "reward": 0.0, "seconds": 0.0, "error": None}
        for place, ids in enumerate(SAID)
    ]


def test_the_distance_is_the_mean_log_ratio_of_its_own_completions(tmp_path, tiny_model) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from rloo_pipeline.demo.character_model import tiny_qwen3

    other = tmp_path / "other"
    tiny_qwen3(other, 4, hidden_size=32, layers=2, heads=2, key_value_heads=1, head_dim=32, intermediate_size=64)
    run = Round(tmp_path / "run", tiny_model, evaluation={"num_generations": 2, "temperature": 0.5})
    folder = run.run / "evaluation" / "final"
    schema = completions_schema("answer")

    def logp(model: object, ids: list[int]) -> float:
        with torch.inference_mode():
            logits = model(torch.tensor([[*PROMPT, *ids]])).logits[0, len(PROMPT) - 1 : -1] / 0.5
        return float(logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None]).sum())

    policy, reference = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (other, tiny_model)
    )
    expected = [logp(policy, ids) - logp(reference, ids) for ids in SAID]
    for path, value in ((other, sum(expected) / 4), (tiny_model, 0.0)):
        about = {"policy": Policy(path).digest}
        tables.write(folder / "completions.parquet", completions(2), schema, "completions", **about)
        outcome = done(
            *("distance", "--completions", folder / "completions.parquet", "--policy", path),
            *("--reference", tiny_model, "--output", folder / "distance.json"),
        )
        distance = json.loads((folder / "distance.json").read_text())
        assert distance["kl/sequence_mean"] == pytest.approx(value, abs=1e-4)
        assert distance["kl"] == pytest.approx(value * 4 / 10, abs=1e-4)
        assert "KL from policy 0: " in outcome.stderr


def test_the_log_ratio_of_greedy_completions_is_not_called_a_kl(tmp_path, tiny_model) -> None:
    evaluation = {"num_generations": 1, "temperature": 0}
    folder = Round(tmp_path / "run", tiny_model, evaluation=evaluation).run / "evaluation" / "final"
    about = {"policy": Policy(tiny_model).digest}
    tables.write(folder / "completions.parquet", completions(1), completions_schema("answer"), "completions", **about)
    outcome = done(
        *("distance", "--completions", folder / "completions.parquet", "--policy", tiny_model),
        *("--reference", tiny_model, "--output", folder / "distance.json"),
    )
    assert "log-ratio to policy 0 of greedy completions: 0 nats a completion" in outcome.stderr
    assert "KL from" not in outcome.stderr


def test_completions_on_the_test_rows_are_proven_to_be_of_the_chosen_policy(tmp_path, tiny_model) -> None:
    from rloo_pipeline.training import forward_only
    from rloo_pipeline.training.logprobs import TokenLogProbs
    from rloo_pipeline.training.packing import Sequences

    run = Round(tmp_path / "run", tiny_model, evaluation={"num_generations": 2}).run
    folder = run / "policies" / "00001"
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    digest = policies.seal(folder, folder.name)
    write_json(run / "selection.json", {"chosen": [{"run": ".", "seed": 0, "round": 1, "policy": digest}]})
    write_json(run / "warmstart" / "checks.json", {"sampler_difference": 1e-7})
    model = TokenLogProbs(forward_only.load(Policy(folder), "float32"), 1.0)
    logps = forward_only.score(model, Sequences([PROMPT] * len(SAID), SAID), 64, "tokens").logps
    table, proof = run / "test" / "0" / "completions.parquet", run / "test" / "0" / "proof.json"

    def prove(shift: float) -> CompletedProcess[str]:
        rows = [
            row | {"sampling_logps": [logp + shift for logp in own]}
            for row, own in zip(completions(2), logps, strict=True)
        ]
        tables.write(table, rows, completions_schema("answer"), "completions", policy=digest)
        words = ("--selection", run / "selection.json", "--completions", table, "--seed", "0", "--output", proof)
        return rloo("prove-chosen", *words)

    succeeded(prove(1e-6))
    found = read_json(proof)
    assert (found["policy"], found["tokens"]) == (digest, 10)
    assert found["sampler_difference"] == pytest.approx(1e-6, rel=0.3)
    outcome = prove(0.1)
    assert outcome.returncode == 1
    assert f"the completions in {table} were not sampled from" in outcome.stderr
    assert "0.1 nats a token from the trainer's (over 10 tokens)" in outcome.stderr


def test_an_adapter_is_read_on_its_base(tmp_path, tiny_model) -> None:
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    from rloo_pipeline.training import forward_only
    from rloo_pipeline.training.logprobs import TokenLogProbs
    from rloo_pipeline.training.packing import Sequences

    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.5)
    adapted.save_pretrained(tmp_path / "adapter")
    sequences = Sequences([PROMPT] * len(SAID), SAID)

    def scored(folder: Path, entropies: bool = False) -> forward_only.TokenValues:
        model = TokenLogProbs(forward_only.load(Policy(folder), "float32"), 1.0)
        return forward_only.score(model, sequences, 64, "tokens", entropies)

    logps = scored(tmp_path / "adapter").logps
    plain = scored(tiny_model, entropies=True)
    merged = adapted.merge_and_unload().eval()
    for ids, values, entropies, without in zip(SAID, logps, plain.entropies, plain.logps, strict=True):
        with torch.inference_mode():
            logits = merged(torch.tensor([[*PROMPT, *ids]])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        assert values == pytest.approx(logits.gather(-1, torch.tensor(ids)[:, None]).flatten().tolist(), abs=1e-4)
        assert values != pytest.approx(without, abs=1e-3)
        assert len(entropies) == len(ids)
