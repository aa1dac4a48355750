"""Findings of `rloo check`, and that `plan`, `doctor` and Snakemake find the same by files alone."""

import json
import re
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from helpers import merged, mini, printed

from rloo_pipeline.artifacts import model_dims
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.before_run import data_trial, inputs, model_inputs, model_trial, node_checks
from rloo_pipeline.before_run.findings import Finding, RunInputs
from rloo_pipeline.commands.check import check, findings
from rloo_pipeline.config import Config
from rloo_pipeline.config.loading import ConfigArguments
from rloo_pipeline.errors import UserError
from rloo_pipeline.stages.prompts import prompts
from rloo_pipeline.stages.stage_assets import stage_assets

ROWS, HELD_OUT = (
    [{"question": f"What is {n}+{n}?", "answer": str(2 * n)} for n in range(first, last)]
    for first, last in ((1, 17), (17, 25))
)
MINE = """
def right(completions, answer):
    return [float(text[-1]["content"] == one) for text, one in zip(completions, answer, strict=True)]

def raises(completions):
    return helper(completions)

def helper(completions):
    raise KeyError("boom")

def texts(completions):
    return ["0.5"] * len(completions)

def wants(solution):
    return [0.0] * len(solution)

def ids(completion_ids, tokenizer_path):
    return [float(len(one)) for one in completion_ids]

def nothing(completions):
    return [None] * len(completions)

def counted(completions, calls=[]):
    calls.append(None)
    return [float(len(calls))] * len(completions)

def rounded(completions, calls=[]):
    calls.append(None)
    return [3 + len(calls) / 1000] * len(completions)

def best(completions, answer):
    scores = right(completions, answer)
    return [float(score == max(scores)) for score in scores]

def spread(completions):
    import statistics
    return [statistics.stdev(len(one[-1]["content"]) for one in completions)] * len(completions)

def shorter(completions, other_completions):
    pairs = zip(completions, other_completions, strict=True)
    return [float(len(one[-1]["content"]) < len(other[-1]["content"])) for one, other in pairs]

def from_1_to_10(completions, other_completions):
    return [7.0] * len(completions)

def half(completions):
    return [0.5] * len(completions)
"""


@pytest.fixture
def case(tmp_path, tiny_model):
    """A configuration with a copy of the tiny model, 16 training and 8 held-out rows and reward functions in a file."""
    shutil.copytree(tiny_model, tmp_path / "model")
    write(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / "test.jsonl", HELD_OUT)
    (tmp_path / "mine.py").write_text(MINE)
    base = mini()
    del base["warmstart"]
    base |= {"model": {"name_or_path": str(tmp_path / "model"), "dtype": "float32"}, "data_dir": str(tmp_path)}
    source = {"train": {"path": "train.jsonl"}, "eval": {"path": "test.jsonl"}}
    base |= {"dataset": {**source, "user_prompt": "{question}"}, "evaluation": {}}
    base["rewards"] = [{"function": f"{tmp_path}/mine.py:right"}]

    def config(**changes) -> Config:
        return Config(**merged(base, changes))

    return config


