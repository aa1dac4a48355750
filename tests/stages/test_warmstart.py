"""Policy 0 without SFT is the base model; checks that find nothing to learn stop the run."""

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


def prepared(run: Round) -> Round:
    for words in (("stage-assets",), ("prompts", "--assets", run.run / "assets")):
        output = run.run / ("assets" if words[0] == "stage-assets" else "prompts")
        assert rloo(*words, "--output", output).returncode == 0
    return run


def checked(run: Round, policy: object, *words: object):
    """Probes a policy and checks it."""
    folder = run.run / "warmstart"
    known = ("--prompts", run.run / "prompts", "--policy", policy)
    if not (folder / "probe.parquet").exists():
        outcome = rloo("probe", *known, "--output", folder / "probe.parquet")
        assert outcome.returncode == 0, outcome.stderr
    outputs = ("--probe", folder / "probe.parquet", "--output", folder / "checks.json")
    log = f"--log={run.run / 'logs' / 'checks.log'}"
    return rloo("checks", "--assets", run.run / "assets", *known, *outputs, *words, log)


ANSWER_ALONE = [{"function": "rloo_pipeline.rewards.answer:exact_answer_reward", "name": "answer"}]


def test_a_policy_that_rloo_could_not_teach_stops_the_run_with_the_reason(tmp_path, tiny_model) -> None:
    """An untrained model never answers correctly, so all rewards are 0. A key accepts this, but it stays visible."""
    changes = {"rewards": ANSWER_ALONE, "evaluation": {"breakdown": []}}
    run = prepared(Round(tmp_path / "run", tiny_model, **changes))
    output = run.run / "warmstart" / "checks.json"
    outcome = checked(run, tiny_model)
    assert outcome.returncode == 1
    assert "all 64 scored completions of all probe prompts got the same reward (0)" in outcome.stderr
    assert "checks.accept: [teaching]" in outcome.stderr
    assert "logprob_difference" in outcome.stderr, "the table is on the terminal"
    assert "Traceback" not in outcome.stderr
    assert not output.exists()
    failed = json.loads(output.with_suffix(".failed.json").read_text())
    assert [check["name"] for check in failed["checks"] if check["verdict"] == "fail"] == ["teaching"]
    by_name = {check["name"]: check for check in failed["checks"]}
    assert by_name["logprob_difference"]["value"] < 1e-4
    assert by_name["perplexity"]["value"] > 10, "an untrained model"
    (run.run / "config.yaml").write_text(yaml.safe_dump(mini(**changes, checks={"accept": ["teaching"]})))
    assert checked(run, tiny_model).returncode == 0
    [accepted] = [check for check in json.loads(output.read_text())["checks"] if check["accepted"]]
    assert (accepted["name"], accepted["verdict"]) == ("teaching", "fail")


def test_auto_trains_only_where_the_trial_asks_for_it(tmp_path, tiny_model) -> None:
    run = prepared(Round(tmp_path / "run", tiny_model, warmstart={"train": "auto", "sft": {"steps": 2}}))
    assert checked(run, run.run / "assets", "--trial").returncode == 0
    trial = run.run / "warmstart" / "checks.json"
    asking = json.loads(trial.read_text())["asks_for_sft"]
    assert "pass_at_k" in asking
    model = (run.run / "assets" / "model" / "model.safetensors").read_bytes()
    words = ("warmstart", "--assets", run.run / "assets", "--prompts", run.run / "prompts", "--trial", trial)
    for name, asked in (("trained", asking), ("taken", [])):
        trial.write_text(json.dumps({"asks_for_sft": asked}))
        outcome = rloo(*words, "--output", run.run / name)
        assert outcome.returncode == 0, outcome.stderr
        assert ((run.run / name / "model.safetensors").read_bytes() == model) == (name == "taken")
