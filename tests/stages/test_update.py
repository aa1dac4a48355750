"""The update stage, run as a command on synthetic rounds: what changes its result, what does not, what it refuses."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import forks
import pyarrow.parquet as pq
import pytest
import torch
from helpers import Round, done, succeeded, wait_until

from rloo_pipeline.artifacts import node_files, policy, tables
from rloo_pipeline.artifacts.files import read_artifact
from rloo_pipeline.artifacts.model_files import WEIGHTS
from rloo_pipeline.runtime import ranks, scratch

pytestmark = pytest.mark.slow

# Everything about the algorithm that can differ between ways of cutting a batch is on.
CHANGES = {
    "algorithm": {"steps_per_generation": 2, "num_iterations": 2, "beta": 0.05, "mask_truncated_completions": True}
}


ALONE = {
    "plain": {},
    "micro-batches": {"max_tokens_per_micro_batch": 60},
    "zero-1": {"zero_stage": 1},
    "checkpointing": {"gradient_checkpointing": True},
}
TOGETHER = {
    "zero-2-two-ranks": {"zero_stage": 2, "processes": 2, "max_tokens_per_micro_batch": 300},
    "zero-3-two-ranks": {"zero_stage": 3, "processes": 2},
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, tiny_model) -> dict[str, Round]:
    """The same update on two ranks, as torchrun starts them."""
    folder = tmp_path_factory.mktemp("together")
    runs = {name: Round(folder / name, tiny_model, **CHANGES, deepspeed=keys) for name, keys in TOGETHER.items()}
    for run in runs.values():
        for outcome in run.write(1).update_by_ranks():
            assert outcome.returncode == 0, outcome.stderr
    return runs


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, tiny_model) -> dict[str, Round]:
    """The same update in one process, with its steps split in several ways."""
    folder = tmp_path_factory.mktemp("update")
    runs = {name: Round(folder / name, tiny_model, **CHANGES, deepspeed=keys) for name, keys in ALONE.items()}
    for run in runs.values():
        succeeded(run.write(1).update())
    return runs


@pytest.fixture(scope="module")
def plain(one_process) -> Round:
    return one_process["plain"]


def distance(first: Round, second: Round, start) -> float:
    """The difference between two policies, relative to the length of the update."""
    from safetensors.torch import load_file

    before = load_file(start / "model.safetensors")
    a, b = first.weights(), second.weights()
    assert a.keys() == b.keys() == before.keys()
    length = sum(float((a[name] - before[name]).norm() ** 2) for name in a) ** 0.5
    distance = sum(float((a[name] - b[name]).norm() ** 2) for name in a) ** 0.5
    assert length > 0
    return distance / length


@pytest.mark.parametrize("name", [*ALONE, *TOGETHER][1:])
def test_how_a_step_is_cut_changes_nothing_but_rounding(tiny_model, plain, one_process, two_ranks, name) -> None:
    same_but_for_rounding(plain, {**one_process, **two_ranks}[name], tiny_model)


def same_but_for_rounding(one: Round, other: Round, start: Path) -> None:
    assert distance(one, other, start) < 1e-4
    read = [read_artifact(run.run / "rounds" / "00001" / "metrics.json") for run in (one, other)]
    assert read[0].keys() == read[1].keys()
    for name, value in read[0].items():
        assert read[1][name] == (value if value is None else pytest.approx(value, rel=1e-4)), name


def test_the_same_update_twice_gives_the_same_bytes(tmp_path, tiny_model, plain) -> None:
    again = Round(tmp_path / "again", tiny_model, **CHANGES).write(1)
    succeeded(again.update())
    for file in ("policies/00001/model.safetensors", "policies/00001/config.json", "rounds/00001/train.parquet"):
        assert (plain.run / file).read_bytes() == (again.run / file).read_bytes()


def test_episodes_without_an_answer_of_a_tool_are_completions(tmp_path, tiny_model, plain) -> None:
    run = Round(tmp_path / "episodes", tiny_model, **CHANGES).write(1, answer=0)
    assert run.update().returncode == 0
    weights, table = "policies/00001/model.safetensors", "rounds/00001/train.parquet"
    assert (plain.run / weights).read_bytes() == (run.run / weights).read_bytes()
    rows = [pq.read_table(one.run / table) for one in (plain, run)]
    assert rows[0].equals(rows[1]), "the footer has a digest of the metrics, which differ"
    metrics = [read_artifact(one.run / "rounds" / "00001" / "metrics.json") for one in (plain, run)]
    assert metrics[1].keys() - metrics[0].keys() == {"tools/call_frequency", "tools/failure_frequency"}
    assert {name: metrics[1][name] for name in metrics[0].keys() - {"blake2b"}} == {
        name: value for name, value in metrics[0].items() if name != "blake2b"
    }


def test_an_answer_of_a_tool_is_context_of_update_and_reference(tmp_path, tiny_model, plain) -> None:
    """It changes log-probs, and no length; how the steps are cut still changes nothing but rounding."""
    runs = [
        Round(tmp_path / name, tiny_model, **CHANGES, deepspeed=keys).write(1, answer=3)
        for name, keys in (("whole", {}), ("cut", {"max_tokens_per_micro_batch": 60}))
    ]
    shard, written = runs[0].run / "rounds/00001/rollouts/000.parquet", runs[0].run / "reference.parquet"
    for run in runs:
        succeeded(run.update())
    done("reference", "--policy", tiny_model, "--rollouts", shard, "--output", written, f"--log={tmp_path / 'log'}")
    same_but_for_rounding(*runs, tiny_model)
    assert distance(plain, runs[0], tiny_model) > 0.01
    read = [read_artifact(run.run / "rounds/00001/metrics.json") for run in (plain, runs[0])]
    for name in ("completions/mean_length", "completions/max_terminated_length", "num_completion_tokens"):
        assert read[0][name] == read[1][name]
    assert read[1]["num_tokens"] == read[0]["num_tokens"] + 3 * 64
    rollouts, logps = tables.read(shard, "rollouts"), tables.read(written, "reference")["reference_logps"]
    assert tables.lengths(logps) == tables.lengths(rollouts["sampling_logps"]) != tables.lengths(rollouts["loss_mask"])


KILLED = """
import os, signal, sys
from rloo_pipeline.cli import main as cli

