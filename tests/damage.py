"""Damages each artifact of a finished run in each way and runs the stage that reads it: `make damage` prints the table.

A stage has to end with one sentence that names the file (or its folder) and says what to do. Tables are also rewritten
with a right digest, where a value or a row is wrong.
"""

import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import forks
import numpy as np
from helpers import Project

from rloo_pipeline.artifacts.policy import Policy

RUN = Path("results") / "mini"
OUT = RUN / "damaged" / "cell"
POLICY, PROMPTS, ASSETS = (f"{RUN}/{name}" for name in ("policies/00000", "prompts", "assets"))


def _round(number: int, kind: str) -> list[str]:
    return [f"{RUN}/rounds/{number:05d}/{kind}/{shard:03d}.parquet" for shard in range(2)]


def _update(number: int, start: str) -> list[str]:
    outputs = ("metrics", "events", "table")
    arguments = ["update", "--round", f"{number}", "--policy", start, "--trainer", f"{RUN}/trainer"]
    for kind in ("rollouts", "scores", "reference"):
        arguments += [f"--{kind}", *_round(number, kind)]
    return arguments + [argument for name in outputs for argument in (f"--{name}", f"{OUT}/{name}")]


ROLLOUT = ["rollout", "--prompts", PROMPTS, "--policy", POLICY, "--round", "1", "--shard", "0"]
SCORE = ["score", "--prompts", PROMPTS, "--policy", POLICY, "--rollouts", _round(1, "rollouts")[0]]
SCORE_HELD_OUT = [*SCORE[:-1], _round(1, "rollouts")[1], "--held-out", _round(1, "held_out")[1], f"{OUT}/held_out"]
HELD_OUT = ["held-out", "--rollouts", *_round(1, "held_out"), "--scores", *_round(1, "scores/held_out")]
CHECKS = [
    "checks",
    "--assets",
    ASSETS,
    "--prompts",
    PROMPTS,
    "--policy",
    POLICY,
    "--probe",
    f"{RUN}/warmstart/probe.parquet",
]
DISTANCE = [
    "distance",
    "--completions",
    f"{RUN}/evaluation/final/completions.parquet",
    "--policy",
    f"{RUN}/policies/00002",
]
REPORT = ["report", "--summary", f"{OUT}/summary"]
PASS_RATES = "rounds/00001/pass_rates.parquet"
DIFFICULTY = [f"warmstart/difficulty/{shard:03d}.parquet" for shard in range(2)]


def _pass_rates(number: int, *earlier: str) -> list[str]:
    arguments = ["pass-rates", "--round", f"{number}", "--scores", *_round(number, "scores")]
    return [*arguments, "--earlier", *(f"{RUN}/{file}" for file in earlier)]


class Artifact(NamedTuple):
    """A file of a run, and who reads it."""

    file: str
    """Path in the run's folder."""
    sibling: str
    """A file of the same form."""
    reader: list[str]
    """The command that reads it, without `--output`."""


ARTIFACTS = (
    Artifact("assets/assets.json", "prompts/counts.json", ["prompts", "--assets", ASSETS]),
    Artifact(
        "assets/model/model.safetensors",
        "policies/00000/model.safetensors",
        ["warmstart", "--assets", ASSETS, "--prompts", PROMPTS],
    ),
    Artifact("assets/manifest.json", "prompts/manifest.json", ["warmstart", "--assets", ASSETS, "--prompts", PROMPTS]),
    Artifact("prompts/train/data-00000-of-00001.arrow", "prompts/eval/data-00000-of-00001.arrow", ROLLOUT),
    Artifact("prompts/manifest.json", "assets/manifest.json", SCORE),
    Artifact("policies/00000/model.safetensors", "policies/00002/model.safetensors", ROLLOUT),
    Artifact("policies/00000/tokenizer.json", "policies/00000/config.json", SCORE),
    Artifact(
        "policies/00000/manifest.json",
        "policies/00002/manifest.json",
        ["reference", "--policy", POLICY, "--rollouts", _round(1, "rollouts")[0]],
    ),
    Artifact("warmstart/probe.parquet", "evaluation/warmstart/completions.parquet", CHECKS),
    Artifact("warmstart/checks.json", "evaluation/final/summary.json", REPORT),
    Artifact("rounds/00001/rollouts/000.parquet", "rounds/00001/rollouts/001.parquet", _update(1, POLICY)),
    Artifact("rounds/00001/scores/000.parquet", "rounds/00002/scores/000.parquet", _update(1, POLICY)),
    Artifact("rounds/00001/held_out/001.parquet", "rounds/00001/rollouts/001.parquet", SCORE_HELD_OUT),
    Artifact(
        "rounds/00001/scores/held_out/001.parquet",
        "rounds/00002/scores/held_out/001.parquet",
        [*HELD_OUT, "--round", "1", "--events", f"{OUT}/events"],
    ),
    Artifact("rounds/00001/reference/000.parquet", "rounds/00001/reference/001.parquet", _update(1, POLICY)),
    Artifact(DIFFICULTY[0], DIFFICULTY[1], _pass_rates(1, *DIFFICULTY)),
    Artifact(PASS_RATES, DIFFICULTY[0], _pass_rates(2, PASS_RATES)),
    Artifact("trainer/00002/carried.json", "prompts/counts.json", _update(3, f"{RUN}/policies/00002")),
    Artifact(
        "trainer/00002/manifest.json",
        "policies/00002/manifest.json",
        _update(3, f"{RUN}/policies/00002"),
    ),
    Artifact(
        "trainer/00002/state/mp_rank_00_model_states.pt",
        "policies/00002/model.safetensors",
        _update(3, f"{RUN}/policies/00002"),
    ),
    Artifact("rounds/00001/metrics.json", "rounds/00002/metrics.json", ["gate", "--round", "1"]),
    Artifact("rounds/00001/train.parquet", "rounds/00002/train.parquet", REPORT),
    Artifact(
        "evaluation/final/completions.parquet",
        "evaluation/warmstart/completions.parquet",
        [*DISTANCE, "--reference", POLICY],
    ),
    Artifact("evaluation/final/greedy.parquet", "evaluation/final/completions.parquet", REPORT),
    Artifact("evaluation/final/summary.json", "evaluation/warmstart/summary.json", REPORT),
    Artifact("evaluation/final/distance.json", "evaluation/final/summary.json", REPORT),
)


