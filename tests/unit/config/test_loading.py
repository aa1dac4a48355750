"""The error for a wrong configuration is one sentence with the file, the line or key, and a suggestion."""

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from helpers import MINI, mini
from pydantic import ValidationError

from rloo_pipeline.config import Config
from rloo_pipeline.config.loading import (
    ConfigArguments,
    load,
    load_rewards,
    refuse_bad_files,
    reward_from_arguments,
    sealed,
    validate,
)
from rloo_pipeline.config.section import Section, section_in
from rloo_pipeline.errors import UserError

TEXT = MINI.read_text()


def message_of(folder: Path, text: str) -> str:
    file = folder / "my-run.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        load(file)
    message = str(error.value)
    assert message.startswith(str(file))
    assert "\n" not in message
    return message.removeprefix(str(file))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rewards:", "reward:", ": unknown key 'reward'; did you mean 'rewards'?"),
        ("update: {", "update: {lr: 1, ", ": unknown key 'update.lr'; the learning rate is update.learning_rate"),
        ("update: {", "update: {optim:1, ", ": unknown key 'update.optim:1'; YAML needs a space after the colon"),
        ("{beta: 0.05", "{loss_type: dapo", "unknown key 'algorithm.loss_type'; algorithm.preset names an algorithm"),
        ("seed: 1", "learning_rate: 1", ": unknown key 'learning_rate'; did you mean 'reward_model.learning_rate' or"),
        ("max_prompt_length", "max_promt_length", "did you mean 'max_prompt_length'?"),
        ("beta:", "kl_coef:", "the KL coefficient is algorithm.beta"),
        (
            "{beta: 0.05",
            "{beta: 0.05, loss: mine",
            ": algorithm.loss: 'mine' names nothing in a file; write `module:name`",
        ),
        ("rollout: {", "rollout: {environment: mine, ", ": rollout.environment: 'mine' names nothing in a file; write"),
        ("rollout: {", "rollout: {environment: {a: mine}, ", ": rollout.environment: 'mine' names nothing in a file"),
        ("{beta: 0.05", "{clip_ratio: 0.05", "the clip range is algorithm.epsilon"),
        ("{beta: 0.05", "{entropy_coef: 0.05", "docs/ideas.md shows how to add one to your own loss"),
        ("{num_generations: 2", "{max_response_length: 2", "did you mean 'max_completion_length'?"),
        (
            "max_prompt_length",
            "max_completion_length",
            "did you mean 'rollout.max_completion_length' or 'evaluation.max_completion_length'?",
        ),
        ("name: answer}", "name: answer, on_timeout: no}", ": rewards.0.on_timeout: Input should be 'none' or 'fail'"),
        ("name: answer}", "nmae: answer}", ": unknown key 'rewards.0.nmae'; did you mean 'name'?"),
        ("A run through every stage", "{x}", ", got {'x': None}; quote a string that begins with a brace"),
        ("rounds: 2", "rounds: two", ": rounds: Input should be a valid integer"),
        ("rounds: 2", "rounds: yes", ": rounds: must be a number, and YAML reads yes, no, on and off as booleans, got"),
        ("rounds: 2", "rounds: 1000000000", ": rounds: Input should be less than or equal to 99999"),
        ("rollout: {", "rollout: {oversample: 1.0e+300, ", ": rollout.oversample: Input should be less than or equal"),
        ("algorithm: {", "algorithm: {epsilon: 1.0e+39, ", ": algorithm.epsilon: must be from -3.4e+38 to 3.4e+38"),
        (
            "algorithm: {",
            "algorithm: {reward_clip_range: [0, 1.0e+39], ",
            ": algorithm.reward_clip_range: must be from",
        ),
        ("update: {", "update: {warmup_steps: 9223372036854775808, ", ": update.warmup_steps: must be from -9.2"),
        ("shards: 2", "shards: 1001", ": rollout.shards: Input should be less than or equal to 1000"),
        ("weight: 0.1", "weight: .nan", "weight: Input should be a finite number"),
        ("learning_rate: 0.0003", "learning_rate: .inf", ": update.learning_rate: Input should be a finite number"),
        ("checks: {probe_prompts: 16}", "checks:", ": checks: the section is empty; give it a key, or leave it out"),
        ("vllm: {threads: 1}", "vllm: 1", ": vllm: must be a section with keys of its own (gpu_memory_utilization"),
        ("update: {", "update: {lora: {target_modules: 3}, ", ": update.lora.target_modules: Input should be a valid"),
        ("update: {", "update: {lora: {r: 513}, ", ": update.lora.r: Input should be less than or equal to 512"),
        ("seed: 1", "seed: 1\nseed: 2", ": key 'seed' occurs twice, in lines 4 and 5; remove one"),
        ("{beta: 0.05", "{beta: 0, beta: 0.05", ": key 'beta' occurs twice, in lines 29 and 29"),
        ("seed: 1", "seed 1", ", line 5: not valid YAML: could not find expected ':'"),
        (
            "  dtype: float32",
            "\tdtype: float32",
            ", line 9: not valid YAML: found character that cannot start any token",
        ),
        ("report: {", "report: [", ", line 32: not valid YAML"),
        ("build: rloo_pipeline.demo.character_model:tiny_qwen3", "name_or_path: 'm{b}'", ": model: m{b}: Snakemake"),
        ("seed: 1", "seed: 1\ndata_dir: 'd{x}'", ": data_dir: d{x}: Snakemake would take"),
        ("size: 50}}", "size: 50}}\n  dev: {path: 'd{x}.jsonl'}", ": dataset.dev: d{x}.jsonl: Snakemake would"),
        ("run: mini", "run: 2026-02-30", ": not valid YAML: day is out of range for month; put text"),
    ],
)
def test_errors_name_the_place_and_suggest_a_key(old, new, message, tmp_path) -> None:
    assert old in TEXT
    assert message in message_of(tmp_path, TEXT.replace(old, new, 1))


