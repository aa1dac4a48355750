"""Policy 0 without SFT is the base model; checks that find nothing to learn stop the run."""

import contextlib
import json

import forks
import model_folders
import pytest
import yaml
from helpers import Round, done, mini, rloo, staged

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.demo.character_model import tiny_qwen3, write_qwen3
from rloo_pipeline.demo.text_model import bpe_tokenizer
from rloo_pipeline.transformers_internals.tokenizer_file import as_in_other_programs

pytestmark = pytest.mark.slow
SIZES = {"hidden_size": 64, "layers": 2, "heads": 2, "key_value_heads": 1, "head_dim": 32, "intermediate_size": 128}


def test_without_demonstrations_policy_0_is_the_model_with_a_tokenizer_that_has_its_ids_in_other_programs(
    tmp_path,
) -> None:
    model = tmp_path / "model"
    write_qwen3(model, 0, bpe_tokenizer(["a b"], 300, 256), **SIZES)
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "LlamaTokenizerFast"}))
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    run = Round(tmp_path / "run", model)
    (run.run / "config.yaml").write_text(yaml.safe_dump(mini() | {"warmstart": {}}))
    staged(run.run / "assets", model)
    arguments = ("--assets", run.run / "assets", "--prompts", run.run / "none", "--output", run.policy(0))
    done("warmstart", *arguments)
    assert {file.name: file.read_bytes() for file in model.iterdir()} == before
    changed = {name for name, content in before.items() if (run.policy(0) / name).read_bytes() != content}
    assert changed == {file.name}
    ids = Policy(model).tokenizer("a b")["input_ids"]
    with as_in_other_programs():
        theirs = [Policy(folder).tokenizer("a b")["input_ids"] == ids for folder in (model, run.policy(0))]
    assert theirs == [False, True]


def test_a_model_that_is_rounded_to_4_bits_has_a_manifest_too(tmp_path) -> None:
    tiny_qwen3(tmp_path / "model", 0, **SIZES)
    run = Round(tmp_path / "run", tmp_path / "model")
    changes = mini(model={"quantization": "nf4"}, update={"lora": {}})
    (run.run / "config.yaml").write_text(yaml.safe_dump(changes | {"warmstart": {}}))
    staged(run.run / "assets", tmp_path / "model")
    arguments = ("--assets", run.run / "assets", "--prompts", run.run / "none", "--output", run.policy(0))
    done("warmstart", *arguments)
    assert Policy(run.policy(0)).digest != Policy(tmp_path / "model").digest


def prepared(run: Round) -> Round:
    for stage in (("stage-assets",), ("prompts", "--assets", run.run / "assets")):
        output = run.run / ("assets" if stage[0] == "stage-assets" else "prompts")
        assert rloo(*stage, "--output", output).returncode == 0
    return run


def checked(run: Round, folder_of_policy: object, *more_arguments: object):
    """Probes a policy and checks it."""
    folder = run.run / "warmstart"
    arguments = ("--prompts", run.run / "prompts", "--policy", folder_of_policy)
    if not (folder / "probe.parquet").exists():
        done("probe", *arguments, "--output", folder / "probe.parquet")
    return rloo(*words_of_checks(run, folder_of_policy), *more_arguments, f"--log={run.run / 'logs' / 'checks.log'}")


def words_of_checks(run: Round, folder_of_policy: object) -> list[str]:
    folder = run.run / "warmstart"
    inputs = {"assets": run.run / "assets", "prompts": run.run / "prompts", "policy": folder_of_policy}
    files = inputs | {"probe": folder / "probe.parquet", "output": folder / "checks.json"}
    return ["checks", *(str(word) for name, file in files.items() for word in (f"--{name}", file))]


def discarded(words: list[str]) -> list[bool]:
    """Runs a stage in this process; for each model that it loads for log-probs, whether it discards it."""
    from rloo_pipeline.cli.main import main
    from rloo_pipeline.training import forward_only
    from rloo_pipeline.training.logprobs import TokenLogProbs

    load, loaded, gone = forward_only.load_configured, list[TokenLogProbs](), list[TokenLogProbs]()
    forward_only.load_configured = lambda *arguments: loaded.append(load(*arguments)) or loaded[-1]
    TokenLogProbs.discard = lambda logprobs: gone.append(logprobs)
    with contextlib.suppress(SystemExit):
        main(words)
    return [any(one is other for other in gone) for one in loaded]


ANSWER_ALONE = [{"function": "rloo_pipeline.rewards.answer:exact_answer_reward", "name": "answer"}]


def test_a_policy_that_rloo_could_not_teach_stops_the_run_with_the_reason(tmp_path, tiny_model) -> None:
    """An untrained model never answers correctly, so all rewards are 0. A key accepts this, but it stays visible."""
    changes = {"rewards": ANSWER_ALONE}
    run = prepared(Round(tmp_path / "run", tiny_model, **changes))
    output = run.run / "warmstart" / "checks.json"
    outcome = checked(run, tiny_model)
    assert outcome.returncode == 1
    assert "all 64 scored completions of all probe prompts got the same reward (0)" in outcome.stderr
    assert "checks.accept: [teaching]" in outcome.stderr
    assert "logprob_difference" in outcome.stderr, "the table is on the terminal"
    assert "Traceback" not in outcome.stderr
    assert forks.call(discarded, words_of_checks(run, tiny_model)) == [True], "else a worker would keep it on the GPU"
    assert not output.exists()
    failed = json.loads(output.with_suffix(".failed.json").read_text())
    assert [check["name"] for check in failed["checks"] if check["verdict"] == "fail"] == ["teaching"]
    by_name = {check["name"]: check for check in failed["checks"]}
    assert by_name["logprob_difference"]["value"] < 1e-4
    assert by_name["perplexity"]["value"] > 10, "an untrained model"
    page = (run.run / "report.html").read_text()
    assert "The run stopped before the first update: policy 0 did not pass teaching." in page
    assert page.count('class="card case group"') == 5
    assert "policy 0 did not pass its checks" in done("diagnose", run.run).stdout
    (run.run / "config.yaml").write_text(yaml.safe_dump(mini(**changes, checks={"accept": ["teaching"]})))
    assert checked(run, tiny_model).returncode == 0
    [accepted] = [check for check in json.loads(output.read_text())["checks"] if check["accepted"]]
    assert (accepted["name"], accepted["verdict"]) == ("teaching", "fail")
    assert not output.with_suffix(".failed.json").exists()
    assert "no round is done yet" in done("diagnose", run.run).stdout, "the checks of an earlier call do not count"


@pytest.mark.parametrize(
    ("kind", "update", "expected"),
    [
        (
            "untied",
            {"lora": {"target_modules": ["q_proj", "v_poj"]}},
            "update.lora.target_modules: the model has no layer 'v_poj'; did you mean 'v_proj'?",
        ),
        ("qwen3_moe", {"torch_compile": True}, "cannot train with it (it is a mixture of experts); remove the key"),
    ],
    ids=["a misspelt layer", "experts"],
)
def test_layers_that_cannot_train_are_refused_before_anything_is_trained_or_sampled(
    tmp_path, kind, update, expected
) -> None:
    model = model_folders.build(tmp_path / "model", 0, kind)
    run = Round(tmp_path / "run", model, update=update)
    staged(run.run / "assets", model)
    arguments = ("--assets", run.run / "assets", "--prompts", run.run / "none", "--output", run.policy(0))
    outcome = rloo("warmstart", *arguments)
    assert outcome.returncode == 1
    assert expected in outcome.stderr
    assert not run.policy(0).exists()
