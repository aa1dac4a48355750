"""Policy 0 without SFT is the model as it is; checks that find nothing to learn stop the run."""

import json

import pytest
import yaml
from helpers import Round, mini, rloo

pytestmark = pytest.mark.slow


def test_without_demonstrations_the_model_is_taken_as_it_is(tmp_path, tiny_model) -> None:
    run = Round(tmp_path / "run", tiny_model)
    (run.run / "config.yaml").write_text(yaml.safe_dump(mini() | {"warmstart": {}}))
    (run.run / "assets").mkdir()
    (run.run / "assets" / "assets.json").write_text(json.dumps({"model": {"path": str(tiny_model)}}))
    words = ("--assets", run.run / "assets", "--prompts", run.run / "none", "--output", run.policy(0))
    outcome = rloo("warmstart", *words)
    assert outcome.returncode == 0, outcome.stderr
    for file in tiny_model.iterdir():
        assert (run.policy(0) / file.name).read_bytes() == file.read_bytes()


def test_a_policy_that_rloo_could_not_teach_stops_the_run_with_the_reason(tmp_path, tiny_model) -> None:
    """An untrained model never gives a right answer: all rewards are 0."""
    rewards = [{"function": "rloo_pipeline.rewards.answer:exact_answer_reward", "name": "answer"}]
    run = Round(tmp_path / "run", tiny_model, rewards=rewards, evaluation={"breakdown": []})
    for words in (("stage-assets",), ("prompts", "--assets", run.run / "assets")):
        output = run.run / ("assets" if words[0] == "stage-assets" else "prompts")
        assert rloo(*words, "--output", output).returncode == 0
    output = run.run / "warmstart" / "checks.json"
    words = ("--prompts", run.run / "prompts", "--policy", tiny_model, "--output", output)
    outcome = rloo("checks", *words, f"--log={run.run / 'logs' / 'checks.log'}")
    assert outcome.returncode == 1
    assert "all 64 scored completions of all probe prompts got the same reward (0)" in outcome.stderr
    assert "warmstart.sft" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert not output.exists()
    failed = json.loads(output.with_suffix(".failed.json").read_text())
    assert [check["name"] for check in failed["checks"] if check["verdict"] == "fail"] == [
        "groups without reward variance"
    ]
