"""Bad input gives exit code 1, one line that names the file or key, no traceback and no incomplete file."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import forks
import pytest
import yaml
from helpers import Project, Round, merged, mini, rloo, staged, write_prompts

ROWS = [{"question": f"What is {n}+{n}?", "answer": str(2 * n)} for n in range(1, 9)]


class Case:
    """A run's folder with a dataset of 8 rows and the tiny model, ready for stage-assets and prompts."""

    def __init__(self, folder: Path, source: Path, /, **changes) -> None:
        self.folder, self.run = folder, folder / "run"
        self.model = folder / "model"
        shutil.copytree(source, self.model)
        self.write_rows("train.jsonl", ROWS[:6])
        self.write_rows("test.jsonl", ROWS[6:])
        base = mini()
        del base["warmstart"]
        base |= {"model": {"name_or_path": str(self.model), "dtype": "float32"}, "data_dir": str(folder)}
        base["dataset"] = {
            "train": {"path": "train.jsonl"},
            "eval": {"path": "test.jsonl"},
            "user_prompt": "{question}",
        }
        base["rewards"] = [{"function": "rloo_pipeline.rewards.answer:exact_answer_reward", "name": "answer"}]
        base["evaluation"] = {}
        self.run.mkdir()
        self.configure(merged(base, changes))

    def configure(self, config: dict) -> None:
        (self.run / "config.yaml").write_text(yaml.safe_dump(config))

    def write_rows(self, name: str, rows: list[dict]) -> None:
        (self.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def edit(self, name: str, **changes) -> None:
        """Changes keys of one of the model's JSON files; None removes a key."""
        path = self.model / name
        content = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    def prepare(self) -> str:
        """Runs stage-assets and prompts; returns the outcome of the last one."""
        for stage in (("stage-assets",), ("prompts", "--assets", self.run / "assets")):
            output = self.run / ("assets" if stage[0] == "stage-assets" else "prompts")
            outcome = rloo(*stage, "--output", output, f"--log={self.run / 'logs' / stage[0]}.log")
            if outcome.returncode:
                assert outcome.returncode == 1
                assert not output.exists()
                return outcome.stderr
        return ""


def one_line(stderr: str, *fragments: str) -> None:
    """Checks that the last line is an error with these words, and that there is no traceback."""
    lines = [line for line in stderr.splitlines() if line.startswith("rloo ")]
    assert len(lines) == 1, stderr
    assert "Traceback" not in stderr
    for fragment in fragments:
        assert fragment in lines[0], stderr


CONFIGS = {
    "misspelt key": ({"update": {"learning_rat": 1}}, ["update.learning_rat", "did you mean 'learning_rate'"]),
    "key of another section": (
        {"update": {"nodes": 2}},
        ["update.nodes", "did you mean 'deepspeed.nodes'"],
    ),
    "braces that are meant": (
        {"dataset": {"user_prompt": "{prompt} \\boxed{}"}},
        ["dataset.user_prompt", "twice: {{}}"],
    ),
    "half a brace": ({"dataset": {"user_prompt": "{prompt} {"}}, ["dataset.user_prompt", "twice"]),
    "key of other systems": ({"update": {"gpus_per_node": 8}}, ["update.gpus_per_node", "deepspeed.processes is"]),
    "unknown section": ({"rewardz": []}, ["rewardz", "did you mean 'rewards'"]),
    "one generation": ({"rollout": {"num_generations": 1}}, ["rollout.num_generations", "2"]),
    "K does not divide": ({"rollout": {"num_generations": 3}}, ["generation_batch_size (64)", "num_generations (3)"]),
    "no such reward": ({"correct": {"reward": "acc"}}, ["correct.reward", "'acc'", "answer"]),
    "top_p with sampler": (
        {"rollout": {"top_p": 0.9}, "algorithm": {"old_logps": "sampler"}},
        ["old_logps", "top_p"],
    ),
    "steps do not divide": ({"algorithm": {"steps_per_generation": 5}}, ["steps_per_generation (5)", "16 prompts"]),
    "two sources": ({"dataset": {"train": {"path": "a", "name": "b"}}}, ["dataset.train", "exactly one"]),
    "missing data file": ({"dataset": {"train": {"path": "none.jsonl"}}}, ["none.jsonl", "data_dir"]),
    "missing column": ({"dataset": {"user_prompt": "{qestion}"}}, ["qestion", "question"]),
    "missing prompt column": ({"dataset": {"user_prompt": None}}, ["prompt_column", "question"]),
    "all prompts too long": ({"dataset": {"max_prompt_length": 2}}, ["max_prompt_length", "too long"]),
    "unknown model": ({"model": {"name_or_path": "no/such-model"}}, ["no/such-model", "local folder"]),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_bad_configuration_gives_a_one_line_error(name, tmp_path, tiny_model) -> None:
    changes, fragments = CONFIGS[name]
    case = Case(tmp_path, tiny_model, **changes)
    one_line(case.prepare(), *fragments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"max_completion_length": 5000}}, "the model's context is 256 tokens"),
        ({"dataset": {"user_prompt": "{qestion}"}}, "train.jsonl: no column 'qestion'"),
    ],
)
def test_a_dry_run_of_snakemake_says_what_files_tell(changes, message, tmp_path, tiny_model) -> None:
    case, project = Case(tmp_path, tiny_model, **changes), Project(tmp_path / "project")
    arguments = ["--dry-run", "--configfile", str(case.run / "config.yaml")]
    outcome = forks.run("snakemake", arguments, project.environment, project.folder)
    assert outcome.returncode == 1
    output = outcome.stdout + outcome.stderr
    assert message in output
    assert "Traceback" not in output