WITHOUT_EFFECT = {
    "algorithm={kl: {gain: 0.2}}": "algorithm.kl: gain has no effect without target; set that, or leave gain out",
    "algorithm={response_length: {overlong_penalty: 2}}": "overlong_penalty has no effect without overlong_cache",
    "algorithm={response_length: {target_penalty: 2}}": "target_penalty has no effect without target",
    "algorithm={clip: none, epsilon: 0.1}": "epsilon has no effect with clip: none; use clip: ppo, or",
    "algorithm={keep_truncated_in_baseline: true}": "keep_truncated_in_baseline has no effect without mask_truncated",
    "algorithm={preset: sapo, epsilon_high: 0.3}": "epsilon_high has no effect with clip: sapo",
    "algorithm={preset: cispo, epsilon: 0.3}": "epsilon has no effect with clip: cispo",
    "algorithm={preset: dr_grpo, loss: 'a.py:f', delta: 2}": "delta has no effect with your own loss",
    "model={revision: main}": "model: revision has no effect without name_or_path",
    "dataset={train: {split: test}}": "dataset.train: split has no effect without name",
    "dataset={select: {weights: online, num_generations: 4}}": "num_generations has no effect with weights: online",
    "warmstart={sft: {lr_scheduler_type: constant, min_lr_ratio: 0.2}}": "min_lr_ratio has no effect with a const",
    "warmstart={sft: {optimizer: adafactor, adam_betas: [0.9, 0.9]}}": "adam_betas has no effect with optimizer",
    "update={optimizer: adafactor, adam_epsilon: 1e-6}": "adam_epsilon has no effect with optimizer: adafactor",
    "rollout={tool_parser: hermes}": "rollout: tool_parser has no effect without tools; set tools or environment",
    "rollout={tools: [a.py:f], environment_memory_mb: 512}": "memory_mb has no effect without environment_sandbox",
    "rewards=[{function: 'a.py:answer', gpus: 1}]; evaluation={each_round: 4}": "each_round has no effect, since the",
    "warmstart={sft: null}; checks={demonstrations: 8}": "demonstrations has no effect without warmstart.sft; set",
    "evaluation={temperature: 0}": "num_generations has no effect at temperature 0",
    "evaluation={each_round: 50, num_prompts: 20}": "each_round (50) exceeds num_prompts (20)",
}


@pytest.mark.parametrize(("change", "message"), WITHOUT_EFFECT.items())
def test_a_key_that_nothing_would_read_is_refused_but_not_in_a_finished_run(change, message, tmp_path) -> None:
    changes = ["correct={reward: answer}", *change.split("; ")]
    with pytest.raises(UserError, match=re.escape(message)):
        load(MINI, changes)
    file = tmp_path / "config.yaml"
    file.write_text(sealed(TEXT))
    load(file, changes)


