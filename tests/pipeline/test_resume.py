"""After kill -9 of any stage, or of Snakemake itself, the same command continues to the same bytes."""

import io
import json
import os
import stat
import sys
from pathlib import Path

import forks
import pyarrow.parquet as pq
import pytest
from helpers import AFTER_FIRST_TABLES, AFTER_SFT, Project, merged, wait_until

from rloo_pipeline.artifacts import lineage

pytestmark = pytest.mark.slow

STAGES = (
    "stage-assets",
    "prompts",
    "warmstart",
    "probe",
    "checks",
    "rollout",
    "score",
    "reference",
    "update",
    "evaluate",
    "distance",
    "report",
)

SHORT = {"gate", "held-out", "pass-rates", "report-so-far"}

# Comes before the real command on the PATH and kills the first call of each stage: those that write policies while
# they write (a hidden folder shows it), the others just after they have opened their log. One that is through by then,
# on a busy machine, fails, so that its stage's next call has its turn.
KILLER = """#!{python} -ISu
import os, subprocess, sys, time
from pathlib import Path

sys.path.append({tests!r})
from fork_client import Fork

def start():
    if {address!r}:
        return Fork.of_this_process({address!r}, sys.argv[1:])
    return subprocess.Popen([{python!r}, "-m", "rloo_pipeline", *sys.argv[1:]])

def rank_lives():
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "comm").read_text().startswith("update") and os.readlink(process / "cwd") == os.getcwd():
                return True
        except OSError:
            pass
    return False

mark = Path({marks!r}) / sys.argv[1]
if mark.exists():
    sys.exit(start().wait())
mark.touch()
log = Path(next(word for word in sys.argv if word.startswith("--log=")).removeprefix("--log="))
log.unlink(missing_ok=True)
victim = start()
while victim.poll() is None:
    if sys.argv[1] in ("warmstart", "update"):
        if any(Path("results/mini").glob("[pt]*/.000*.tmp")):
            break
    elif log.exists():
        time.sleep(0.02)
        break
    time.sleep(0.002)
if victim.poll() is not None:
    mark.unlink()
    sys.exit(victim.wait() or 137 * (sys.argv[1] not in {short!r}))
victim.kill()
mark.with_suffix(".killed").touch()
victim.wait()
while rank_lives():  # the ranks that the tests fork end a moment later, and may write outputs until then
    time.sleep(0.02)
sys.exit(137)
"""


@pytest.fixture
def project(tmp_path) -> Project:
    return Project(tmp_path / "project")


AFTER_POLICY_0 = AFTER_SFT[1:]
LAG = {
    "rounds": 3,
    "rollout": {"lag": 1, "refill": 1, "shards": 1},
    "algorithm": {"filter_zero_variance": True},
    "dataset": {"select": {"pass_rate": [0, 1], "num_generations": 2, "weights": "online"}},
    "correct": {"reward": "format"},
}
"""Round 3 samples from policy 1, and draws its prompts by the scores of round 1."""


def killed_once(project: Project, tmp_path: Path, *arguments: str, spared: tuple[str, ...] = (), **changes) -> set[str]:
    """Kills the first call of each stage that is not spared until Snakemake has written its targets; returns the killed
    stages.
    """
    marks, shim = tmp_path / "marks", tmp_path / "shim"
    marks.mkdir()
    shim.mkdir()
    for stage in spared:
        (marks / stage).touch()
    killer = shim / "rloo"
    places = {"marks": str(marks), "tests": str(Path(forks.__file__).parent), "address": forks.address()}
    killer.write_text(KILLER.format(python=sys.executable, short=SHORT, **places))
    killer.chmod(killer.stat().st_mode | stat.S_IXUSR)
    own = Path(sys.executable).parent
    project.environment["PATH"] = os.pathsep.join([str(shim), str(own), os.environ["PATH"]])
    for _ in range(2 * len(STAGES)):
        outcome = project.snakemake("--cores", "2", "--keep-going", *arguments, **changes)
        if outcome.returncode == 0:
            break
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert not list(project.folder.rglob("*.tmp"))
    return {mark.name.removesuffix(".killed") for mark in marks.glob("*.killed")} - SHORT