left, replace = int(sys.argv[1]), os.replace

def dies(*words):
    global left
    left -= 1
    if left:
        return replace(*words)
    os.kill(os.getpid(), signal.SIGKILL)

os.replace = dies
cli.main(sys.argv[2:])
"""


@pytest.mark.parametrize("renames", [2, 3, 5])
def test_an_update_killed_at_one_of_its_renames_gives_the_same_bytes_when_it_is_run_again(
    tmp_path, tiny_model, plain, renames
) -> None:
    run = Round(tmp_path / "killed", tiny_model, **CHANGES).write(1)
    (tmp_path / "killed.py").write_text(KILLED)
    arguments = [str(argument) for argument in run.update_arguments()]
    assert forks.run(tmp_path / "killed.py", [str(renames), *arguments], os.environ).returncode == -signal.SIGKILL
    assert any(run.run.rglob(".*.tmp"))
    assert run.update().returncode == 0
    assert not any(run.run.rglob(".*.tmp"))
    for pattern in ("policies/00001/*", "trainer/00001/**/*", "rounds/00001/*.*", "tensorboard/*"):
        files = {file.relative_to(run.run): file.read_bytes() for file in run.run.glob(pattern) if file.is_file()}
        assert files == {name: (plain.run / name).read_bytes() for name in files} != {}


@pytest.mark.parametrize("processes", [1, 2])
def test_an_update_of_any_number_of_processes_leaves_nothing_on_the_node(
    tmp_path, tiny_model, plain, monkeypatch, processes
) -> None:
    """Files left in shared memory or in the scratch folder would fill the node, round by round."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    before = set(Path("/dev/shm").glob("*deepspeed*"))
    run = Round(tmp_path / "node", tiny_model, **CHANGES, deepspeed={"processes": processes}).write(1)
    succeeded(run.update())
    left = set(Path("/dev/shm").glob("*deepspeed*")) - before
    wait_until(lambda: not any(file.exists() for file in left))  # those of other tests' processes go with them
    assert list(scratch.iterdir()) == []
    same_but_for_rounding(plain, run, tiny_model)


def test_an_update_imports_nothing_that_it_has_no_use_for(tmp_path, tiny_model) -> None:
    run = Round(tmp_path / "run", tiny_model, algorithm={"beta": 0}).write(1)
    code = "import sys\nfrom rloo_pipeline.cli import main\nmain.main(sys.argv[1:])\nprint('loaded:', *sys.modules)"
    arguments = [str(argument) for argument in run.update_arguments() if not str(argument).startswith("--log=")]
    output = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True).stdout
    loaded = {name.split(".")[0] for name in output.partition("loaded:")[2].split()}
    assert {"deepspeed", "transformers"} <= loaded
    heavy = {"mlflow", "sklearn", "scipy", "pandas", "vllm"}
    assert not loaded & heavy
    assert all(importlib.util.find_spec(name) for name in heavy), "there they are"