def test_a_run_of_a_version_with_another_key_is_not_taken_for_a_mistake_of_the_user(tmp_path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(sealed(TEXT.replace("seed: 1", "seed: 1\nlearning_rate: 1")))
    with pytest.raises(UserError) as error:
        load(file)
    assert str(error.value) == (
        f"{file}: this version of the package cannot read it (unknown key 'learning_rate'), but the one that wrote it "
        "can: the run's tables name its commit in their footers (package_version)"
    )
    file.write_text(sealed(TEXT))
    with pytest.raises(UserError, match="unknown key 'temperatur'"):
        load(file, ["temperatur=1"])


def test_a_preset_may_set_what_another_clip_does_not_read() -> None:
    for clip in ("none", "cispo"):
        assert load(MINI, [f"algorithm={{preset: gspo, clip: {clip}}}"]).algorithm.epsilon == 3e-4


def test_a_date_is_one_also_beside_a_library_that_makes_pyyaml_read_texts(tmp_path) -> None:
    code = (
        "import sys; from rloo_pipeline.config.loading import read_mapping; from pathlib import Path\n"
        "import lmformatenforcer.external.jsonschemaobjectutil\n"
        "print(type(read_mapping(Path(sys.argv[1]))['run']).__name__)"
    )
    (tmp_path / "config.yaml").write_text("run: 2026-02-28")
    outcome = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "config.yaml"], capture_output=True, text=True, check=True
    )
    assert outcome.stdout == "date\n"


def test_a_seed_has_any_size() -> None:
    assert Config(**mini(seed=2**70)).seed == 2**70


def test_no_number_is_a_boolean() -> None:
    """pydantic would take true as 1."""

    def number_keys(section: type[Section], prefix: str = "") -> Iterator[tuple[type[Section], str, str]]:
        for name, field in section.model_fields.items():
            if inner := section_in(field.annotation):
                yield from number_keys(inner, f"{prefix}{name}.")
            elif re.search(r"\b(int|float)\b|Literal\[0", str(field.annotation)):
                yield section, name, prefix + name

    keys = [*number_keys(Config)]
    assert len(keys) > 150
    for (section, name, key), value in itertools.product(keys, (True, False, [True], [0, False], [True, 1])):
        with pytest.raises(ValidationError) as caught:
            section.model_validate({name: value})
        assert name in {error["loc"][0] for error in caught.value.errors() if error["loc"]}, key
    assert Config.model_validate(mini(deepspeed={"gradient_checkpointing": True}))


def test_a_wrong_key_is_explained_by_the_keys_of_what_was_read(tmp_path) -> None:
    """A file of rewards and the options of `rloo reward-test` are no configuration of a run."""
    with pytest.raises(UserError, match=r"^command line: timeout: Input should be greater than 0, got -1.0$"):
        reward_from_arguments("mine.py:f", "{}", -1.0, "rows")
    file = tmp_path / "rewards.yaml"
    file.write_text("model: {}\nrewards: [{function: 'mine.py:f'}]\n")
    with pytest.raises(UserError, match=r"rewards\.yaml: unknown key 'model'; known keys here: rewards$"):
        load_rewards(file, validate(mini(), "test"))
    file.write_text("model: {}\nrun: a\nrewards: [{function: 'mine.py:f'}]\n")
    with pytest.raises(UserError, match=r"unknown key 'model' \(also wrong: run\); known keys here: rewards$"):
        load_rewards(file, validate(mini(), "test"))
    file.write_text("{a: 1, b: 1, c: 1, d: 1, e: 1, f: 1, g: 1, h: 1, rewards: [{function: 'mine.py:f'}]}\n")
    with pytest.raises(UserError, match=r"unknown key 'a' \(also wrong: b, c, d, e, f and 2 more\); known"):
        load_rewards(file, validate(mini(), "test"))
    file.write_text("- {function: 'mine.py:f'}\n")
    with pytest.raises(UserError, match=r"rewards\.yaml: must be a mapping with a list `rewards`$"):
        load_rewards(file, validate(mini(), "test"))


