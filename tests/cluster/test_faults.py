"""Faults on a cluster, after which the run continues to the same bytes."""

import re
import shutil
import subprocess

import pytest
from helpers import mini
from slurm_project import GO_ON, PATIENCE, SCORES, ask, wait_until

pytestmark = pytest.mark.slow

SLOW_FIRST = '''
import pathlib, time

def slow_first(completions, **_):
    """The first call waits until it may continue."""
    folder = pathlib.Path({folder!r})
    try:
        (folder / "at work").touch(exist_ok=False)
    except FileExistsError:
        return [0.0] * len(completions)
    while not (folder / "go on").exists():
        time.sleep(0.5)
    return [0.0] * len(completions)
'''

LATER = ("--begin=now+1hour", "--output=/dev/null", "--wrap=true")
"""Arguments of sbatch for a job that waits."""


def held(cluster) -> list:
    """Rewards of which one waits in its first call for the file `go on`."""
    (cluster.folder / "slow.py").write_text(SLOW_FIRST.format(folder=str(cluster.folder)))
    return [*mini()["rewards"], {"function": "slow.py:slow_first", "weight": 0, "timeout": 1200}]


def start_held(cluster, target: str) -> subprocess.Popen[str]:
    """Starts the command, and waits until a job that scores is at work."""
    started = cluster.start(*GO_ON, "--retries=0", "--", target, rewards=held(cluster))
    cluster.until(started, (cluster.folder / "at work").exists, "the job is at work")
    return started


def test_a_node_that_does_not_see_the_image_says_so(cluster, finished) -> None:
    """The image is removed while the only job is at work in it, so the next job does not find it."""
    cluster.at_round_1(finished, "policies/00001", "rounds/00001/scores/000.parquet")
    started = start_held(cluster, "results/mini/policies/00001")
    (cluster.folder / "images").unlink()
    (cluster.folder / "go on").touch()
    assert started.wait(PATIENCE) == 1
    assert "no such image on" in cluster.logs()
    assert (cluster.folder / SCORES).exists()


def test_jobs_of_a_killed_controller_write_nothing_after_it_is_restarted(cluster, finished) -> None:
    cluster.at_round_1(finished, "rounds/00001/scores/000.parquet")
    started = start_held(cluster, SCORES)
    older_job, _ = cluster.running("score")
    started.kill()
    started.wait()
    record = cluster.folder / ".snakemake" / "rloo-mini.jobs"
    name = ask("squeue", "-h", f"--jobs={older_job}", "-o", "%j").strip()
    assert record.read_text() == f"{name} {cluster.folder}\n"
    left = ask("sbatch", "--parsable", "--job-name=left", f"--chdir={cluster.folder}", *LATER).strip()
    record.write_text(f"left {cluster.folder}\n")  # jobs whose name it lacks go on
    again = cluster.start(*GO_ON, "--", SCORES, rewards=held(cluster), end=False)
    cluster.finish(again)
    assert "cleared the lock of a killed run" in cluster.output()
    assert f"left in SLURM's queue ({left})" in cluster.output()
    assert "JobState=CANCELLED" in ask("scontrol", "show", "job", left)
    assert cluster.holds(older_job), "the older job is still at work"
    written = (cluster.folder / SCORES).stat()
    (cluster.folder / "go on").touch()
    wait_until(lambda: "JobState=FAILED" in ask("scontrol", "show", "job", older_job), "the older job fails")
    assert (cluster.folder / SCORES).stat() == written
    assert "was started again" in cluster.logs()


def test_jobs_that_start_after_an_edit_of_the_configuration_have_the_one_of_their_run(cluster, finished) -> None:
    cluster.at_round_1(finished, "rounds/00001/scores", "policies/00001")
    started = start_held(cluster, "results/mini/policies/00001")
    cluster.configure(run="other")
    (cluster.folder / "go on").touch()
    cluster.finish(started)
    assert (cluster.folder / "results" / "mini" / "policies" / "00001").exists()
    assert not (cluster.folder / "results" / "other").exists()


def test_a_full_disk_gives_a_one_line_error_and_with_space_the_run_continues(cluster, finished) -> None:
    results = cluster.folder / "results"
    results.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", results], check=True)
    try:
        cluster.at_round_1(finished, "policies/00001", "rounds/00001/metrics.json", "rounds/00001/train.parquet")
        filler = results / "filler"
        filler.write_bytes(bytes(shutil.disk_usage(results).free - (256 << 10)))
        # without the metrics the update is not done, even where its policy was written before the disk was full
        target = (*GO_ON, "--retries=0", "--", "results/mini/policies/00001", "results/mini/rounds/00001/metrics.json")
        assert cluster.start(*target).wait(PATIENCE) == 1
        assert re.search("^rloo update: error: no space left in results/mini/", cluster.logs(), re.MULTILINE)
        assert not list(results.rglob(".*.tmp"))

        filler.unlink()
        cluster.finish(cluster.start(*target))
        for pattern in ("policies/00001/*", "rounds/00001/*.parquet"):
            assert cluster.files(pattern) == finished.files(pattern)
    finally:
        cluster.end()
        subprocess.run(["umount", "--lazy", results], check=True)
