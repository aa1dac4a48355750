"""A whole Snakemake on a machine with fake GPUs: how many stages use one at once, and which ones."""

import json
import sys
import uuid
from pathlib import Path

import pytest
from helpers import Project, executable, succeeded

STAGE = """
import json, os, sys, time
from pathlib import Path
from rloo_pipeline.runtime import gpu_claims

stage, *words = sys.argv[1:]
uses_gpu = stage not in ("stage-assets", "prompts", "score")
if uses_gpu:
    gpu_claims.claim(1, from_the_end=stage == "warmstart")
began = time.monotonic()
if uses_gpu and stage != "warmstart":  # which nothing runs beside
    Path(f"begun-{os.getpid()}").touch()
    while len(list(Path().glob("begun-*"))) < int(os.environ["AT_ONCE"]):
        time.sleep(0.05)
time.sleep(0.4)
for option, word in zip(words, words[1:]):
    if option in ("--output", "--held-out", "--greedy", "--summary") and stage != "score":
        path = Path(word)
        path.mkdir() if stage in ("stage-assets", "prompts", "warmstart") else path.touch()
row = [stage, os.environ["CUDA_VISIBLE_DEVICES"] if uses_gpu else None, began, time.monotonic()]
with open("rows.jsonl", "a") as rows:
    rows.write(json.dumps(row) + "\\n")
"""


@pytest.fixture
def project(tmp_path) -> Project:
    """One whose Snakemake believes in the GPUs, and whose `rloo` notes when it had which. Stages with a GPU wait until
    as many have begun as there are GPUs.
    """
    project = Project(tmp_path / "project")
    snakefile = project.folder / "Snakefile"
    fake = "from rloo_pipeline.runtime import devices\ndevices.has_gpu = lambda: True\n"
    snakefile.write_text(fake + snakefile.read_text())
    (tmp_path / "stage.py").write_text(STAGE)
    executable(tmp_path / "bin", "rloo", f'exec {sys.executable} {tmp_path}/stage.py "$@"')
    project.environment["PATH"] = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{project.environment['PATH']}"
    return project


def most_at_once(rows: list[list]) -> int:
    return max(sum(began <= start < ended for *_, began, ended in rows) for _, _, start, _ in rows)


@pytest.mark.parametrize("count", [1, 3])
def test_as_many_stages_use_gpus_at_once_as_there_are_and_each_has_its_own(project, count) -> None:
    test = uuid.uuid4().hex
    gpus = [f"{test}-{number}" for number in range(count)]
    project.environment |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "AT_ONCE": str(count)}
    targets = [f"results/mini/rounds/00001/rollouts/00{shard}.parquet" for shard in range(4)]
    targets += ["results/mini/warmstart/probe.parquet", "results/mini/evaluation/warmstart/summary.json"]
    succeeded(project.snakemake("--cores", "16", *targets, workers="never", rollout={"shards": 4}, vllm={"threads": 1}))
    rows = [json.loads(row) for row in (project.folder / "rows.jsonl").read_text().splitlines()]
    on_gpus = [row for row in rows if row[1]]
    assert most_at_once(on_gpus) == count
    for gpu in gpus:
        assert most_at_once([row for row in on_gpus if gpu in row[1].split(",")]) == 1