def write(file: Path, rows: list[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def problems(config: Config, folder: Path) -> dict[str, str]:
    """Messages of the problems that `check` finds, by subject."""
    (folder / "scratch").mkdir(exist_ok=True)
    return {finding.subject: finding.message for finding in findings(config, folder / "scratch") if not finding.ok}


def test_a_run_that_can_work_has_no_problem(case, tmp_path) -> None:
    results = list(findings(case(), tmp_path))
    assert all(one.ok and not one.note for one in results)
    subjects = ["model", "weights", "tokenizer", "dataset.eval", "dataset.train", "first prompt"]
    subjects += [*["reward right"] * 2, "first completion"]
    assert [one.subject for one in results] == subjects
    messages = {one.subject: one.message for one in results}
    assert "qwen3, context 256, float32" in messages["model"]
    assert messages["dataset.train"].startswith("16 rows of question, answer; prompts of ")
    assert messages["reward right"] == (
        "on rows of dataset.eval: the data's own solutions 1, 1, 1, 1; 'I do not know.' 0, 0, 0, 0"
    )
    assert messages["first prompt"].startswith("<|im_start|>user\\n")
    assert messages["first completion"].startswith("right 1: ")
    assert messages["first completion"].endswith("(the data's own solution to the first prompt)")
    assert inputs.require(case()) == [
        "the model's context is 256 tokens: with completions of 48 there is room for prompts of 208, "
        "but dataset.max_prompt_length (512) allows longer ones"
    ]


FROM_FILES = {
    "completions beyond the context": (
        {"rollout": {"max_completion_length": 256}},
        {"model": "the model's context is 256 tokens, too few for a prompt and rollout.max_completion_length (256)"},
    ),
    "completions of the evaluation": (
        {"evaluation": {"max_completion_length": 999}},
        {"model": "too few for a prompt and evaluation.max_completion_length (999)"},
    ),
    "no such model folder": ({"model": {"name_or_path": "./modle"}}, {"model": "no such folder (model.name_or_path"}),
    "a home folder": ({"model": {"name_or_path": "~/model"}}, {"model": "~ is not expanded"}),
    "attention heads that the GPUs of a sampler cannot share": (
        {"vllm": {"tensor_parallel_size": 3}},
        {"model": "2 attention heads cannot be divided among the 3 GPUs of vllm.tensor_parallel_size"},
    ),
    "a variable of the shell": ({"model": {"name_or_path": "$WORK/model"}}, {"model": "$WORK is not expanded"}),
    "a name that neither the Hub nor the disk has": (
        {"model": {"name_or_path": "my_model.py:build"}},
        {"model": "nor a Hub id such as org/name; correct model.name_or_path"},
    ),
    "a Hub id with a slash at its end": (
        {"dataset": {"train": {"path": None, "name": "org/data/"}}},
        {"dataset.train": "org/data/: neither a folder (relative to"},
    ),
    "a file for a folder": (
        {"model": {"name_or_path": __file__}},
        {"model": "is a file, but model.name_or_path must"},
    ),
    "no such data folder": (
        {"dataset": {"train": {"path": None, "name": "~/data"}}},
        {"dataset.train": "~/data: no such folder (dataset.train.name, relative to"},
    ),
    "data in a home folder": (
        {"dataset": {"train": {"path": "~/train.jsonl"}}},
        {"dataset.train": "; ~ is not expanded, write out the path"},
    ),
    "a folder for a data file": (
        {"dataset": {"train": {"path": "model"}}},
        {"dataset.train": "write `name` instead of `path`"},
    ),
    "no such data file": (
        {"dataset": {"train": {"path": "tran.jsonl"}}},
        {"dataset.train": "tran.jsonl: no such dataset file (dataset.train.path 'tran.jsonl', data_dir"},
    ),
    "a wrong column": (
        {"dataset": {"user_prompt": "{qestion}"}},
        dict.fromkeys(("dataset.train", "dataset.eval"), "no column 'qestion' (dataset.user_prompt names it); did you"),
    ),
    "a wrong column of demonstrations": (
        {"warmstart": {"sft": {"demonstrations": {"path": "train.jsonl"}, "completion_column": "anser"}}},
        {"warmstart.sft.demonstrations": "no column 'anser' (warmstart.sft.completion_column); did you mean 'answer'?"},
    ),
}


@pytest.mark.parametrize("name", FROM_FILES)
def test_every_command_finds_the_same_problems_by_files_alone(name, case, tmp_path) -> None:
    changes, expected = FROM_FILES[name]
    config = case(**changes)
    results = problems(config, tmp_path)
    assert results.keys() == expected.keys() | {subject for subject in results if subject.startswith("reward")}
    by_files = {one.subject: one.message for one in inputs.findings(config) if not one.ok}
    by_doctor = [*node_checks.model(config, ""), *node_checks.datasets(config, "")]
    doctor_messages = {one.subject: one.message for one in by_doctor if not one.ok}
    for subject, message in expected.items():
        assert message in results[subject]
        assert by_files[subject] == doctor_messages[subject] == results[subject]
    with pytest.raises(UserError) as error:
        inputs.require(config)
    assert str(error.value).startswith(next(iter(by_files.values())))


def test_a_model_that_training_does_not_cover_is_refused_by_its_config_json(case, tmp_path) -> None:
    place = tmp_path / "model" / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"model_type": "bert"}))
    assert "bert is an encoder" in problems(case(), tmp_path)["model"]
    (finding,) = node_checks.model(case(), "")
    assert not finding.ok
    assert "bert is an encoder" in finding.message
    with pytest.raises(UserError, match="bert is an encoder"):
        inputs.require(case())


