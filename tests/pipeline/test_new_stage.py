"""A new stage is its file, its row in the table, its command and its rule: everything else finds it there."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import MINI, ROOT, Round

pytestmark = pytest.mark.long

STAGE = '''"""count_words: the number of words in the completions of a round → words.json."""

from pathlib import Path

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.config import Config


def count_words(config: Config, rollouts: list[Path], output: Path) -> None:
    """Counts words."""
    texts = [text for file in rollouts for text in tables.read(file, "rollouts")["completion"].to_pylist()]
    write_json(output, {"seed": config.seed, "words": sum(len(text.split()) for text in texts)})
'''
ROW = """
    _row(
        "count_words",
        "rounds/{round}/words.json",
        decides=_whole("seed"),
    ),
"""
BOX = """
    "count_words": (5, 315, ("rollout",)),
"""
COMMAND = """
    stage("count-words", "Count the words of a round's completions."),
"""
RULE = """

rule count_words:
    input:
        rollouts=shards_of("rollouts"),
    output:
        f"{RUN}/rounds/{{round}}/words.json",
    log:
        f"{RUN}/logs/count_words/{{round}}.log",
    resources:
        mem_mb=growing(1000),
        runtime=growing(10),
    params:
        **made_by("count-words"),
    shell:
        "rloo count-words --rollouts {input.rollouts} --output {output} --log={log}"
"""
FINISHED = """
    words = [f"results/{run}/rounds/{name}/words.json" for name in names_of(config)]
    return [*words, """
VIEWS = """
import json, sys
from pathlib import Path
from rloo_pipeline.cli.main import parser
from rloo_pipeline.config import provenance
from rloo_pipeline.config.loading import load
from rloo_pipeline.before_run import estimate
from rloo_pipeline.report import dag, run_progress

config = load(Path(sys.argv[1]))
print(json.dumps({
    "command": "count-words" in parser().commands.choices,
    "plan": estimate.jobs(config)["count-words"] == config.rounds,
    "watch": "count_words" in run_progress.SHOWN,
    "picture": "count_words" in dag.PLACES and ("rollout", "count_words") in dag.ARROWS,
    "reruns": config.params("count-words") == {"seed": config.seed},
    "source": provenance.source_digest("count-words", config),
}))
"""


def insert(file: Path, before: str, text: str) -> None:
    """Puts text before the first place that has these words."""
    content = file.read_text()
    assert before in content
    file.write_text(content.replace(before, text.strip("\n") + "\n" + before, 1))


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A copy of the sources with a further stage."""
    project = tmp_path_factory.mktemp("project")
    for part in ("rloo_pipeline", "workflow", "snakemake_logger_plugin_rloo", "snakemake_executor_plugin_rloo_slurm"):
        shutil.copytree(ROOT / part, project / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "Snakefile", project)
    package = project / "rloo_pipeline"
    (package / "stages" / "count_words.py").write_text(STAGE)
    insert(package / "stages" / "table.py", '    _row(\n        "pass_rates",', ROW)
    insert(package / "stages" / "table.py", '    "pass_rates": (', BOX)
    insert(package / "cli" / "stages.py", '    stage("pass-rates",', COMMAND)
    rules = project / "workflow" / "rules"
    (rules / "rounds.smk").write_text((rules / "rounds.smk").read_text() + RULE)
    inputs = (rules / "inputs.smk").read_text()
    returned = 'pages = [f"results/{run}/pages/{number:05d}.json" for number in PAGES[run]]\n    return ['
    assert returned in inputs
    (rules / "inputs.smk").write_text(inputs.replace(returned, returned.removesuffix("\n    return [") + FINISHED))
    return project


def call(project: Path, *argv: object) -> str:
    """What a Python process prints that imports the copy."""
    outcome = subprocess.run(
        [sys.executable, *map(str, argv)],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return outcome.stdout + outcome.stderr


def test_the_command_line_plan_live_view_picture_and_provenance_know_a_new_stage(project) -> None:
    views = json.loads(call(project, "-c", VIEWS, MINI))
    source = views.pop("source")
    assert all(views.values()), views
    stage = project / "rloo_pipeline" / "stages" / "count_words.py"
    stage.write_text(STAGE.replace("len(text.split())", "text.count(' ') + 1"))
    assert json.loads(call(project, "-c", VIEWS, MINI))["source"] != source
    stage.write_text(STAGE)


def test_snakemake_runs_it_and_the_command_works(project, tmp_path, tiny_model) -> None:
    planned = call(project, "-m", "snakemake", "-n", "--quiet", "rules", "--cores", "1", "--configfile", MINI)
    assert "count_words" in planned
    a_round = Round(tmp_path / "results" / "mini", tiny_model)
    a_round.alike = {"completion": "two words"}
    a_round.write(1)
    shards = sorted((a_round.run / "rounds" / "00001" / "rollouts").iterdir())
    output = a_round.run / "rounds" / "00001" / "words.json"
    call(project, "-m", "rloo_pipeline", "count-words", "--rollouts", *shards, "--output", output)
    assert json.loads(output.read_text())["words"] == 2 * 2 * 8 * 4, (
        "two words in each sample of two shards with 8 groups of 4"
    )