def test_a_misspelt_estimator_gives_a_one_line_error_before_anything_runs() -> None:
    from rloo_pipeline.config.loading import validate
    from rloo_pipeline.errors import UserError

    with pytest.raises(UserError, match="no estimator 'rlo'; did you mean 'rloo'"):
        validate(mini(algorithm={"advantage": "rlo"}), "test")


def test_an_empty_dataset_gives_a_one_line_error(tmp_path, tiny_model) -> None:
    case = Case(tmp_path, tiny_model)
    case.write_rows("train.jsonl", [])
    one_line(case.prepare(), "train.jsonl", "empty")


def test_a_dataset_that_is_not_json_gives_a_one_line_error(tmp_path, tiny_model) -> None:
    case = Case(tmp_path, tiny_model)
    (tmp_path / "train.jsonl").write_text('{"question": "a", \n')
    one_line(case.prepare(), "train.jsonl")


def test_a_tokenizer_without_an_end_token_gives_a_one_line_error(tmp_path, tiny_model) -> None:
    case = Case(tmp_path, tiny_model)
    case.edit("tokenizer_config.json", eos_token=None)
    one_line(case.prepare(), "EOS", "eos_token", "tokenizer_config.json")


def test_a_second_bos_token_gives_a_one_line_error(tmp_path, tiny_model) -> None:
    case = Case(tmp_path, tiny_model)
    case.edit("tokenizer_config.json", bos_token="<|im_start|>")
    template = "{{ bos_token }}{{ bos_token }}{{ messages[0]['content'] }}"
    (case.model / "chat_template.jinja").write_text(template)
    case.edit("tokenizer_config.json", chat_template=None)
    one_line(case.prepare(), "two BOS", "<|im_start|>")


def sampled(case: Case, policy: Path) -> str:
    """Prepares and runs a rollout from a policy; returns its outcome."""
    assert case.prepare() == ""
    output = case.run / "rounds" / "00001" / "rollouts" / "000.parquet"
    outcome = rloo(
        *("rollout", "--prompts", case.run / "prompts", "--policy", policy, "--round", 1, "--shard", 0),
        *("--output", output, f"--log={case.run / 'logs' / 'rollout.log'}"),
    )
    assert outcome.returncode == 1
    assert not output.exists()
    return outcome.stderr


ONE_PROMPT = {
    "rollout": {"num_generations": 2, "generation_batch_size": 4, "shards": 1},
    "algorithm": {"steps_per_generation": 1},
}


def test_more_prompts_a_round_than_there_are_gives_a_one_line_error(tmp_path, tiny_model) -> None:
    one_line(sampled(Case(tmp_path, tiny_model), tmp_path / "model"), "6 training prompts", "needs 16")


@pytest.mark.parametrize(("length", "fragments"), [(5000, ["a prompt and"]), (250, ["the longest prompt ("])])
def test_more_tokens_than_the_context_give_a_one_line_error_before_any_engine(
    length, fragments, tmp_path, tiny_model
) -> None:
    case = Case(tmp_path, tiny_model, rollout={"max_completion_length": length})
    one_line(
        case.prepare(), f"rollout.max_completion_length ({length})", "the model's context is 256 tokens", *fragments
    )


def test_a_truncated_policy_gives_a_one_line_error(tmp_path, tiny_model) -> None:
    case = Case(tmp_path, tiny_model, **ONE_PROMPT)
    weights = case.model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    one_line(sampled(case, case.model), str(weights), "truncated")


def test_pickled_weights_are_refused(tmp_path, tiny_model) -> None:
    case = Case(tmp_path, tiny_model, **ONE_PROMPT)
    (case.model / "model.safetensors").rename(case.model / "pytorch_model.bin")
    one_line(sampled(case, case.model), "pickled", "safetensors")