def test_an_adapter_on_a_layer_that_the_model_has_not_is_a_problem(case, tmp_path) -> None:
    config = case(update={"lora": {"target_modules": ["q_proj", "v_poj"]}})
    assert "no layer 'v_poj'; did you mean 'v_proj'?" in problems(config, tmp_path)["model"]


def test_a_number_format_that_this_machine_does_not_have_is_noted(case, tmp_path, monkeypatch) -> None:
    from rloo_pipeline.training import formats

    for trains in (True, False):
        monkeypatch.setattr(formats, "trains_in", lambda _, trains=trains: trains)
        folder = tmp_path / str(trains)
        folder.mkdir()
        (finding,) = (
            one for one in findings(case(model={"dtype": "bfloat16"}), folder) if one.subject == "model.dtype"
        )
        assert (finding.ok, finding.note) == (True, not trains)


def test_rows_of_check_are_those_that_later_stages_read(case, tmp_path) -> None:
    about = [{"n": 2**64}, {"city": "Paris"}, {"big": [1, 2**70]}, None]
    write(tmp_path / "train.jsonl", [row | {"about": about[n % 4], "id": 2**63 + n} for n, row in enumerate(ROWS)])
    config = case()
    assets, output = tmp_path / "assets", tmp_path / "prompts"
    stage_assets(config, assets)
    prompts(config, assets, output)
    with ExitStack() as stack:
        given = RunInputs(config, tmp_path, stack, Policy(tmp_path / "model"))
        assert all(finding.ok for finding in [*model_trial.tokenizer(given), *data_trial.datasets(given)])
    for name in ("train", "eval"):
        stored = PromptSet(output / name)
        assert given.datasets[f"dataset.{name}"].rows == stored.rows([*range(len(stored))])
    assert given.datasets["dataset.train"].rows[2]["about"] == about[2]
    assert given.datasets["dataset.train"].rows[2]["id"] == 2**63 + 2


def test_prompts_that_repeat_with_other_columns_and_held_out_ones_are_noted(case, tmp_path) -> None:
    write(tmp_path / "train.jsonl", [*ROWS, ROWS[0] | {"answer": "3"}, HELD_OUT[0] | {"answer": "4"}])
    with ExitStack() as stack:
        given = RunInputs(case(), tmp_path, stack, Policy(tmp_path / "model"))
        results = [*model_trial.tokenizer(given), *data_trial.datasets(given), *data_trial.enough(given)]
    notes = [finding.message for finding in results if finding.note]
    assert len(notes) == 2
    assert "17 kept, dropped: 1 also in eval" in notes[0]
    assert notes[1].startswith("1 prompts are in several rows, 2 in all, that differ in other columns")


def test_training_rows_that_begin_with_the_held_out_ones_are_checked_behind_them(case, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(data_trial, "TEMPLATED", len(HELD_OUT))
    write(tmp_path / "train.jsonl", [*HELD_OUT, *ROWS])
    assert "dataset.train" not in problems(case(), tmp_path)


def test_a_folder_without_weights_is_a_problem_that_internet_does_not_cure(case, tmp_path) -> None:
    (tmp_path / "model" / "model.safetensors").unlink()
    message = f"{tmp_path}/model: no weights (no .safetensors file); copy or fetch the whole model"
    assert problems(case(), tmp_path)["weights"] == message
    assert [*node_checks.model(case(), "where there is internet: …")][-1] == Finding("model", False, message)


def test_the_longest_prompt_is_compared_with_the_context(case, tmp_path) -> None:
    results = problems(case(rollout={"max_completion_length": 250}), tmp_path)
    assert "the longest prompt (" in results["dataset.train"]
    assert "rollout.max_completion_length (250); lower" in results["dataset.train"]
    harness = {"tasks": ["gsm8k"], "max_model_len": 257}
    assert (
        "lower evaluation.harness.max_model_len (257)"
        in problems(case(evaluation={"harness": harness}), tmp_path)["model"]
    )


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", "raised KeyError: 'boom' (mine.py, line 9) for row 0; fix the function"),
        ("texts", "returned '0.5' for row 0, which is of type str and not a number or None; return one of"),
        (
            "wants",
            "needs a column 'solution', which the dataset lacks; there are answer, finish_reason, prompt_id, question",
        ),
        ("rihgt", "has no function rihgt; did you mean 'right'?"),
    ],
)
def test_a_reward_that_cannot_be_used_gives_a_one_line_error_with_its_line(function, message, case, tmp_path) -> None:
    results = list(findings(case(rewards=[{"function": f"{tmp_path}/mine.py:{function}"}]), tmp_path))
    assert (results[-1].subject, results[-1].ok) == (f"reward {function}", False), "and no score is shown"
    assert message in results[-1].message


