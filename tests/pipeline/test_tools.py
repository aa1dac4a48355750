"""A round with a tool and one with an environment: from the configuration to the page."""

import json
import os

import forks
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from helpers import ROOT, Project, merged, rloo, wait_until
from other_pythons import python_of

from rloo_pipeline.user_code.sandbox import sandbox

pytestmark = pytest.mark.slow

TOOLS = {
    "rounds": 1,
    "model": {"build": "rloo_pipeline.demo.character_model:tool_qwen3"},
    "dataset": {
        "train": {"generator": "rloo_pipeline.demo.calculation:problems", "options": {"split": "train", "size": 100}},
        "eval": {"generator": "rloo_pipeline.demo.calculation:problems", "options": {"split": "test", "size": 20}},
    },
    "warmstart": {
        "sft": {
            "demonstrations": {
                "generator": "rloo_pipeline.demo.calculation:demonstrations",
                "options": {"split": "train", "size": 400, "called_share": 1.0},
            },
            "steps": 40,
        }
    },
    "checks": {"probe_prompts": 8},
    "evaluation": {"num_generations": 1, "greedy": False},
    "rollout": {
        "tools": ["rloo_pipeline.environments.tools:calculator"],
        "max_turns": 3,
        "generation_batch_size": 32,
        "max_completion_length": 64,
    },
    "rewards": [
        {"function": "rloo_pipeline.rewards.answer:exact_answer_reward", "name": "answer"},
        {"function": "calls.py:called"},
    ],
}
CALLED = """
def called(completions, **_):
    return [sum(message["role"] == "tool" for message in messages) / len(messages) for messages in completions]
"""


@pytest.mark.long
def test_a_run_with_a_tool_goes_from_its_configuration_to_its_page(tmp_path) -> None:
    project = Project(tmp_path / "project")
    (project.folder / "calls.py").write_text(CALLED)
    outcome = project.snakemake("--cores", "1", **TOOLS)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    run = project.folder / "results" / "mini"
    assert (run / "report.html").exists()
    shard = run / "rounds/00001/rollouts/000.parquet"
    rows = pq.read_table(shard).to_pylist()
    assert any(turn["role"] == "tool" for row in rows for turn in row["turns"]), "the calculator was called"
    for row in rows:
        messages = json.loads(row["messages"])
        assert messages[-1]["role"] == "assistant"
        assert len(row["sampling_logps"]) == sum(row["loss_mask"])
    log = (run / "logs/rollout/00001-000.log").read_text()
    assert f" {sum(sum(row['loss_mask']) for row in rows)} tokens, " in log, "without those of answers"
    scores = pq.read_table(run / "rounds/00001/scores/000.parquet").to_pylist()
    called = [sum(turn["role"] == "tool" for turn in row["turns"]) / len(row["turns"]) for row in rows]
    assert [row["scores/called"] for row in scores] == called, "rewards see the whole conversation"
    page = (run / "report.html").read_text()
    assert "→ calculator(expression=" in page, "the page has the calls"
    metrics = json.loads((run / "rounds/00001/metrics.json").read_text())
    shards = pa.concat_tables(map(pq.read_table, sorted(shard.parent.iterdir())))
    assert metrics["tools/call_frequency"] == sum(shards["tool_calls"].to_pylist()) / len(shards) > 0
    assert metrics["tools/calculator/call_frequency"] > 0
    assert "Calls of tools" in page
    rewards = tmp_path / "new.yaml"
    rewards.write_text(yaml.safe_dump({"rewards": [{"function": f"{project.folder}/calls.py:called"}]}))
    rescored = rloo("rescore", run, "--rewards", rewards, "--out", tmp_path / "rescored")
    assert rescored.returncode == 0, rescored.stderr
    new = pq.read_table(tmp_path / "rescored/rounds/00001/scores/000.parquet")["scores/called"].to_pylist()
    assert new == called, "rescored from the file alone"
    policy, again = run / "policies/00000", tmp_path / "again.parquet"
    arguments = ["rollout", "--prompts", run / "prompts", "--policy", policy, "--round", 1, "--shard", 0]
    arguments += ["--output", again]
    config = tmp_path / "config.yaml"
    written = (run / "config.yaml").read_text().partition("\n")[2]  # without the digest
    changes = [("environment_workers: 64", "environment_workers: 1")]
    if not isinstance(sandbox.search(), str):
        changes.append(("environment_sandbox: false", "environment_sandbox: true"))
    for before, after in changes:
        assert written.count(f"{before}\n") == 1
        written = written.replace(before, after)
    config.write_text(written)
    repeated = rloo(*arguments, "--configfile", config)
    assert repeated.returncode == 0, repeated.stderr
    first, second = (pq.read_table(file) for file in (shard, again))
    assert first.drop_columns("sampling_logps").equals(second.drop_columns("sampling_logps")), (
        "processes change nothing, and a calculator is the same in the sandbox"
    )
    logps = [table["sampling_logps"].combine_chunks().flatten().to_pylist() for table in (first, second)]
    assert logps[0] == pytest.approx(logps[1], abs=1e-5), (
        "up to rounding: batches of the engine depend on which requests are ready"
    )


@pytest.mark.long
def test_a_round_with_a_server_of_openenv_is_the_same_after_a_kill(tmp_path) -> None:
    project = Project(tmp_path / "project")
    apps = ROOT / "tests" / "unit" / "environments"
    server = f"{python_of('openenv')} -m uvicorn openenv_apps:calculating --app-dir {apps} --port {{port}}"
    (project.folder / "calls.py").write_text(CALLED)
    functions = [f"{project.folder}/calls.py:called", "rloo_pipeline.rewards.from_environment:environment_reward"]
    rewards = [TOOLS["rewards"][0], *({"function": function} for function in functions)]
    changes = merged(TOOLS, {"rewards": rewards, "rollout": {"environment": f"openenv:{server}"}})
    changes["rollout"]["shards"] = 1
    changes["rollout"]["tools"] = []
    checked = rloo("check", project.configure(**changes))
    said = " ".join(checked.stdout.split())
    assert "calculator(expression='1') gives '{\\'error\\': " in said, checked.stdout + checked.stderr
    assert checked.returncode == 0, checked.stdout
    names = "rounds/00001/scores/000.parquet", "evaluation/warmstart/completions.parquet", "policies/00001"
    outcome = project.snakemake("--cores", "1", "--", *(f"results/mini/{name}" for name in names), **changes)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    run = project.folder / "results" / "mini"
    shard, again = run / "rounds/00001/rollouts/000.parquet", tmp_path / "again.parquet"
    table = pq.read_table(shard)
    assert sum(table["tool_calls"].to_pylist()) > 0
    assert set(table["environment_reward"].to_pylist()) == {0.0}
    assert all("scores/environment_reward" in pq.read_schema(run / name).names for name in names[:2])
    arguments = ["rollout", "--prompts", run / "prompts", "--policy", run / "policies/00000", "--round", 1]
    arguments += ["--shard", 0, "--output", again, "--configfile", run / "config.yaml"]
    log = tmp_path / "log"
    job = forks.start(forks.Command("rloo_pipeline", list(map(str, arguments)), os.environ), log)
    wait_until(lambda: "connection open" in log.read_text() or job.poll() is not None)
    job.kill()
    job.wait()
    assert not again.exists(), "killed in the middle"
    repeated = rloo(*arguments)
    assert repeated.returncode == 0, repeated.stderr
    assert pq.read_table(again).drop_columns("sampling_logps").equals(table.drop_columns("sampling_logps"))
