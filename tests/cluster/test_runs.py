"""Whole runs on a real SLURM in the real image give the same bytes as on one machine."""

import hashlib
import os
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# of a first round, which is the same in a run of two; its policy is the last one, and so it is what is evaluated
RESULTS = ("prompts/**/*", "policies/0000[01]/*", "rounds/00001/**/*.parquet", "evaluation/warmstart/*", "warmstart/*")


def test_every_stage_as_a_job_in_the_image_gives_the_bytes_of_one_machine_and_the_page_names_it(
    cluster, finished, image
) -> None:
    """Also with an image outside of the working folder, as here."""
    cluster.finish(cluster.start(rounds=1))
    for pattern in RESULTS:
        assert cluster.files(pattern) == finished.files(pattern) != {}
    with image.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest in (cluster.folder / "results/mini/report.html").read_text()
    assert not (cluster.folder / ".cache").exists(), "the working folder is HOME in the image, and must stay clean"


def test_stages_in_the_image_need_no_network_and_keep_their_engines(cluster, finished) -> None:
    """Runs in a network namespace with nothing but loopback."""
    cluster.configure()
    arguments = ("--configfile=config/test.yaml", "--sdm=apptainer", "--cores=1", "results/mini/policies/00002")
    without_network = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    outcome = subprocess.run(
        [*without_network, sys.executable, "-m", "snakemake", *arguments],
        cwd=cluster.folder,
        env=cluster.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    for pattern in ("policies/*/*", "rounds/*/rollouts/*"):
        assert cluster.files(pattern) == finished.files(pattern)
    served = (cluster.folder / "results/mini/logs/workers/trainer-0.log").read_text()
    assert served.count("rloo update") == 2, "by an engine that stayed loaded in the image"


def test_another_image_reruns_the_stages_that_used_the_old_one(cluster, image) -> None:
    target = ("--cores", "1", "--sdm", "apptainer", "--", "results/mini/prompts")
    assert cluster.snakemake(*target).returncode == 0
    assert cluster.planned(*target) == set()
    other = cluster.folder / "other.sif"
    other.symlink_to(image)
    assert "prompts" in cluster.planned(*target, container={"image": "other.sif"})


def test_an_edit_of_the_sources_applies_in_the_image(cluster) -> None:
    """The host's package is bound over the package in the image."""
    stage = cluster.folder / "rloo_pipeline" / "stages" / "stage_assets.py"
    stage.write_text(stage.read_text().replace("def stage_assets(", "raise SystemExit('edited')\n\ndef stage_assets("))
    outcome = cluster.snakemake("--cores", "1", "--sdm", "apptainer", "--", "results/mini/assets")
    assert outcome.returncode == 1
    assert "edited" in (cluster.folder / "results/mini/logs/stage_assets.log").read_text()


def test_an_ordinary_user_runs_the_image(image, tmp_path) -> None:
    """Without root: the image is mounted in a user namespace."""
    place = shutil.copy(image, "/var/tmp/rloo-test.sif") if not os.access(image, os.R_OK) else image
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "env", "HOME=/tmp"]
    outcome = subprocess.run(
        [*user, "apptainer", "run", "--no-home", "--pwd", "/", str(place), "--version"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.strip() == "0.1.0"


def test_without_its_image_a_run_does_not_start(cluster) -> None:
    outcome = cluster.snakemake("--cores", "1", "--sdm", "apptainer", container={"image": "images/none.sif"})
    output = outcome.stdout + outcome.stderr
    assert outcome.returncode == 1
    assert "images/none.sif: no such image" in output
    assert "rloo images cuda" in output
    assert "Traceback" not in output