def test_a_reward_that_gives_none_for_all_is_noted_and_token_ids_are_the_tokenizers(case, tmp_path) -> None:
    config = case(rewards=[{"function": f"{tmp_path}/mine.py:{name}"} for name in ("nothing", "ids")])
    results = [one for one in findings(config, tmp_path) if one.subject.startswith("reward")]
    assert [one.note for one in results] == [True, True, False, False]
    assert "None for all" in results[0].message
    assert "the data's own solutions 2, 2, 2, 2" in results[2].message, "a digit and the end"


@pytest.mark.parametrize(
    ("function", "batch", "message"),
    [
        (
            "counted",
            "group",
            "row 0 gets 1, but 5 in a second call: scores must not depend on chance, the time or ",
        ),
        ("best", "rows", "row 1 gets 0, but 1 in a second call: .*, set batch: group$"),
        ("best", "group", None),
        ("rounded", "group", None),
    ],
)
def test_scores_that_depend_on_more_than_the_completion_are_noted(function, batch, message, case, tmp_path) -> None:
    config = case(rewards=[{"function": f"{tmp_path}/mine.py:{function}", "batch": batch}])
    [finding, *_] = [one for one in findings(config, tmp_path) if one.subject == f"reward {function}"]
    assert finding.ok
    assert finding.note == (message is not None)
    assert re.search(message or "", finding.message), finding.message


@pytest.mark.parametrize("on_error", ["fail", "none"])
def test_a_reward_that_fails_on_a_completion_alone_is_noted(on_error, case, tmp_path) -> None:
    config = case(rewards=[{"function": f"{tmp_path}/mine.py:spread", "on_error": on_error}])
    [finding, *_] = [one for one in findings(config, tmp_path) if one.subject == "reward spread"]
    assert (finding.ok, finding.note) == (True, True)
    assert re.search("a second call, with each completion alone, fails: .*StatisticsError", finding.message)


def test_a_judge_compares_rows_of_the_data_before_the_run(case, tmp_path) -> None:
    config = case(judge={"function": f"{tmp_path}/mine.py:shorter"})
    [finding] = [one for one in findings(config, tmp_path) if one.subject == "judge shorter"]
    solutions = "the data's own solutions 1, 1, 1, 1; 'I do not know.' 0, 0, 0, 0"
    assert (finding.ok, finding.message) == (True, f"on rows of dataset.eval: {solutions}")
    for name, message in (
        ("right", "has no parameter 'other_completions', so it compares nothing"),
        ("from_1_to_10", "returned 7 for row 0; return from 0 (the completion is worse than that of"),
    ):
        assert message in problems(case(judge={"function": f"{tmp_path}/mine.py:{name}"}), tmp_path)[f"judge {name}"]