def truncate(path: Path, _: Path) -> None:
    """Leaves the first half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path, _: Path) -> None:
    """Flips a bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 8
    path.write_bytes(content)


def empty(path: Path, _: Path) -> None:
    """Leaves nothing."""
    path.write_bytes(b"")


def swap(path: Path, sibling: Path) -> None:
    """Puts a sibling in its place."""
    path.write_bytes(sibling.read_bytes())


def reshape(path: Path, _: Path) -> None:
    """Takes a row, a token or part of a tensor away, with a right digest in tables; of JSON it leaves {}."""
    if path.suffix == ".parquet":
        _rewrite_table(path, lambda values: values[:-1] if isinstance(values, list) else values, rows=-1)
    elif path.suffix == ".arrow":
        _rewrite_arrow(path)
    elif path.suffix == ".json":
        path.write_text("{}")
    else:
        _rewrite_tensor(path, lambda tensor: tensor.reshape(-1)[:-1].clone())


def poison(path: Path, _: Path) -> None:
    """Makes a number NaN, with a right digest in tables."""
    if path.suffix == ".parquet":
        _rewrite_table(path, lambda values: [np.nan, *values[1:]] if isinstance(values, list) else np.nan)
    elif path.suffix == ".json":
        path.write_text(re.sub(r"(: )-?\d[\d.e+-]*|$", r"\1NaN", path.read_text(), count=1))
    else:
        _rewrite_tensor(path, lambda tensor: tensor * np.nan)


DAMAGES: dict[str, Callable[[Path, Path], None]] = {
    "truncated": truncate,
    "a bit flipped": flip,
    "empty": empty,
    "a sibling": swap,
    "wrong shape": reshape,
    "NaN": poison,
}


def applies(artifact: Artifact, damage: str) -> bool:
    """Whether the artifact can have the damage. Prompts and tokenizers hold no number that could be NaN, a table of
    pass rates is whole with any number of prompts, and a trainer state of something else is not read: the update
    trains the rounds again.
    """
    if artifact.file == "trainer/00002/manifest.json" and damage == "a sibling":
        return False
    if damage == "wrong shape":
        return artifact.reader[0] != "pass-rates"
    return damage != "NaN" or not artifact.file.endswith((".arrow", "tokenizer.json", "assets.json"))