def prompts_of(project: Project, number: int) -> list[str]:
    """The prompts that a round sampled, in order."""
    from rloo_pipeline.artifacts import tables

    folder = project.folder / "results" / "mini" / "rounds" / f"{number:05d}" / "rollouts"
    ids: list[str] = tables.read_all(sorted(folder.glob("*.parquet")), "rollouts")["prompt_id"].to_pylist()
    return ids[::4]


def drawn(project: Project, number: int, by: int) -> list[str]:
    """The prompts that a round draws by the scores until round `by`, without the workflow's own selection."""
    from rloo_pipeline.artifacts import prompt_counts, tables
    from rloo_pipeline.artifacts.prompt_set import PromptSet
    from rloo_pipeline.data.prompts_of_round import after_round, draw, uncertainty
    from rloo_pipeline.seeds import derive

    run = project.folder / "results" / "mini"
    counts = prompt_counts.read(sorted((run / "warmstart" / "difficulty").glob("*.parquet")), 0)
    for round_ in range(1, by + 1):
        folder = run / "rounds" / f"{round_:05d}"
        shards = sorted((folder / "scores").glob("*.parquet"))
        scores = tables.read_all([*shards, folder / "refill" / "scores.parquet"], "scores").to_pylist()
        groups = [scores[first : first + 4] for first in range(0, len(scores), 4)]
        right = {group[0]["prompt_id"]: sum(row["scores/format"] >= 1 for row in group) for group in groups}
        counts = after_round(counts, {name: prompt_counts.Counts(count, 4) for name, count in right.items()})
    weights = {
        name: uncertainty(counts[name]) for name in PromptSet(run / "prompts" / "train").table["prompt_id"].to_pylist()
    }
    return draw(weights, 16, derive(derive(1, "prompts"), number))


@pytest.mark.long
def test_each_stage_killed_once_ends_with_the_same_bytes(project, finished, tmp_path) -> None:
    """No worker runs a stage: the killed process is the one that writes, and a run without workers has the bytes of one
    with workers. The next test kills stages that workers run.
    """
    killed = killed_once(project, tmp_path, workers="never", rounds=1)
    assert killed == set(STAGES), "a short stage may be through before it is killed"
    for pattern in (
        "prompts/**/*",
        "policies/0000[01]/*",
        "rounds/00001/*/**/*",
        "evaluation/warmstart/*",
        "warmstart/*",
    ):
        assert project.files(pattern) == finished.files(pattern) != {}
    assert project.files("rounds/00001/[!d]*.*") == finished.files("rounds/00001/[!d]*.*") != {}, "but the diagnosis"


@pytest.mark.long
def test_rounds_with_a_lag_whose_stages_are_killed_have_the_same_bytes(project, finished, tmp_path) -> None:
    undisturbed = Project(tmp_path / "undisturbed")
    arguments = ("--", "results/mini/policies/00002", "results/mini/rounds/00003/rollouts/000.parquet")
    for one in (undisturbed, project):
        one.take(finished, *AFTER_POLICY_0)
    outcome = undisturbed.snakemake("--cores", "1", *arguments, **LAG)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    stages = {"checks", "difficulty", "rollout", "score", "refill", "reference", "update"}
    assert killed_once(project, tmp_path, *arguments, **LAG) == stages
    refills = undisturbed.files("rounds/*/refill/rollouts.parquet").values()
    assert any(pq.read_table(io.BytesIO(table)).num_rows for table in refills), "else no refill samples"
    for pattern in ("policies/*/*", "rounds/**/*", "warmstart/difficulty/*"):
        assert project.files(pattern) == undisturbed.files(pattern) != {}
    assert prompts_of(project, 3) == drawn(project, 3, by=1) != drawn(project, 3, by=2)


