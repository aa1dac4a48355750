"""The stage `reward_model` trains what `rewards.model` scores with; one that is no better than chance stops the run."""

import json
import random
from pathlib import Path

import forks
import pytest
import torch
import yaml
from helpers import done, mini, rloo
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid
from trainers import trainer_settings

from rloo_pipeline.artifacts import fence
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import RewardModel
from rloo_pipeline.data.preferences import preferences
from rloo_pipeline.demo.arithmetic import message, problems
from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards.model import reward_model
from rloo_pipeline.training.preference_pairs import split_held_out, tokenized

pytestmark = pytest.mark.slow

USED = [{"function": "rloo_pipeline.rewards.model:reward_model", "batch": "all"}, *mini()["rewards"]]


def pairs(count: int, seed: int = 0, is_noise: bool = False) -> list[dict]:
    """Preferences for texts with more zeros than nines, or for nothing at all."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        zeros, nines = ("".join(draw.choice(digits) for _ in range(draw.randint(2, 9))) for digits in ("001", "998"))
        answers = draw.sample([zeros, nines], 2) if is_noise else [zeros, nines]
        chosen, rejected = (message("assistant", answer) for answer in answers)
        rows.append({"prompt": message("user", f"{number}+1"), "chosen": chosen, "rejected": rejected})
    return rows


def prepared(run: Path, rows: list[dict], **section) -> Path:
    """The folder of a run with preferences, after stage-assets."""
    run.mkdir()
    (run / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"train": {"path": str(run / "pairs.jsonl")}, "batch_size": 16, "learning_rate": 0.003} | section
    (run / "config.yaml").write_text(yaml.safe_dump(mini(reward_model=keys, rewards=USED)))
    done("stage-assets", "--output", run / "assets")
    done("prompts", "--assets", run / "assets", "--output", run / "prompts")
    return run


def trained(run: Path, name: str = "reward_model"):
    folder = run / name
    inputs = ("--assets", run / "assets", "--prompts", run / "prompts")
    outputs = ("--model", folder / "model", "--output", folder / "checks.json")
    return rloo("reward-model", *inputs, *outputs, f"--log={run / 'logs' / 'reward_model.log'}")


def test_it_learns_preferences_and_the_reward_function_gives_its_scores(tmp_path) -> None:
    """The log says how many pairs are too long, and how many have evaluation prompts."""
    rows = pairs(301)
    rows[7]["chosen"][0]["content"] = "0" * 100
    rows[300]["prompt"] = [*message("system", "Be brief."), *problems("test", 1)[0]["prompt"]]
    run = prepared(tmp_path / "run", rows, max_length=40)
    outcome = trained(run)
    assert outcome.returncode == 0, outcome.stderr
    log = outcome.stderr + (run / "logs" / "reward_model.log").read_text()
    assert "1 of 301 left out, since their prompts are evaluated" in log
    assert "dropped 1 of 270 pairs" in log
    checks = json.loads((run / "reward_model" / "checks.json").read_text())
    assert checks["accuracy"]["value"] > 0.9 < checks["accuracy"]["ci95"][1]
    assert (checks["pairs"], checks["trained_pairs"]) == (30, 269)
    model = str(run / "reward_model" / "model")
    asked = [row["prompt"] for row in rows]
    chosen, rejected = (reward_model(asked, [row[name] for row in rows], model) for name in ("chosen", "rejected"))
    assert sum(c > r for c, r in zip(chosen, rejected, strict=True)) > 270


def test_packed_rewards_and_a_step_on_pairs_are_those_of_plain_transformers(
    tmp_path, tiny_model, engines, monkeypatch
) -> None:
    """The rewards of the engine are those of the reward function, and the loss and gradient those of padded batches,
    with stored activations in host memory, too.
    """
    from rloo_pipeline.stages.reward_model import train
    from rloo_pipeline.training.reward_engine import RewardEngine

    rows = [row | {"margin": 0.5} for row in pairs(12)]
    model = Policy(tiny_model)
    data = tokenized(list(preferences(rows, "pairs", None)), model, 256, "pairs")
    to_host, used = torch.autograd.graph.save_on_cpu, []
    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", lambda pinned: used.append(pinned) or to_host(pinned))
    settings = trainer_settings(max_grad_norm=1e9, gradient_checkpointing="offload", max_tokens_per_micro_batch=100)
    engine = RewardEngine(model, settings, seed=1)
    rewards = engine.logps(data.sequences)[:, 0]
    engine.save_policy(tmp_path / "model")
    asked = [row["prompt"] for row in rows]
    plain = [
        reward_model(asked, [row[name] for row in rows], str(tmp_path / "model"), dtype="float32")
        for name in ("chosen", "rejected")
    ]
    torch.testing.assert_close(rewards.view(-1, 2).T, torch.tensor(plain), atol=1e-5, rtol=1e-5)
    section = RewardModel.model_validate(
        {"train": {"path": "pairs"}, "batch_size": 12, "center_rewards_coefficient": 0.1}
    )
    [loss] = train(engine, section, data, 1, 0)
    scores, slope = by_transformers(tmp_path / "model", data)
    assert loss == pytest.approx(scores, rel=1e-5)
    assert engine.grad_norm == pytest.approx(slope, rel=1e-4)
    engine.close()
    assert used


def test_two_ranks_that_share_the_weights_train_the_reward_model_of_one(tmp_path) -> None:
    run = prepared(tmp_path / "run", pairs(70))
    assert trained(run, "one").returncode == 0
    config = yaml.safe_load((run / "config.yaml").read_text()) | {"deepspeed": {"processes": 2, "zero_stage": 3}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    arguments = ["reward-model", "--assets", run / "assets", "--prompts", run / "prompts"]
    arguments += ["--model", run / "two" / "model", "--output", run / "two" / "checks.json"]
    token = run / fence.FOLDER / "of the launcher"
    token.write_text("token")
    for outcome in forks.run_ranks("rloo_pipeline", list(map(str, arguments)), 2, **{fence.VARIABLE: f"token {token}"}):
        assert outcome.returncode == 0, outcome.stderr[-2000:]
    one, two = (json.loads((run / name / "checks.json").read_text()) for name in ("one", "two"))
    assert two["steps"] == one["steps"] > 2
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
    start = load_file(run / "assets" / "model" / "model.safetensors")
    expected, written = (load_file(run / name / "model" / "model.safetensors") for name in ("one", "two"))
    assert written.keys() == expected.keys() > {"score.weight"}
    for name, value in expected.items():
        length = (value - start.get(name, 0)).norm()
        assert (written[name] - value).norm() < 1e-2 * length, name


def by_transformers(folder: Path, data) -> tuple[float, float]:
    """The loss, and the norm of its gradient, one conversation after the other."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    sequences = data.sequences
    ids = [[*p, *c[:-1]] for p, c in zip(sequences.prompts, sequences.completions, strict=True)]
    scores = torch.stack([model(torch.tensor([row])).logits[0, 0] for row in ids])
    chosen, rejected = scores[::2], scores[1::2]
    loss = (-logsigmoid(chosen - rejected - 0.5) + 0.1 * (chosen + rejected) ** 2).mean()
    loss.backward()
    norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    return loss.item(), torch.stack(norms).norm().item()