def test_a_score_that_the_estimator_refuses_is_a_problem(case, tmp_path) -> None:
    reward = {"function": f"{tmp_path}/mine.py:half"}
    algorithm = {"preset": "maxrl"}
    message = "algorithm.advantage: maxrl needs scores of 0 and 1, but 0.5 is another; use a reward"
    assert message in problems(case(rewards=[reward], algorithm=algorithm), tmp_path)["reward half"]
    second = {"function": f"{tmp_path}/mine.py:half", "name": "again"}
    for changes in (
        {"rewards": [reward]},
        {"rewards": [reward, second], "algorithm": algorithm},  # their sum may be 0 or 1
        {"rewards": [{**reward, "weight": 0}, {"function": f"{tmp_path}/mine.py:right"}], "algorithm": algorithm},
    ):
        assert "reward half" not in problems(case(**changes), tmp_path)


def test_a_tokenizer_without_a_chat_template_gives_a_one_line_error(case, tmp_path) -> None:
    (tmp_path / "model" / "chat_template.jinja").unlink(missing_ok=True)
    place = tmp_path / "model" / "tokenizer_config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "chat_template": None}))
    results = problems(case(), tmp_path)
    assert "row 0: the prompt is messages, but the model's tokenizer has no chat template" in results["dataset.train"]


def test_the_command_ends_with_a_sentence_where_there_is_a_problem(case, tmp_path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(case().model_dump(mode="json")))
    output = printed(check, ConfigArguments(tmp_path / "run.yaml"))
    assert f"to start the run: rloo run {tmp_path}/run.yaml" in output
    with pytest.raises(UserError, match=r"run\.yaml: 1 problem, see above"):
        check(ConfigArguments(tmp_path / "run.yaml", ["dataset={train: {path: none.jsonl}}"]))


@pytest.mark.parametrize(
    ("facts", "context"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"n_positions": 1024, "n_ctx": 512}, 1024),
        ({"text_config": {"max_position_embeddings": 64}}, 64),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 2.0}}, 4096),
        ({"max_position_embeddings": 2048, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 2048),
        ({"max_position_embeddings": 8192, "model_max_length": 131072}, 131072),
        ({"hidden_size": 3}, None),
    ],
)
def test_the_context_is_read_as_vllm_reads_it(facts, context) -> None:
    assert model_dims.context(facts) == context


def test_for_a_missing_model_the_commands_that_fetch_it_are_printed(case, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    config = case(model={"name_or_path": "no/such-model", "revision": "v1"})
    with pytest.raises(UserError, match=r"hf download no/such-model config\.json --revision v1"):
        model_inputs.shape(config)
    (space, *_) = node_checks.space(tmp_path, None)
    assert space == Finding("disk", True, space.message, note=True)
    assert "unknown until the model is here" in space.message


def test_incomplete_weights_are_not_counted(tmp_path, tiny_model) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    whole = Policy(tmp_path / "model").dimensions.parameters
    names = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(names))
    assert Policy(tmp_path / "model").dimensions.parameters == pytest.approx(whole, rel=0.01)
    assert model_dims._count_parameters(tmp_path / "model") == (0, 0)


def test_held_out_rows_that_are_sorted_are_noted_if_only_the_first_ones_are_evaluated(case, tmp_path) -> None:
    rows = [{"question": f"What is {n}-{n}?", "answer": "0", "subject": "add" if n < 10 else "sub"} for n in range(20)]
    write(tmp_path / "test.jsonl", rows)
    config = case(evaluation={"num_prompts": 10})
    (note,) = [one for one in findings(config, tmp_path) if one.note]
    assert note.message == (
        "its first 10 rows (evaluation.num_prompts) have 1 of the 2 values of 'subject', so it looks sorted; shuffle "
        "the rows"
    )
    write(tmp_path / "test.jsonl", rows[::2] + rows[1::2])
    assert not [one for one in findings(config, tmp_path) if one.note]


def test_a_solution_may_be_a_number(case, tmp_path) -> None:
    for name, numbers in (("train", range(1, 17)), ("test", range(17, 25))):
        write(tmp_path / f"{name}.jsonl", [{"question": f"What is {n}+{n}?", "answer": 2 * n} for n in numbers])
    (tmp_path / "mine.py").write_text(MINE.replace("== one)", "== str(one))"))
    messages = {one.subject: one.message for one in findings(case(), tmp_path)}
    assert "the data's own solutions 1, 1, 1, 1" in messages["reward right"]
    assert messages["first completion"].endswith("(the data's own solution to the first prompt)")
