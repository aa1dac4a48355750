"""Several teachers: each completion has the log-probs of the teacher that its prompt names, in the shard's order; and
updates from a teacher's likeliest tokens.
"""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from helpers import Round, mini, rloo, succeeded

from rloo_pipeline.artifacts import assets, tables
from rloo_pipeline.artifacts.manifest import write_manifest
from rloo_pipeline.artifacts.prompt_set import as_dataset
from rloo_pipeline.before_run import data_trial
from rloo_pipeline.before_run.findings import RunInputs
from rloo_pipeline.config import Config
from rloo_pipeline.demo.character_model import tiny_qwen3

NAMES = ("sums", "products")
SIZE = {"hidden_size": 32, "layers": 1, "heads": 2, "key_value_heads": 1, "head_dim": 16, "intermediate_size": 32}


TOP_K = 5


def algorithm(folders: dict[str, Path], **keys: object) -> dict[str, object]:
    models = {name: {"name_or_path": str(folder)} for name, folder in folders.items()}
    return {"beta": 0, "importance_sampling_level": "token", "teacher": {"models": models, **keys}}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in NAMES}
    for seed, folder in enumerate(folders.values()):
        tiny_qwen3(folder, seed, **SIZE)
    return folders


def teacher_of(prompt_id: str) -> str:
    """Prompts of one shard have both teachers, in turns."""
    return NAMES[int(prompt_id[-1]) % 2]


@pytest.mark.slow
def test_each_completion_is_scored_by_the_teacher_that_its_prompt_names(tmp_path, tiny_model, teachers) -> None:
    from transformers import AutoModelForCausalLM

    run = Round(tmp_path / "run", tiny_model, algorithm=algorithm(teachers, top_k=TOP_K)).write(1)
    names = [f"{shard}-{group}" for shard in range(2) for group in range(8)]
    rows = [{"prompt_id": name, "prompt": "1+1", "prompt_ids": [5, 6], "teacher": teacher_of(name)} for name in names]
    as_dataset(rows).save_to_disk(str(run.run / "prompts" / "train"))
    write_manifest(run.run / "prompts")
    places = {f"teacher-{name}": {"path": str(folder), "revision": None} for name, folder in teachers.items()}
    (run.run / "assets").mkdir()
    assets.write(run.run / "assets", places)
    table = run.run / "rounds" / "00001" / "teacher" / "000.parquet"
    rollouts = run._table(1, "rollouts", 0)
    arguments = ("--assets", run.run / "assets", "--rollouts", rollouts, "--output", table)
    log = f"--log={run.run / 'logs' / 'teacher.log'}"
    refused = rloo("teacher", *arguments, log)
    assert "--prompts: missing, but the prompts name each row's teacher" in refused.stderr
    succeeded(rloo("teacher", *arguments, "--prompts", run.run / "prompts", log))
    models = {name: AutoModelForCausalLM.from_pretrained(folder).double() for name, folder in teachers.items()}
    scored = tables.read(table, "teacher").to_pylist()
    for row, of_row in zip(tables.read(rollouts, "rollouts").to_pylist(), scored, strict=True):
        ids = row["prompt_ids"] + row["completion_ids"]
        with torch.no_grad():
            whole = models[teacher_of(row["prompt_id"])](torch.tensor([ids])).logits[0].log_softmax(-1)
        first = len(row["prompt_ids"])
        expected = [float(whole[place - 1, ids[place]]) for place in range(first, len(ids))]
        assert of_row["teacher_logps"] == pytest.approx(expected, abs=1e-4)
        top = whole[first - 1 : -1].topk(TOP_K)
        assert of_row["top_logps"] == pytest.approx(top.values.flatten().tolist(), abs=1e-4)
        assert of_row["top_ids"] == top.indices.flatten().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [pytest.param(None, marks=pytest.mark.long, id="all weights"), {"r": 4}])
def test_an_update_towards_the_likeliest_tokens_is_the_same_on_two_ranks(tmp_path, tiny_model, teachers, lora) -> None:
    keys = {"beta": 0, "teacher": {"name_or_path": str(teachers["sums"]), "top_k": TOP_K}}
    rewards = [{**reward, "weight": 0} for reward in mini()["rewards"]]
    weights, divergences = [], []
    for ranks in (1, 2):
        run = Distilled(tmp_path / str(ranks), tiny_model, algorithm=keys, rewards=rewards, update={"lora": lora})
        run.write(1, reward=1.0)
        run.score(teachers["sums"])
        for outcome in [run.update()] if ranks == 1 else run.update_by_ranks():
            assert outcome.returncode == 0, outcome.stderr
        weights.append(run.weights())
        metrics = json.loads((run.run / "rounds" / "00001" / "metrics.json").read_text())
        divergences.append(metrics["teacher/kl"])
        assert metrics["grad_norm"] > 0
    assert divergences[0] == pytest.approx(divergences[1], rel=1e-5)
    assert divergences[0] > 0
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], atol=1e-4, rtol=1e-3)


class Distilled(Round):
    """A round whose teacher has scored it."""

    def score(self, teacher: Path) -> None:
        """Runs the stage `teacher` on both shards."""
        (self.run / "assets").mkdir()
        assets.write(self.run / "assets", {"teacher": {"path": str(teacher), "revision": None}})
        for shard in range(self.shards):
            files = ("--rollouts", self._table(1, "rollouts", shard), "--output", self._table(1, "teacher", shard))
            succeeded(rloo("teacher", "--assets", self.run / "assets", *files, f"--log={self.run / 'teacher.log'}"))

    def update_arguments(self, number: int = 1) -> tuple[object, ...]:
        """The command, with the teacher's tables."""
        teacher = [self._table(number, "teacher", shard) for shard in range(self.shards)]
        return (*super().update_arguments(number), "--teacher", *teacher)


REFUSED = {
    "models names the teachers; leave out": {"name_or_path": "x"},
    "models names the teachers": {"revision": "main"},
    "has characters other than letters": {"models": {"a/b": {"name_or_path": "x"}}},
    "exactly one of name_or_path and build": {"models": {"sums": {}}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_several_teachers_cannot_be_is_refused(message) -> None:
    section = {"models": {"sums": {"name_or_path": "x"}}, **REFUSED[message]}
    keys = {"beta": 0, "importance_sampling_level": "token", "teacher": section}
    with pytest.raises(ValueError, match=message):
        Config.model_validate(mini(algorithm=keys))


@pytest.mark.parametrize(
    ("row", "message"),
    [({"teacher": "sum"}, "has 'sum', which is not one of algorithm.teacher.models"), ({}, "column 'teacher'")],
)
def test_check_finds_rows_that_name_no_teacher(tmp_path, row, message) -> None:
    lines = [json.dumps({"question": f"{n}?", "answer": "1", **row}) for n in range(3)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    dataset = {"train": {"path": str(tmp_path / "train.jsonl")}, "user_prompt": "{question}"}
    config = Config.model_validate(
        mini(algorithm=algorithm(dict.fromkeys(NAMES, tmp_path))) | {"dataset": {**mini()["dataset"], **dataset}}
    )
    with ExitStack() as stack:
        inputs = RunInputs(config, tmp_path / "scratch", stack)
        findings = [finding.message for finding in data_trial.datasets(inputs) if not finding.ok]
    assert any(message in found for found in findings), findings