def _rewrite_table(path: Path, change: Callable[[object], object], rows: int | None = None) -> None:
    """Changes the first number of a table, or the first list of numbers, and takes rows away."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from rloo_pipeline.artifacts import tables

    table = pq.read_table(path, partitioning=None)
    for place, field in enumerate(table.schema):
        inner = field.type.value_type if pa.types.is_list(field.type) else field.type
        if pa.types.is_floating(inner) and (values := table[field.name].to_pylist())[0] is not None:
            values[0] = change(values[0])
            table = table.set_column(place, field, pa.array(values, field.type))
            break
    tables.save(path, table.slice(0, len(table) + (rows or 0)) if field.name != "reference_logps" else table)


def _rewrite_arrow(path: Path) -> None:
    import pyarrow as pa

    table = pa.ipc.open_stream(path.read_bytes()).read_all().slice(1)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def _rewrite_tensor(path: Path, change: Callable[..., object]) -> None:
    """Changes the first tensor of numbers in a file of weights or of a trainer state."""
    import torch
    from safetensors.torch import load_file, save_file

    content = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=False)
    queue = [content]
    while queue:
        holder = queue.pop(0)
        for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1:
                holder[key] = change(value)
                queue.clear()
                break
            if isinstance(value, (dict, list)):
                queue.append(value)
    if path.suffix == ".safetensors":
        save_file(content, path, {"format": "pt"})
    else:
        torch.save(content, path)


@contextmanager
def damaged(run: Path, artifact: Artifact, damage: str) -> Iterator[None]:
    """Damages the artifact in the block."""
    path = run / artifact.file
    before = path.read_bytes()
    try:
        DAMAGES[damage](path, run / artifact.sibling)
        assert path.read_bytes() != before, f"{damage} leaves {path} as it was"
        yield
    finally:
        path.write_bytes(before)


def prepare(project: Project) -> None:
    """Writes into a run of two rounds what only other runs have: tables of a third round, and pass rates."""
    _write_third_round(project)
    _write_pass_rates(project)


def _write_third_round(project: Project) -> None:
    """Writes tables of a third round: those of the second, as if policy 2 had been sampled."""
    import pyarrow.parquet as pq

    from rloo_pipeline.artifacts import tables

    digest = Policy(project.folder / RUN / "policies" / "00002").digest
    for shard in range(2):
        rollouts, *others = (
            [project.folder / _round(number, kind)[shard] for number in (2, 3)]
            for kind in ("rollouts", "scores", "reference")
        )
        about = {"round": "3", "policy": digest, "policy_round": "2"}
        for old, new in (rollouts, *others):
            table = pq.read_table(old, partitioning=None)
            tables.save(new, table.replace_schema_metadata({**tables.footer(table), **about}))
            about = {"round": "3", "rollouts": tables.footer(tables.read(rollouts[1], "rollouts"))[tables.DIGEST]}


def _write_pass_rates(project: Project) -> None:
    """Writes the tables of a run with `dataset.select`: pass rates of policy 0, and after round 1."""
    from rloo_pipeline.artifacts import prompt_counts, tables

    for shard, file in enumerate(DIFFICULTY):
        rollouts = tables.read(project.folder / _round(1, "rollouts")[shard], "rollouts")
        counts = dict.fromkeys(rollouts["prompt_id"].to_pylist(), prompt_counts.Counts(1.0, 4.0))
        prompt_counts.write(
            project.folder / RUN / file, counts, 0, shard=shard, policy=tables.footer(rollouts)["policy"]
        )
    arguments = [*_pass_rates(1, *DIFFICULTY), "--output", f"{RUN}/{PASS_RATES}"]
    outcome = forks.run("rloo_pipeline", arguments, project.environment, project.folder)
    assert outcome.returncode == 0, outcome.stderr


def sentence(project: Project, artifact: Artifact, damage: str) -> tuple[str, str]:
    """The stage that finds the damage, and its sentence with FILE and FOLDER for what it names.

    Raises:
        AssertionError: the stage does not end, or not with one sentence that names the file and says what to do.
    """
    with damaged(project.folder / RUN, artifact, damage):
        arguments = [*artifact.reader, "--output", f"{OUT}/out"]
        outcome = forks.run("rloo_pipeline", arguments, project.environment, project.folder)
    lines = [line for line in outcome.stderr.splitlines() if line.startswith("rloo ")]
    where = f"{artifact.file}, {damage}: {outcome.stderr[-2000:]}"
    assert outcome.returncode == 1, where
    assert len(lines) == 1, where
    assert "Traceback" not in outcome.stderr, where
    stage, _, text = lines[0].removeprefix("rloo ").partition(": error: ")
    assert str((RUN / artifact.file).parent) in text or str(RUN / artifact.file.split("/")[0]) in text, where
    assert re.search(r"delete \S+ and run again", text), where
    return stage, text


def _generalized(text: str, artifact: Artifact) -> str:
    """A sentence with FILE for the artifact, FOLDER for a folder, and … for what differs from run to run."""
    text = re.sub(rf"\S*/(?={RUN}/)", "", text).replace(str(RUN / artifact.file), "FILE")
    text = re.sub(rf"{RUN}/[\w./-]*\.\w+", "ANOTHER FILE", text)
    text = re.sub(rf"{RUN}/[\w/-]*", "FOLDER", text)
    text = re.sub(r"\b(?=\w*\d)[0-9a-f]{12,}\b", "…", text)
    return re.sub(r"\((?!its).*?\)+", "(…)", re.sub(r"\b\d+\b", "N", text))


def table(project: Project) -> list[str]:
    """A table in Markdown: a number for each sentence, which are listed below."""
    numbers: dict[str, int] = {}
    lines = [f"| artifact | read by | {' | '.join(DAMAGES)} |", f"|---|---|{'---|' * len(DAMAGES)}"]
    for artifact in ARTIFACTS:
        cells = []
        for damage in DAMAGES:
            if not applies(artifact, damage):
                cells.append("–")
                continue
            _, text = sentence(project, artifact, damage)
            key = _generalized(text, artifact)
            cells.append(str(numbers.setdefault(key, len(numbers) + 1)))
        lines.append(f"| `{artifact.file}` | `{artifact.reader[0]}` | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr)
    return [*lines, "", *(f"{number}. “{text}”" for text, number in numbers.items())]


def main() -> None:
    """Makes a run in a temporary folder and prints the table."""
    with tempfile.TemporaryDirectory() as folder:
        project = Project(Path(folder) / "project")
        outcome = project.snakemake("--cores", "1")
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr
        prepare(project)
        print("\n".join(table(project)))
    forks.close()


if __name__ == "__main__":
    main()