def test_a_policy_of_another_architecture_gives_a_one_line_error(tmp_path, tiny_model) -> None:
    run = Round(tmp_path / "run", tmp_path / "other").write(1)
    shutil.copytree(tiny_model, tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    outcome = run.update()
    assert outcome.returncode == 1
    one_line(outcome.stderr, str(tmp_path / "other"), "model")
    assert not run.policy(1).exists()


REWARDS = {
    "raises": ("raise ValueError('boom')", ["raised ValueError: boom (mine.py, line 2) for row 0"]),
    "wrong length": ("return [1.0]", ["1 score for 4 completions", "rows 0 to 3"]),
    "not a number": ("return [float('nan')] * len(completions)", ["nan", "row 0"]),
    "infinite": ("return [0.0] * 3 + [float('inf')]", ["inf", "row 3"]),
    "a word": ("return ['good'] * len(completions)", ["'good'", "row 0"]),
    "no list": ("return 1.0", ["float", "list"]),
}


@pytest.mark.parametrize("name", REWARDS)
def test_a_bad_reward_function_gives_a_one_line_error(name, tmp_path, tiny_model) -> None:
    body, fragments = REWARDS[name]
    file = tmp_path / "mine.py"
    file.write_text(f"def my_reward(completions):\n    {body}\n")
    outcome, output = score(tmp_path, tiny_model, f"{file}:my_reward")
    one_line(outcome.stderr, "my_reward", *fragments)
    assert not output.exists()


def test_a_reward_that_needs_a_missing_column_gives_a_one_line_error(tmp_path, tiny_model) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def my_reward(completions, anwser):\n    return [0.0] * len(completions)\n")
    outcome, _ = score(tmp_path, tiny_model, f"{file}:my_reward")
    one_line(outcome.stderr, "anwser", "did you mean 'answer'")


def test_a_reward_that_is_not_there_gives_a_one_line_error(tmp_path, tiny_model) -> None:
    outcome, _ = score(tmp_path, tiny_model, "rloo_pipeline.rewards.answer:exact_anser_reward")
    one_line(outcome.stderr, "exact_anser_reward", "did you mean 'exact_answer_reward'")


def score(folder: Path, model: Path, function: str):
    """Scores 64 synthetic completions with one function."""
    from rloo_pipeline.artifacts import tables

    run = Round(folder / "run", model, rewards=[{"function": function}], correct={}).write(1)
    rollouts = tables.read_all([run._table(1, "rollouts", shard) for shard in range(2)], "rollouts")
    tables.write(
        run._table(1, "rollouts", 9),
        rollouts,
        tables.ROLLOUTS,
        "rollouts",
        **dict.fromkeys(("run", "round", "shard", "policy"), "x"),
        seed=1,
    )
    ids = sorted(set(rollouts["prompt_id"].to_pylist()))
    rows = [{"prompt_id": name, "prompt": "x", "prompt_ids": [4], "answer": "1"} for name in ids]
    write_prompts(run.run / "prompts", rows)
    output = run._table(1, "scores", 9)
    outcome = rloo(
        *("score", "--prompts", run.run / "prompts", "--policy", run.model, "--rollouts", run._table(1, "rollouts", 9)),
        *("--output", output, f"--log={run.run / 'logs' / 'score.log'}"),
    )
    assert outcome.returncode == 1
    assert "Traceback" in (run.run / "logs" / "score.log").read_text()
    return outcome, output


def test_a_full_disk_gives_a_one_line_error(tmp_path, tiny_model) -> None:
    """A file system of 64 KiB, mounted for the stage alone in its own mount namespace."""
    import os

    run = Round(tmp_path / "run", tiny_model).write(1)
    (run.run / "policies").mkdir()
    probe = ["unshare", "--mount", "--map-root-user", "mount", "-t", "tmpfs", "none", str(run.run / "policies")]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        if os.environ.get("CI"):
            pytest.fail("this machine cannot mount a small file system")
        pytest.skip("no user namespaces, so no small file system can be mounted")
    shell = f"mount -t tmpfs -o size=64k none {run.run}/policies && exec {sys.executable} -m rloo_pipeline warmstart"
    config = yaml.safe_load((run.run / "config.yaml").read_text()) | {"warmstart": {}}
    (run.run / "config.yaml").write_text(yaml.safe_dump(config))
    staged(run.run / "assets", tiny_model)
    arguments = f" --assets {run.run}/assets --prompts {run.run}/none --output {run.run}/policies/00000"
    arguments += f" --log={run.run}/logs/warmstart.log"
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", shell + arguments]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 1
    one_line(outcome.stderr, "no space left", "free some disk")


def test_an_unexpected_error_keeps_its_traceback_in_the_log(tmp_path, tiny_model) -> None:
    run = Round(tmp_path / "run", tiny_model).write(1)
    (run.run / "rounds" / "00001" / "metrics.json").mkdir()
    outcome = run.update()
    assert outcome.returncode == 1
    assert "Traceback" not in outcome.stderr
    assert "the traceback is in" in outcome.stderr
    assert "Traceback" in (run.run / "logs" / "update-1.log").read_text()
