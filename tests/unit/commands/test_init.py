"""`rloo init`: a project on which `rloo check` passes, and refusals that say what is missing."""

import datetime
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from helpers import printed

from rloo_pipeline import import_string
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.before_run.data_trial import datasets, enough
from rloo_pipeline.before_run.findings import RunInputs
from rloo_pipeline.commands import init as module
from rloo_pipeline.commands.check import check
from rloo_pipeline.commands.init import init
from rloo_pipeline.commands.project_data import dump_rows
from rloo_pipeline.config.loading import ConfigArguments, load
from rloo_pipeline.errors import UserError

ROWS = [{"question": f"{n}+{n}", "answer": f"{n}+{n}={2 * n}"} for n in range(1, 21)]


@pytest.fixture
def choices(tmp_path, tiny_model, monkeypatch) -> dict[str, str]:
    """A model, and 20 rows in one file."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mine.jsonl", ROWS)
    return {"model": str(tiny_model), "data": "mine.jsonl"}


def write(file: Path, rows: list[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def new_project(folder: str, choices: dict, force: bool = False) -> tuple[dict, str]:
    """The configuration of a new project, and what is printed."""
    output = printed(init, Path(folder), force, **choices)
    return yaml.safe_load((Path(folder) / "config" / "config.yaml").read_text()), output


def test_check_passes_on_a_new_project_and_so_does_the_test_of_its_reward(choices, monkeypatch) -> None:
    config, output = new_project("Größe 1", choices)
    assert config["run"] == "Groesse-1"
    assert config["dataset"]["user_prompt"] == "{question}", "the model has a chat template"
    assert "16 rows in data/train.jsonl, 4 rows in data/eval.jsonl" in output
    assert "\n  cd 'Größe 1'\n  rloo check" in output
    monkeypatch.chdir("Größe 1")
    files = [Path("data/train.jsonl"), Path("data/eval.jsonl")]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert sorted(rows, key=ROWS.index) == ROWS
    assert "No problem found" in printed(check, ConfigArguments(Path("config/config.yaml")))
    test = [sys.executable, "test_rewards.py"]
    assert subprocess.run(test, capture_output=True, text=True, check=True).stdout == "passed\n"
    rewards = Path("rewards.py")
    rewards.write_text(rewards.read_text().replace("float(ending", "0.0 * float(ending", 1))
    assert subprocess.run(test, capture_output=True, check=False).returncode == 1


def test_the_reward_takes_answers_in_words_and_gives_no_score_without_an_answer(choices, monkeypatch) -> None:
    answers = ["Yes", "No", None, ""] * 3
    write(Path("words.jsonl"), [{"question": f"{n}?", "answer": answer} for n, answer in enumerate(answers)])
    new_project("project", {**choices, "data": "words.jsonl"})
    monkeypatch.chdir("project")
    test = [sys.executable, "test_rewards.py"]
    assert subprocess.run(test, capture_output=True, text=True, check=True).stdout == "passed\n"
    assert import_string.load("rewards.py:right")(["None", "", "yes"], [None, "", "Yes"]) == [None, None, 1.0]


def test_the_batch_is_of_the_prompts_that_are_left_after_duplicates_and_held_out_ones(choices, monkeypatch) -> None:
    write(Path("train.jsonl"), [*ROWS, *ROWS[:8], ROWS[0] | {"question": "1+1 " * 400}])
    write(Path("held.jsonl"), ROWS[-5:])
    config, _ = new_project("project", {**choices, "data": "train.jsonl", "held_out": "held.jsonl"})
    assert config["rollout"]["generation_batch_size"] == 8 * 15
    monkeypatch.chdir("project")
    settings = load(Path("config/config.yaml"))
    with ExitStack() as stack:
        inputs = RunInputs(settings, Path(), stack)
        inputs.model = Policy(Path(choices["model"]))
        results = [*datasets(inputs), *enough(inputs)]
    assert all(finding.ok for finding in results)
    assert "15 kept, dropped: 5 also in eval, 8 duplicates, 1 too long" in results[1].message


def test_rows_of_one_prompt_are_all_trained_or_all_held_out(choices) -> None:
    write(Path("twice.jsonl"), [{"Question": row["question"], "Answer": n} for n in range(3) for row in ROWS])
    new_project("project", {**choices, "data": "twice.jsonl"})
    train, held_out = (
        [json.loads(line)["Question"] for line in Path("project", "data", name).read_text().splitlines()]
        for name in ("train.jsonl", "eval.jsonl")
    )
    assert (len(train), len(held_out)) == (3 * 16, 3 * 4)
    assert not {*train} & {*held_out}


MESSAGES = [[{"role": "user", "content": row["question"]}] for row in ROWS]
ANSWERED = [[*one, {"role": "assistant", "content": row["answer"]}] for one, row in zip(MESSAGES, ROWS, strict=True)]
SHAREGPT = [[{"from": {"user": "human"}.get(m["role"], "gpt"), "value": m["content"]} for m in one] for one in ANSWERED]


@pytest.mark.parametrize(
    ("rows", "prompt", "answer"),
    [
        ([{"messages": one} for one in ANSWERED], "messages", "answer"),
        ([{"id": "a", "conversations": one} for one in SHAREGPT], "conversations", "answer"),
        ([{"prompt": one, "solution": "1"} for one in MESSAGES], "prompt", "solution"),
        ([{"prompt": one, "solution": "1"} for one in ANSWERED], "prompt", "solution"),
        ([{"instruction": "Add.", "input": row["question"], "output": "2"} for row in ROWS], "prompt", "output"),
    ],
)
@pytest.mark.parametrize("held_out", [None, "rows.jsonl"])
def test_rows_of_usual_forms_become_prompts_without_answers(rows, prompt, answer, held_out, choices) -> None:
    write(Path("rows.jsonl"), rows)
    config, output = new_project("project", {**choices, "data": "rows.jsonl", "held_out": held_out})
    expected = ({"user_prompt": "{prompt}"} if "input" in rows[0] else {"prompt_column": prompt}).items()
    assert config["dataset"].items() >= expected
    assert f"def right(completions, {answer}, " in Path("project/rewards.py").read_text()
    source = config["dataset"]["train"]["path"]
    written = [json.loads(line) for line in Path("project", source).read_text().splitlines()]
    prompts = [f"Add.\n\n{row['question']}" for row in ROWS] if "input" in rows[0] else MESSAGES
    assert all(row[prompt] in prompts for row in written)
    if answer == "answer":
        assert all(row["answer"].startswith(row[prompt][0]["content"]) for row in written)
    assert (source == str(Path("rows.jsonl").resolve())) is (held_out is not None and rows[0].get("prompt") in MESSAGES)
    assert (f"prompts in the column '{prompt}', answers in '{answer}'" in output) is (source == "data/train.jsonl")


def test_rows_that_only_look_like_such_forms_stay_as_they_are(choices) -> None:
    for row, prompt in (
        ({"instruction": "Add.", "input": {"a": 1}, "output": "2"}, "{instruction}"),
        ({"messages": [{"role": "assistant", "content": "a"}], "label": "1"}, None),
    ):
        write(Path("rows.jsonl"), [row] * 4)
        config, _ = new_project("project", {**choices, "data": "rows.jsonl"}, force=True)
        assert config["dataset"].get("user_prompt") == prompt
        assert json.loads(Path("project/data/train.jsonl").read_text().splitlines()[0]) == row


def test_what_is_not_given_is_asked_for_until_it_can_be_used(choices, monkeypatch) -> None:
    answers = iter(["", "no model", choices["model"], "missing.jsonl", " mine.jsonl ", ""])

    def typed(question: str) -> str:
        try:
            return next(answers)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(module, "sys", SimpleNamespace(stdin=terminal, stdout=terminal))
    config, asked = new_project("asked", {})
    assert "--model no model: neither a folder" in asked
    assert "missing.jsonl: " in asked
    assert config == {**new_project("given", choices)[0], "run": "asked"}
    with pytest.raises(UserError, match="--data missing: the input ended"):
        new_project("half", {"model": choices["model"]})
    assert not Path("half").exists()


def test_an_existing_file_is_replaced_only_with_force(choices) -> None:
    new_project("mine", choices)
    Path("mine/rewards.py").write_text("mine")
    with pytest.raises(UserError, match=r"mine: config/config\.yaml, .*rewards\.py, .*exist already; .*--force"):
        new_project("mine", choices)
    assert Path("mine/rewards.py").read_text() == "mine"
    assert "replaced mine/rewards.py" in new_project("mine", choices, force=True)[1]
    assert "def right" in Path("mine/rewards.py").read_text()
    with pytest.raises(UserError, match=r"rewards\.py is a file, not a project folder"):
        init(Path("mine/rewards.py"), force=True, **choices)


def test_a_reward_of_ones_own_columns_and_held_out_rows_are_named(choices, monkeypatch) -> None:
    write(Path("rows.jsonl"), [{"frage": row["question"], "wert": 1} for row in ROWS])
    write(Path("held.jsonl"), [{"frage": "30+30", "wert": 2}])
    own_file = Path("own.py").resolve()
    own_file.write_text("async def mine(completions, wert):\n    return [0.0] * len(completions)\n")
    own = {**choices, "data": "rows.jsonl", "held_out": "held.jsonl", "prompt": "frage", "reward": "own.py:mine"}
    config, _ = new_project("project", own)
    assert config["rewards"] == [{"function": f"{Path('own.py').resolve()}:mine"}]
    assert config["dataset"]["eval"] == {"path": str(Path("held.jsonl").resolve())}
    assert not Path("project/rewards.py").exists()
    monkeypatch.chdir("project")
    test = [sys.executable, "test_rewards.py"]
    assert subprocess.run(test, capture_output=True, text=True, check=True).stdout == "passed\n"
    source = own_file.read_text()
    for wrong in ("['0.5' for _ in completions]", "[0.0]", "[float('nan') for _ in completions]"):
        own_file.write_text(source.replace("[0.0] * len(completions)", wrong))
        assert subprocess.run(test, capture_output=True, check=False).returncode == 1, wrong
    assert load(Path("config/config.yaml")).dataset.user_prompt == "{frage}"


def test_a_column_name_may_be_no_python_identifier(choices, monkeypatch) -> None:
    write(Path("rows.jsonl"), [{"prompt": row["question"], "right one": row["answer"]} for row in ROWS])
    new_project("project", {**choices, "data": "rows.jsonl", "answer": "right one"})
    monkeypatch.chdir("project")
    subprocess.run([sys.executable, "test_rewards.py"], capture_output=True, check=True)


@pytest.mark.parametrize("gpu", [True, False])
def test_without_a_gpu_weights_are_float32(gpu, choices, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module.devices, "has_gpu", lambda: gpu)
    config, _ = new_project("project", choices)
    assert config["model"].get("dtype") == (None if gpu else "float32")


def test_a_model_without_chat_template_continues_texts(choices, tmp_path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps({"max_position_embeddings": 100}))
    config, _ = new_project("project", {**choices, "model": "bare"})
    assert config["dataset"]["prompt_column"] == "question"
    assert config["model"]["name_or_path"] == str(bare.resolve())
    assert config["rollout"]["max_completion_length"] + config["dataset"]["max_prompt_length"] <= 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "--model missing; on a terminal"),
        ({"model": "nowhere"}, "--model nowhere: neither a folder nor a Hub id"),
        ({"model": "models"}, "models: no config.json, so .*; it is an adapter: merge it into its model first"),
        ({"model": "models/tiny"}, r"models/tiny/config\.json: not valid JSON \(.*\); fetch or write the model again"),
        ({"model": "models/tinny"}, r"models/tinny: no such folder .*did you mean 'tiny'"),
        ({"data": "mime.jsonl"}, r"mime\.jsonl: no such file of rows .*did you mean 'mine\.jsonl'"),
        (
            {"data": "mine.txt"},
            r"mine\.txt: dataset files can be \.jsonl, \.json, \.csv, \.tsv, \.parquet; convert it",
        ),
        ({"data": "models/tinny"}, "no such file or folder; .* with --prompt and --answer; did you mean 'tiny'"),
        ({"data": "org/name"}, "no such file or folder; if it is an id on the Hub, name its columns"),
        ({"data": "org/mine.jsonl"}, r"org/mine\.jsonl: no such file of rows"),
        ({"data": "saved"}, r"saved: was written by save_to_disk; .*load_from_disk\('saved'\)\.to_json"),
        ({"prompt": "qestion"}, "--prompt qestion: .*did you mean 'question'"),
        ({"data": "x.jsonl"}, r"none of its columns \(x, answer\) has a usual name for prompts: .* --prompt COLUMN"),
        ({"data": "x.jsonl", "prompt": "answer"}, "has a usual name for answers: .* --answer COLUMN"),
        ({"answer": "question"}, "--answer question: the prompt is in this column; name another one"),
        ({"held_out": "x.jsonl"}, r"x\.jsonl: no column 'question' \(--prompt\); there are x, answer"),
        ({"answer": "anser"}, "--answer anser: .*no such column; did you mean 'answer'"),
        ({"reward": "none.py:right"}, r"no file none\.py"),
        ({"reward": "min.py:right"}, r"no file min\.py .*did you mean 'mine\.py'"),
    ],
)
def test_what_is_missing_is_named_and_nothing_is_written(change, message, choices) -> None:
    write(Path("x.jsonl"), [{"x": "1", "answer": "1"}] * 4)
    for name in ("mine.py", "mine.txt"):
        Path(name).touch()
    Path("models/tiny").mkdir(parents=True)
    Path("models/adapter_config.json").touch()
    Path("saved").mkdir()
    Path("saved/state.json").touch()
    Path("models/tiny/config.json").write_text("{")
    with pytest.raises(UserError, match=message):
        new_project("project", choices | change)
    assert not Path("project").exists()


def test_a_column_that_json_lacks_is_named() -> None:
    rows = [{"question": "1+1", "d": None}, {"question": "1+2", "d": datetime.date(2026, 1, 1)}]
    with pytest.raises(UserError, match=r"data/train\.jsonl: column 'd': Object of type date is not JSON"):
        dump_rows(rows, "data/train.jsonl")
