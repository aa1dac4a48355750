"""`rloo check` tries the user's loss in float64 (shapes, gradient, that completions do not mix), and estimator."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
import yaml
from helpers import ROOT

from rloo_pipeline import import_string
from rloo_pipeline.before_run import model_trial
from rloo_pipeline.config import Algorithm, Dataset, Rollout
from rloo_pipeline.data.rows import read_rows
from rloo_pipeline.errors import UserError
from rloo_pipeline.training.batch import load_estimator
from rloo_pipeline.training.objective import own_loss

GOOD = """
def vespo(logps, old_logps, advantages, mask):
    weight = ((logps - old_logps) * mask).sum(-1, keepdim=True).detach().exp()
    return -(3 + 2 * weight.log() - 3 * weight).exp() * advantages * logps
def reinforce(logps, old_logps, advantages, mask):
    return -advantages * logps
def of_uncertain_tokens(logps, old_logps, advantages, mask, entropies):
    return -advantages * logps * (entropies > 1)
"""
BAD = {
    "returned (4,) for log-probs (4, 5)": "return (advantages * logps).sum(-1)",
    "returned NoneType": "return None",
    "does not depend on logps": "return advantages * logps.detach()",
    "not finite": "return advantages * (logps + 9).log() / 0",
    "changes the loss of others": "return -advantages * (logps - logps.mean())",
    "a token outside the mask": "return -advantages * logps * (logps - old_logps).sum(-1, keepdim=True).exp()",
    "raised RuntimeError": "return logps @ logps",
    "(mine.py, line 2); correct it": "return logps @ logps",
}


def findings(folder, text, name):
    file = folder / "mine.py"
    file.write_text(text)
    return tried(loss=f"{file}:{name}", importance_sampling_level="token")


def tried(**keys):
    config = SimpleNamespace(algorithm=Algorithm(**keys), rollout=Rollout())
    return list(model_trial.own_functions(SimpleNamespace(config=config)))


def test_a_gradient_that_is_the_derivative_is_proven_and_a_detached_factor_is_a_note(tmp_path) -> None:
    for name in ("reinforce", "of_uncertain_tokens"):
        [proven] = findings(tmp_path, GOOD, name)
        assert proven.ok
        assert "is the derivative of its value" in proven.message
        assert not proven.note
    [note] = findings(tmp_path, GOOD, "vespo")
    assert note.ok
    assert note.note
    assert "detach a factor on purpose" in note.message


@pytest.mark.parametrize("message", BAD)
def test_a_wrong_loss_is_refused_in_one_sentence(message, tmp_path) -> None:
    [problem] = findings(tmp_path, f"def wrong(logps, old_logps, advantages, mask):\n    {BAD[message]}\n", "wrong")
    assert not problem.ok
    assert message in problem.message
    assert "\n" not in problem.message


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("rewards - rewards.nanmean(1, keepdim=True)", ": an advantage for each completion"),
        ("rewards.nanmean(1, keepdim=True)", "returned (3, 1) for rewards (3, 4)"),
        ("1 / (rewards - rewards[:, :1])", "infinite advantages"),
        (
            "rewards - rewards.mean(1, keepdim=True)",
            "NaN for a completion with a reward, which would count as 0",
        ),
        ("rewards * (calls.append(1) or len(calls))", "different advantages when called again"),
        (
            "centred(rewards) / (std(rewards) + 1e-4)",
            "spread; set algorithm.filter_zero_variance: true, or set",
        ),
        ("centred(rewards) / (std(rewards) + 1e-3)", "more than a tenth of a wrong answer"),
        ("rewards.argsort(1).double()", "by their spread; set algorithm.kl.placement: loss with kl.estimator: k3"),
        ("rewards @ rewards", "raised RuntimeError"),
    ],
)
def test_an_estimator_is_called_with_missing_and_with_equal_rewards(result, message, tmp_path) -> None:
    imports = "from rloo_pipeline.algorithm.nan_stats import centred, std\ncalls = []\n"
    (tmp_path / "mine.py").write_text(f"{imports}def mine(rewards):\n    return {result}\n")
    [finding] = tried(advantage=f"{tmp_path}/mine.py:mine")
    assert message in finding.message
    assert finding.ok == message.startswith(":")
    assert not finding.note


def test_functions_that_change_their_arguments_change_nothing_else(tmp_path) -> None:
    (tmp_path / "mine.py").write_text(
        "def estimator(rewards):\n    return rewards.sub_(rewards.mean())\n"
        "def loss(logps, old_logps, advantages, mask):\n"
        "    mask.zero_()\n    return logps.mul_(2) * advantages.mul_(3) * old_logps.mul_(5)\n"
    )
    values = torch.tensor([[1.0, 3.0]], dtype=torch.float64)
    mask = values.bool()
    estimator = load_estimator(Algorithm(advantage=f"{tmp_path}/mine.py:estimator"))
    assert estimator.formula(values).tolist() == [[-1.0, 1.0]]
    assert own_loss(f"{tmp_path}/mine.py:loss")(values, values, values.expand(1, 2), mask).tolist() == [[30.0, 810.0]]
    assert (values.tolist(), mask.tolist()) == ([[1.0, 3.0]], [[True, True]])


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("logps.sum()", r"returned \(\) for log-probs \(2, 3\)"),
        ("logps.detach()", "does not depend on logps"),
        ("logps.clamp(0.8, logps)", r"mine raised TypeError: .* \(mine.py, line 2\); correct it"),
    ],
)
def test_a_step_refuses_a_loss_of_another_shape_or_without_a_gradient(result, message, tmp_path) -> None:
    (tmp_path / "mine.py").write_text(f"def mine(logps, *_):\n    return {result}\n")
    values = torch.zeros(2, 3, requires_grad=True)
    with pytest.raises(UserError, match=message):
        own_loss(f"{tmp_path}/mine.py:mine")(values, values, values, values.bool())


def test_penalties_do_not_decide_where_groups_of_equal_scores_are_dropped_or_have_none(tmp_path) -> None:
    text = "def mine(rewards):\n    return nan_stats.centred(rewards) / (nan_stats.std(rewards) + 1e-4)\n"
    (tmp_path / "mine.py").write_text(f"from rloo_pipeline.algorithm import nan_stats\n{text}")
    name, length = f"{tmp_path}/mine.py:mine", {"target": 9}
    refused = [{}, {"beta": 0, "response_length": length}]
    accepted = [{"beta": 0}, {"kl": {"placement": "loss"}}, {"filter_zero_variance": True, "response_length": length}]
    assert [tried(advantage=name, **keys)[0].ok for keys in refused + accepted] == [False] * 2 + [True] * 3


def test_the_functions_on_the_page_of_ideas_do_what_it_says(tmp_path, monkeypatch) -> None:
    page = (ROOT / "docs" / "ideas.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_ideas.py").write_text(code)
    [counts] = re.findall(r"takes (\d+) rows of `easy.jsonl` and (\d+) of `hard.jsonl`", page)
    for name, count in zip(("easy", "hard"), map(int, counts), strict=True):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"from": name}) + "\n" for _ in range(count)))
    monkeypatch.chdir(tmp_path)
    keys = {"advantage": "my_ideas.py:median", "loss": "my_ideas.py:early", "importance_sampling_level": "token"}
    assert [finding.ok for finding in tried(**keys)] == [True, True]
    rows = import_string.load("my_ideas.py:two_sources")(rounds=3, prompts=10)
    hard = [row["from"] == "hard" for row in rows]
    assert [sum(hard[start : start + 10]) for start in (0, 10, 20)] == [0, 5, 10]
    [keys_of_data] = re.findall(r"```yaml\n(dataset:.*?)```", page, re.DOTALL)
    written = yaml.safe_load(keys_of_data)["dataset"]
    rows = read_rows(Dataset(**written, eval={"path": "eval.jsonl"}).train, "")
    assert [sum(row["from"] == name for row in rows) for name in ("easy", "hard")] == list(map(int, counts))
    (tmp_path / "hard.jsonl").write_text(json.dumps({"from": "hard"}) + "\n")
    with pytest.raises(UserError, match=r"raised StopIteration \(my_ideas.py, line \d+\)$"):
        read_rows(Dataset(**written, eval={"path": "eval.jsonl"}).train, "")


def test_the_bonus_on_the_page_of_ideas_has_the_gradient_of_the_entropy() -> None:
    """Means over the policy's own samples, computed exactly over all tokens."""
    logits = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    logps = logits.log_softmax(0)

    def mean_gradient(term: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((logps.detach().exp() * term).sum(), logits, retain_graph=True)[0]

    [of_entropy] = torch.autograd.grad(-(logps.exp() * logps).sum(), logits, retain_graph=True)
    torch.testing.assert_close(mean_gradient(logps.detach() * logps), -of_entropy)
    torch.testing.assert_close(mean_gradient(logps * logps), -2 * of_entropy)
    torch.testing.assert_close(mean_gradient(logps), torch.zeros_like(of_entropy))