def test_a_missing_or_unreadable_file_gives_a_one_line_error(tmp_path) -> None:
    (tmp_path / "my-run.yaml").write_bytes(b"run: x\nseed: \xff\n")
    (tmp_path / "failing.yaml").symlink_to("/proc/self/mem")  # reading it fails with EIO
    for name, message in (
        ("my_run.yaml", "no such configuration file; did you mean 'my-run.yaml'?"),
        ("my-run.yaml", "line 2: not UTF-8"),
        ("", "cannot be read as a configuration"),
        ("failing.yaml", "failing.yaml: the file system failed (Input/output error); run again"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            load(tmp_path / name)
    (tmp_path / "my-run.yaml").write_text("")
    with pytest.raises(UserError, match="must be a mapping"):
        load(tmp_path / "my-run.yaml")


def test_duplicate_keys_are_found_in_files_that_snakemake_reads(tmp_path) -> None:
    file = tmp_path / "over.yaml"
    file.write_text("base: &base {seed: 1}\nother: {<<: *base, seed: 2}\n")
    refuse_bad_files([file])
    file.write_text("rollout:\n  shards: 1\n  temperature: 1\n  shards: 2\n")
    with pytest.raises(UserError, match=r"over\.yaml: key 'shards' occurs twice, in lines 2 and 4"):
        refuse_bad_files([file])
    file = tmp_path / "over.json"
    file.write_text('{"rollout": {"shards": 1, "temperature": 1, "shards": 2}}')
    with pytest.raises(UserError, match=r"over\.json: key 'shards' occurs twice; remove one"):
        refuse_bad_files([file])


def test_a_configuration_in_json_is_read_as_snakemake_reads_it(tmp_path) -> None:
    config = mini(
        dataset={"system_prompt": "\U0001f600"}, evaluation={"harness": {"tasks": ["x"], "gen_kwargs": {"t": 1e-6}}}
    )
    file = tmp_path / "run.json"
    file.write_text(json.dumps(config))
    assert load(file) == validate(config, "test")


def test_changes_are_merged_as_snakemake_does() -> None:
    arguments = ConfigArguments(MINI, ["rounds=5", "rollout={shards: 4}", "data_dir=my data"])
    assert arguments.config == validate(mini(rounds=5, rollout={"shards": 4}, data_dir="my data"), "test")
    assert arguments.run_command == f"rloo run {MINI} --config rounds=5 'rollout={{shards: 4}}' 'data_dir=my data'"
    assert ConfigArguments(Path("config/config.yaml")).run_command == "rloo run"
    assert ConfigArguments(MINI).config == validate(yaml.safe_load(TEXT), "test")
    with pytest.raises(UserError, match="--config rounds: write it as KEY=VALUE"):
        load(MINI, ["rounds"])


@pytest.mark.parametrize(
    ("name", "proposed"),
    [
        *[("my run", "my-run"), ("Größe 1", "Groesse-1"), ("été", "ete"), ("-x", "x"), ("a/b", "a-b")],
        *[("日本", "my-run"), ("r" * 246, "r" * 245)],
    ],
)
def test_a_run_name_that_is_refused_comes_with_a_valid_one(name, proposed) -> None:
    with pytest.raises(UserError, match=f"'{name}' cannot be the name of a run, .* such as '{proposed}'$"):
        validate(mini(run=name), "test")
    assert validate(mini(run=proposed), "test").run == proposed


def test_a_damaged_configuration_of_a_run_is_refused(tmp_path) -> None:
    """Every byte counts, so that no stage runs with another number."""
    file = tmp_path / "config.yaml"
    whole = sealed(TEXT)
    file.write_text(whole)
    assert load(file) == load(MINI)
    place = whole.index("rounds: 2") + len("rounds: ")
    first = whole.index("\n") + 1
    for damaged in (whole[:place] + "6" + whole[place + 1 :], whole[: len(whole) // 2], whole[:first], whole + "\n"):
        file.write_text(damaged)
        with pytest.raises(UserError, match=r"config.yaml was changed .*; delete it and run again"):
            load(file)
    file.write_text("")
    with pytest.raises(UserError, match="must be a mapping"):
        load(file)
    file.write_text(whole[first:].replace("rounds: 2", "rounds: 6"))
    assert load(file).rounds == 6, "without the line it is the user's own file"