@pytest.mark.long
def test_rounds_that_carry_completions_over_have_the_same_bytes_after_kills_and_with_other_shards(
    project, finished, tmp_path
) -> None:
    """Kills the first update and the rollouts of the second round, which go on with completions of the first."""
    changes = {"rollout": {"token_budget": 16}}
    target = ("--", "results/mini/policies/00002")
    two_shards, one_shard = (Project(tmp_path / name).take(finished, *AFTER_POLICY_0) for name in ("two", "one"))
    for one, shards in ((two_shards, 2), (one_shard, 1)):
        outcome = one.snakemake("--cores", "1", *target, **merged(changes, {"rollout": {"shards": shards}}))
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    project.take(two_shards, *AFTER_FIRST_TABLES)
    assert killed_once(project, tmp_path, *target, spared=("score", "reference"), **changes) == {"rollout", "update"}
    assert project.files("policies/*/*") == two_shards.files("policies/*/*") == one_shard.files("policies/*/*") != {}
    assert project.files("rounds/**/*") == two_shards.files("rounds/**/*") != {}
    tables = [pq.read_table(io.BytesIO(table)) for table in project.files("rounds/00002/rollouts/*").values()]
    segments = [segment for table in tables for row in table["segments"].to_pylist() for segment in row]
    assert {segment["policy_round"] for segment in segments} == {0, 1}, "else no completion goes on"


@pytest.mark.long
def test_rounds_whose_processes_share_sequences_have_the_same_bytes_after_kills(project, finished, tmp_path) -> None:
    """Kills the reference and the updates, since only these share sequences; samples and scores of the first round are
    there.
    """
    changes = {"deepspeed": {"processes": 2, "sequence_parallel": 2}}
    target = ("--rerun-triggers=mtime", "--", "results/mini/policies/00002")
    undisturbed = Project(tmp_path / "undisturbed")
    for one in (project, undisturbed):
        one.take(finished, *AFTER_FIRST_TABLES, "rounds/00001/reference")
    outcome = undisturbed.snakemake("--cores", "1", *target, **changes)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    killed = killed_once(project, tmp_path, *target, spared=("rollout", "score"), **changes)
    assert killed == {"reference", "update"}
    for pattern in ("policies/*/*", "rounds/**/*", "trainer/00002/state/*"):
        assert project.files(pattern) == undisturbed.files(pattern) != {}
    assert lineage.facts_of(undisturbed.folder / "results" / "mini" / "trainer" / "00002")["world"] == "2"
    by_one, by_two = (
        json.loads(one.files("rounds/00001/metrics.json").popitem()[1]) for one in (finished, undisturbed)
    )
    assert by_two["grad_norm"] == pytest.approx(by_one["grad_norm"], rel=1e-3)
    assert by_two["kl/sequence_mean"] == pytest.approx(by_one["kl/sequence_mean"], rel=1e-3)


@pytest.mark.long
def test_a_killed_snakemake_goes_on_and_then_a_longer_run_where_it_ended_and_shards_change_no_policy(
    project, finished
) -> None:
    """Two rounds of two shards in one call give the policies of two rounds of one shard in several calls, as the
    learning rate has its own horizon.
    """
    one_round = {"rounds": 1, "rollout": {"shards": 1}}
    project.take(finished, *AFTER_POLICY_0).configure(**one_round)
    arguments = ("--cores", "2", "--", "results/mini/policies/00001")
    run = project.folder / "results" / "mini"
    started = project.start(*arguments)
    wait_until(lambda: (run / "logs" / "update" / "00001.log").exists() or started.poll() is not None)
    assert started.poll() is None
    started.kill()
    started.wait()
    outcome = project.snakemake(*arguments, **one_round)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "cleared the lock of a killed run" in outcome.stdout + outcome.stderr
    outcome = project.snakemake("--cores", "2", "--", "results/mini/policies/00002", rollout={"shards": 1})
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    # the manifest of a state names the digest of train.parquet, whose facts name the shards
    for pattern in ("policies/*/*", "trainer/00002/state/*", "trainer/00002/carried.json"):
        assert project.files(pattern) == finished.files(pattern) != {}