@pytest.mark.long
def test_a_reward_model_that_is_no_better_than_chance_stops_the_run(tmp_path) -> None:
    run = prepared(tmp_path / "run", pairs(200, is_noise=True))
    assert trained(run).returncode == 0
    done("prompts", "--assets", run / "assets", "--output", run / "prompts")
    measured = ("--reward-model", run / "reward_model" / "checks.json")
    arguments = ("--prompts", run / "prompts", "--policy", run / "assets", *measured)
    done("probe", *arguments, "--output", run / "warmstart" / "probe.parquet")
    outcome = rloo(
        *("checks", "--assets", run / "assets", *arguments, "--probe", run / "warmstart" / "probe.parquet"),
        *("--output", run / "warmstart" / "checks.json"),
    )
    assert outcome.returncode == 1
    assert "pair_accuracy: The reward model may be no better than chance" in outcome.stderr
    assert "checks.accept: [" in outcome.stderr
    weights = run / "reward_model" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\1")
    outcome = rloo("probe", *arguments, "--output", run / "warmstart" / "again.parquet")
    assert outcome.returncode == 1
    assert "model.safetensors" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_what_no_reward_model_can_be_made_from_gives_a_one_line_error(tmp_path) -> None:
    rows = pairs(30)
    rows[3] = rows[3] | {"rejected": rows[3]["chosen"]}
    run = prepared(tmp_path / "run", rows, warmup_steps=1)
    outcome = trained(run)
    assert outcome.returncode == 1
    assert "pairs.jsonl, row 3: chosen and rejected are equal" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert not (run / "reward_model" / "checks.json").exists()
    run = prepared(tmp_path / "short", pairs(30), warmup_steps=1)
    outcome = trained(run)
    assert outcome.returncode == 1
    assert "warmup_steps (1) leaves none of the 1 optimizer steps of 27 pairs" in outcome.stderr


def test_pairs_that_are_equal_too_long_or_too_few_are_refused(tiny_model) -> None:
    rows = [{"chosen": "1<unknown>", "rejected": "1<unknown >"}, {"chosen": "12", "rejected": "13"}]
    equal, other = preferences(rows, "pairs", None)
    with pytest.raises(UserError, match="row 1: chosen and rejected are equal as the model reads them"):
        tokenized([equal._replace(where="pairs, row 1", chosen="ab", rejected="cd")], Policy(tiny_model), 9, "pairs")
    with pytest.raises(UserError, match="none of 1 pairs is within"):
        tokenized([other], Policy(tiny_model), 1, "pairs")
    with pytest.raises(UserError, match="pairs: 2 prompts are too few"):
        split_held_out([each._replace(prompt="Q: ") for each in (equal, other)], None, 0, "pairs")
    with pytest.raises(UserError, match="all pairs have prompts of"):
        split_held_out([other], [other], 0, "pairs")
    with pytest.raises(UserError, match="pairs: rows are strings without a column prompt"):
        split_held_out([other], None, 0, "pairs")


def test_held_out_pairs_have_other_prompts_than_those_that_train() -> None:
    rows = pairs(40)
    both = list(preferences([*rows, *rows], "pairs", None))
    trained_on, held_out = split_held_out(both, None, 0, "pairs")
    assert (len(trained_on), len(held_out)) == (72, 8)
    assert {pair.key for pair in trained_on}.isdisjoint(pair.key for pair in held_out)
    kept = split_held_out(both, held_out[:1], 0, "pairs")[0]
    assert kept == [one for one in both if one.key != held_out[0].key]