def test_the_table_says_what_the_update_used(plain) -> None:
    table = pq.read_table(plain.run / "rounds" / "00001" / "train.parquet").to_pylist()
    rollouts = [row for shard in range(2) for row in pq.read_table(plain._table(1, "rollouts", shard)).to_pylist()]
    scored = [row for shard in range(2) for row in pq.read_table(plain._table(1, "scores", shard)).to_pylist()]
    for used, rollout, score in zip(table, rollouts, scored, strict=True):
        assert used["masked"] == (rollout["finish_reason"] == "length")
        assert used["reward"] == (None if used["masked"] else score["reward"])
        assert used["advantage"] == 0 or used["reward"] is not None
    for start in range(0, len(table), 4):
        assert sum(row["advantage"] for row in table[start : start + 4]) == pytest.approx(0, abs=1e-5)


def test_the_policy_is_an_ordinary_folder(plain) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(plain.policy(1))
    assert torch.equal(model.state_dict()["model.embed_tokens.weight"], plain.weights()["model.embed_tokens.weight"])
    assert AutoTokenizer.from_pretrained(plain.policy(1)).decode([4, 5]) != ""
    assert "lm_head.weight" not in plain.weights()


def test_a_lora_policy_is_a_peft_adapter_and_goes_on(tmp_path, tiny_model) -> None:
    from peft import AutoPeftModelForCausalLM

    run = Round(tmp_path / "lora", tiny_model, **CHANGES, update={"lora": {"r": 4}})
    for number in (1, 2):
        succeeded(run.write(number).update(number))
    model = AutoPeftModelForCausalLM.from_pretrained(run.policy(2))
    assert model.peft_config["default"].r == 4
    first, second = run.weights(1), run.weights(2)
    assert all(not torch.equal(first[name], second[name]) for name in first if "lora_B" in name)


def test_an_estimator_of_ones_own_is_a_function_in_a_file(tmp_path, tiny_model) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def plain(rewards):\n    return rewards.nan_to_num(0.0)\n")
    run = Round(tmp_path / "own", tiny_model, algorithm={"advantage": f"{file}:plain", "beta": 0}).write(1)
    succeeded(run.update())
    table = pq.read_table(run.run / "rounds" / "00001" / "train.parquet").to_pylist()
    assert [row["advantage"] for row in table] == pytest.approx([row["reward"] or 0.0 for row in table])


def test_another_number_of_processes_is_refused(tmp_path, plain, monkeypatch) -> None:
    monkeypatch.setenv(ranks.FAILED, str(tmp_path / "failed"))
    assert [outcome.returncode for outcome in with_two_ranks(tmp_path, plain).update_by_ranks(2)] == [1, 1]
    assert "deepspeed.processes 1, but this run has 2" in (tmp_path / "failed").read_text()


@pytest.mark.long
def test_the_error_of_a_rank_is_that_of_the_update_which_started_it(tmp_path, plain) -> None:
    outcome = with_two_ranks(tmp_path, plain).update(2)
    assert outcome.returncode == 1
    last = outcome.stderr.splitlines()[-1]
    assert "one of the 2 ranks failed" in last
    assert "deepspeed.processes 1, but this run has 2" in last


def with_two_ranks(folder: Path, one: Round) -> Round:
    """Round 2 on two ranks, of a run whose round 1 had one."""
    shutil.copytree(one.run, folder / "world")
    return Round(folder / "world", one.model, **CHANGES, deepspeed={"processes": 2}).write(2)


@pytest.mark.parametrize(
    ("kept", "changes", "processes"),
    [
        ((), {}, 1),
        pytest.param((1,), {}, 1, marks=pytest.mark.long),
        pytest.param((), {"update": {"lora": {"r": 2}}}, 1, marks=pytest.mark.long),
        pytest.param((1,), {"update": {"lora": {"r": 2}}}, 1, marks=pytest.mark.long),
        pytest.param((), {"deepspeed": {"processes": 2, "zero_stage": 2}}, 2, marks=pytest.mark.long),
    ],
    ids=["none kept", "one kept", "adapter", "adapter, one kept", "two ranks"],
)
def test_an_update_without_the_state_of_the_round_before_trains_the_rounds_since_the_last_one_again(
    tmp_path, tiny_model, kept, changes, processes
) -> None:
    """Also where the policy of that last state has been removed; the bytes are those of an update with the state."""

    def update(number: int) -> str:
        outcomes = [run.update(number)] if processes == 1 else run.update_by_ranks(number)
        return "".join(succeeded(outcome).stderr for outcome in outcomes)

    first, run = tmp_path / "first", Round(tmp_path / "run", tiny_model, algorithm=CHANGES["algorithm"], **changes)
    shutil.copytree(tiny_model, run.policy(0))
    run.model = run.policy(0)
    policy.seal(run.policy(0), "00000")
    for number in (1, 2, 3):
        run.write(number)
        update(number)
        if number == 1:
            shutil.copytree(run.run / "trainer", first)
    made = ("trainer", "00003"), ("policies", "00003")
    expected = {name: content for name, content in files_of(run).items() if name.parts[:2] in made}
    for folder in (run.run / "trainer", run.policy(1), run.policy(3)):
        shutil.rmtree(folder)
    for number in kept:
        shutil.copytree(first / f"{number:05d}", run.run / "trainer" / f"{number:05d}")
    said = update(3)
    assert [f"round {number} is trained again" in said for number in (1, 2)] == [not kept, True]
    assert {name: content for name, content in files_of(run).items() if name.parts[:2] in made} == expected != {}


def test_an_update_that_was_killed_after_it_wrote_its_state_continues_from_the_one_before(tmp_path, tiny_model) -> None:
    """Not from policy 0, which is missing here. Round 2 is the last one of the run, which is then made longer."""
    run = Round(tmp_path / "run", tiny_model)
    for number in (1, 2):
        succeeded(run.write(number).update(number))
    expected = files_of(run)
    succeeded(run.update(2))
    assert files_of(run) == expected
    succeeded(run.write(3).update(3))
    assert {folder.name for folder in (run.run / "trainer").iterdir()} == {"00002", "00003"}


def test_weights_that_were_on_a_nodes_own_disk_are_made_again_with_the_same_bytes(
    tmp_path, tiny_model, monkeypatch
) -> None:
    """Policy 3 is kept, so it is a file of the run. The state of round 1 is there, and round 2 is trained again."""
    first = tmp_path / "first"
    runs: dict[str, Round] = {}
    node = tmp_path / "node"
    node.mkdir()
    for where in ("shared", str(node)):
        run = runs[where] = Round(tmp_path / f"run {len(runs)}", tiny_model, rounds=4, keep_every=3, exchange=where)
        monkeypatch.setenv(scratch.EXCHANGE, str(node))
        shutil.copytree(tiny_model, run.policy(0))
        run.model = run.policy(0)
        policy.seal(run.policy(0), "00000")
        for number in (1, 2, 3):
            succeeded(run.write(number).update(number))
            if number == 1:
                shutil.copytree(run.run / "trainer", first, dirs_exist_ok=True)
    shared, run = runs.values()
    assert [len(node_files.links(run.policy(number))) for number in range(4)] == [0, 1, 1, 0]
    assert len(list(node.rglob(WEIGHTS))) == 2
    assert not any(file.is_symlink() for file in run.run.glob("trainer/**/*"))
    expected = files_of(shared)
    assert files_of(run) == expected
    shutil.rmtree(node)
    with pytest.raises(AssertionError, match="it is on another node's disk \\(exchange\\), or was lost"):
        succeeded(run.update(3))
    shutil.rmtree(run.run / "trainer")
    shutil.copytree(first, run.run / "trainer")
    done("restore-policy", "--output", run.policy(2))
    assert node_files.links(run.policy(2)) == []
    node.mkdir()
    succeeded(run.update(3))
    shutil.rmtree(run.policy(1))
    shutil.rmtree(shared.policy(1))
    assert files_of(run) == files_of(shared)


@pytest.mark.long
def test_a_state_that_belongs_to_other_rounds_is_not_used(tmp_path, tiny_model) -> None:
    """It says that it is of round 1 of another run; the bytes are those of an update with this run's own."""
    runs = {}
    for name, answer in (("one", None), ("other", 3)):
        runs[name] = run = Round(tmp_path / name, tiny_model, algorithm=CHANGES["algorithm"])
        shutil.copytree(tiny_model, run.policy(0))
        run.model = run.policy(0)
        policy.seal(run.policy(0), "00000")
        succeeded(run.write(1, answer=answer).update(1))
    one, other = runs["one"].run / "trainer" / "00001", runs["other"].run / "trainer" / "00001"
    succeeded(runs["one"].write(2).update(2))
    shutil.rmtree(one)
    expected = files_of(runs["one"])
    shutil.rmtree(one.parent)
    shutil.rmtree(runs["one"].policy(2))
    shutil.copytree(other, one)
    assert "round 1 is trained again" in succeeded(runs["one"].update(2)).stderr
    shutil.rmtree(one)
    assert files_of(runs["one"]) == expected


def files_of(run: Round) -> dict[Path, bytes]:
    """Policies and trainer states."""
    paths = [*run.run.glob("policies/*/*"), *run.run.glob("trainer/**/*")]
    return {path.relative_to(run.run): path.read_bytes() for path in paths if path.is_file()}
