"""Shared by the tests: the command `rloo`, configurations, synthetic rounds, copies of the project."""

import contextlib
import io
import json
import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

import forks
import psutil
import pytest
import skipped_tests
import yaml

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config.section import merge as merged

ROOT = Path(__file__).parent.parent
MINI = ROOT / ".test" / "config" / "config.yaml"
GSM8K = Path(os.environ.get("GSM8K") or ROOT.parent / "shared" / "data" / "gsm8k")
needs_gsm8k = pytest.mark.skipif(not (GSM8K / "train.jsonl").is_file(), reason=skipped_tests.GSM8K)


def gsm8k_rows(name: str) -> list[dict[str, str]]:
    """The rows of one of GSM8K's files."""
    with (GSM8K / name).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def rloo(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `rloo ARGUMENTS` as a user would."""
    return forks.run("rloo_pipeline", [str(argument) for argument in arguments], {**os.environ, **environment})


def succeeded(outcome: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """The outcome of a command, which must have succeeded."""
    assert outcome.returncode == 0, outcome.stderr
    return outcome


def done(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `rloo ARGUMENTS`, which must succeed."""
    return succeeded(rloo(*arguments, **environment))


def printed(command: Callable[..., None], *arguments: object, width: int = 200, **named: object) -> str:
    """What the function of a command prints to a terminal of this width."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), mock.patch.dict(os.environ, COLUMNS=str(width)):
        command(*arguments, **named)
    return output.getvalue()


def executable(folder: Path, name: str, script: str) -> None:
    """A program of this name, for a PATH."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def wait_until(condition: Callable[[], object], seconds: float = 300.0) -> None:
    """Waits until `condition()` is true; long enough for a busy machine."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.02)


def has_ended(pid: int) -> bool:
    """Whether a process has ended; it may keep its number, since process 1 of a container waits for no process."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def mini(**changes) -> dict:
    """.test/config/config.yaml with some keys changed."""
    return merged(yaml.load(MINI.read_text(), yaml.CSafeLoader), changes)


class Round:
    """The tables of one round in a run's folder with synthetic completions, and the command that updates on them."""

    shards = 2
    alike: Mapping[str, object] = {}
    """What all rows of rollouts have in place of what is drawn."""

    def __init__(self, run: Path, model: Path, /, **changes) -> None:
        self.run, self.model = run, model
        run.mkdir(parents=True, exist_ok=True)
        (run / "config.yaml").write_text(yaml.safe_dump(mini(**changes)))

    def write(self, number: int, reward: float | None = None, answer: int | None = None, **facts: object) -> "Round":
        """Writes rollouts, scores (all equal to `reward`, if given) and reference log-probs of 16 groups of 4, in two
        shards; `facts` go into the footers of the tables. With `answer` the rollouts are episodes, in which a tool's
        answer of so many tokens follows the first token of the model.
        """
        from rloo_pipeline.artifacts import tables

        rng = random.Random(number)
        for shard in range(2):
            rows, scores, reference = [], [], []
            for group in range(8):
                prompt = [rng.randrange(4, 20) for _ in range(rng.randrange(3, 12))]
                for sample in range(4):
                    ids = [rng.randrange(4, 20) for _ in range(rng.randrange(1, 30))] + [2]
                    key = {"prompt_id": f"{shard}-{group}", "sample": sample}
                    logps = [-3.0 - rng.random() for _ in ids]
                    rows.append(
                        {**key, "prompt_ids": prompt, "completion_ids": ids, "completion": "", "sampling_logps": logps}
                        | {"finish_reason": rng.choice(["stop", "stop", "length"]), "seed": 0}
                    )
                    drawn = rng.choice([0.0, 1.0, 1.1, None])
                    score = drawn if reward is None else reward
                    scores.append({**key, "scores/answer": score, "reward": score, "seconds": 0.0, "error": None})
                    reference.append({**key, "reference_logps": [-3.0 - rng.random() for _ in ids]})
            about = {"run": "mini", "round": number, "shard": shard, "seed": 1, "policy": Policy(self.model).digest}
            about |= {"policy_round": number - 1} | facts
            schema = tables.ROLLOUTS if answer is None else tables.EPISODES
            rows = [row | self.alike for row in rows]
            rows = rows if answer is None else [with_answer(row, answer) for row in rows]
            rollouts = tables.build(rows, schema, "rollouts", **about)
            self._save(number, shard, rollouts, scores, reference)
        return self

    def _save(self, number: int, shard: int, rollouts, scores, reference) -> None:
        """Writes the tables of one shard; those of scores and reference log-probs name the rollouts' digest."""
        from rloo_pipeline.artifacts import tables

        tables.save(self._table(number, "rollouts", shard), rollouts)
        about = tables.facts_about(tables.read(self._table(number, "rollouts", shard), "rollouts"))
        schema = tables.scores_schema(["answer"])
        tables.write(self._table(number, "scores", shard), scores, schema, "scores", **about)
        tables.write(self._table(number, "reference", shard), reference, tables.REFERENCE, "reference", **about)

    def _sampled_from(self, number: int, start: Path) -> None:
        """Makes the rollouts of a round say that they are of the policy that its update starts from, if no lag has them
        of an older one: they were written before that policy was. Damaged files stay as they are.
        """
        from rloo_pipeline.artifacts import tables
        from rloo_pipeline.errors import UserError

        for shard in range(self.shards):
            try:
                files = {kind: self._table(number, kind, shard) for kind in ("rollouts", "scores", "reference")}
                rollouts, scores, reference = (tables.read(file, kind) for kind, file in files.items())
                facts = tables.footer(rollouts) | {"policy": Policy(start).digest}
            except UserError:
                continue
            if facts["policy_round"] == str(number - 1) and facts != tables.footer(rollouts):
                self._save(number, shard, rollouts.replace_schema_metadata(facts), scores, reference)

    def _table(self, number: int, kind: str, shard: int) -> Path:
        return self.run / "rounds" / f"{number:05d}" / kind / f"{shard:03d}.parquet"

    def update(self, number: int = 1) -> subprocess.CompletedProcess[str]:
        """Trains policy `number`."""
        return rloo(*self.update_arguments(number))

    def update_by_ranks(self, number: int = 1, count: int = 2) -> list[subprocess.CompletedProcess[str]]:
        """Trains policy `number` with ranks that no stage has started. Returns the outcome of each rank."""
        from rloo_pipeline.artifacts import fence

        token_file = self.run / "held"  # ranks inherit the fencing token of the process that starts them
        token_file.write_text("here")
        arguments = [
            str(argument) for argument in self.update_arguments(number) if not str(argument).startswith("--log=")
        ]
        return forks.run_ranks("rloo_pipeline", arguments, count, **{fence.VARIABLE: f"here {token_file}"})

    def update_arguments(self, number: int = 1) -> tuple[object, ...]:
        """The command that trains policy `number`."""
        folder = self.run / "rounds" / f"{number:05d}"
        shards = {
            kind: [self._table(number, kind, shard) for shard in range(self.shards)]
            for kind in ("rollouts", "scores", "reference")
        }
        policy = self.model if number == 1 else self.policy(number - 1)
        self._sampled_from(number, policy)
        inputs = [argument for kind, files in shards.items() for argument in (f"--{kind}", *files)]
        return (
            *("update", "--round", number, "--policy", policy, *inputs, "--output", self.policy(number)),
            *("--trainer", self.run / "trainer", "--metrics", folder / "metrics.json"),
            *("--events", self.run / "tensorboard" / f"{number:05d}.tfevents"),
            *("--table", folder / "train.parquet", f"--log={self.run / 'logs' / f'update-{number}.log'}"),
        )

    def policy(self, number: int) -> Path:
        """The folder of a policy."""
        return self.run / "policies" / f"{number:05d}"

    def weights(self, number: int = 1) -> dict:
        """The weights of a policy by name."""
        from safetensors.torch import load_file

        files = self.policy(number).glob("*.safetensors")
        return {name: tensor for file in sorted(files) for name, tensor in load_file(file).items()}


def with_answer(row: dict, answer: int) -> dict:
    """A row of rollouts as an episode, with a tool's answer of `answer` tokens after its first token."""
    first, *rest = row["completion_ids"]
    places = [0, 1, 1 + answer, 1 + answer + len(rest)]
    turns = [
        {"start": start, "end": end, "role": role}
        for start, end, role in zip(places, places[1:], ("assistant", "tool", "assistant"), strict=False)
        if end > start
    ]
    return row | {
        "completion_ids": [first, *range(5, 5 + answer), *rest],
        "loss_mask": [True, *[False] * answer, *[True] * len(rest)],
        "turns": turns,
        "messages": "[]",
        "environment_reward": None,
        "environment_state": None,
        "tool_calls": 1,
        "tool_failures": 0,
    }


def write_prompts(folder: Path, rows: list[dict], part: str = "train") -> None:
    """Writes prompts as the stage `prompts` does."""
    from rloo_pipeline.artifacts.manifest import write_manifest
    from rloo_pipeline.artifacts.prompt_set import as_dataset

    as_dataset(rows).save_to_disk(str(folder / part))
    write_manifest(folder)


def require_sandbox(image: str = ""):
    """The sandbox of this machine; where there is none, the test is skipped, or fails in .ci/run."""
    from rloo_pipeline.user_code.sandbox import sandbox

    sandbox_or_reason = sandbox.search(image=image)
    if isinstance(sandbox_or_reason, str):
        (pytest.fail if os.environ.get("RLOO_REQUIRE_SANDBOX") else pytest.skip)(sandbox_or_reason)
    return sandbox_or_reason


def score_all(rewards, batch, samples, workers):
    """The results of reward functions, called by workers of their own, with a line of the log for each."""
    from rloo_pipeline.user_code.dispatch import WorkerPools
    from rloo_pipeline.user_code.score_batch import log_summary

    with WorkerPools(rewards, workers) as pools:
        results = pools.score(batch, samples)
    for reward, result in zip(rewards, results, strict=True):
        log_summary(reward, result)
    return results


def score(reward, batch) -> list[float | None]:
    """The scores of a reward function, where each row is a prompt of its own."""
    return score_all([reward], batch, [1] * len(batch.completions), 1)[0].scores


def staged(folder: Path, model: Path) -> Path:
    """Writes what `stage-assets` writes about a model, without data sets."""
    from rloo_pipeline.artifacts import assets

    folder.mkdir(parents=True)
    assets.write(folder, {"model": {"path": str(model), "revision": None}})
    return folder


PARTS = (
    *("Snakefile", "workflow", "rloo_pipeline", "config", "profiles", "requirements", "containers"),
    *("snakemake_executor_plugin_rloo_slurm", "snakemake_logger_plugin_rloo"),
)
SECOND_ROUND = ("results/mini/policies/00002", "results/mini/rounds/00002/held_out.json")
"""Targets that make all files of the rounds and policies of the run `mini`, and do not evaluate the last policy."""
PLAIN = "--logger-rloo-plain"
"""Option of Snakemake that gives its own output, which tests read."""


# a gate that ends the run `mini` after any round
STOP = {"cold_start": {"action": "stop", "rounds": 1, "zero_std": 0.01}}

# files of a run that depend on policy 0
AFTER_SFT = (
    *("warmstart", "policies/0000[12]", "rounds", "trainer", "tensorboard", "evaluation", "logs"),
    *("summary.json", "report.html"),
)

# files of a run that depend on its first update, which has its tables
AFTER_FIRST_TABLES = (
    *("policies/0000[12]", "rounds/00001/[!h]*.*", "rounds/00002", "trainer", "tensorboard/0*", "pages"),
    *("evaluation/final", "logs", "summary.json", "report.html"),
)


class Project:
    """A copy of the sources that a test may edit; a folder that exists is used unchanged."""

    def __init__(self, folder: Path) -> None:
        self.folder = self.made_in = folder
        self.environment = {**os.environ, "PYTHONPATH": str(folder)}
        if folder.exists():
            return
        folder.mkdir(parents=True)
        for part in PARTS:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, folder / part)
            else:
                shutil.copyfile(source, folder / part)

    def configure(self, **changes) -> Path:
        """Writes config/test.yaml: mini.yaml with some keys changed."""
        path = self.folder / "config" / "test.yaml"
        path.write_text(yaml.safe_dump(mini(**changes)))
        return path

    def take(self, other: "Project", *excluded: str) -> "Project":
        """Copies the run of another project without the files that match `excluded`, and Snakemake's metadata of it."""
        for part in ("results", ".snakemake"):
            shutil.copytree(other.folder / part, self.folder / part, symlinks=True)
        for pattern in excluded:
            for path in list((self.folder / "results" / "mini").glob(pattern)):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return self

    def snakemake(self, *arguments: str, plain: bool = True, **changes) -> subprocess.CompletedProcess[str]:
        """Runs snakemake as a user would, with the changed configuration; `plain` asks for Snakemake's own output."""
        self.configure(**changes)
        file = [] if "--configfile" in arguments else ["--configfile", "config/test.yaml"]
        options = [*([PLAIN] if plain else []), *file]
        return forks.run("snakemake", [*options, *arguments], self.environment, self.folder)

    def start(self, *arguments: str) -> "forks.Fork | subprocess.Popen[bytes]":
        """Starts snakemake with the written configuration; its output goes to `log` in the folder."""
        words = ["--configfile", "config/test.yaml", *arguments]
        return forks.start(forks.Command("snakemake", words, self.environment, self.folder), self.folder / "log")

    def planned(self, *arguments: str, **changes) -> set[str]:
        """The files that a dry run would write, relative to the run's folder."""
        outcome = self.snakemake("--dry-run", *arguments, **changes)
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr
        lines = re.findall(r"^    output: (.*)$", outcome.stdout + outcome.stderr, re.MULTILINE)
        files = (file.removesuffix(" (missing)") for line in lines for file in line.split(", "))
        return {file.split("/", 2)[2] for file in files}

    def files(self, pattern: str) -> dict[str, bytes]:
        """Files of the run and their bytes; tables of scores without the column of scoring seconds."""
        run = self.folder / "results" / "mini"
        files = (file for file in sorted(run.glob(pattern)) if file.is_file() and ".snakemake" not in file.name)
        return {str(file.relative_to(run)): without_seconds(file) for file in files}


def without_seconds(file: Path) -> bytes:
    """The bytes of a file; a table with a column `seconds` is rewritten without it, with the same footer and order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if file.suffix != ".parquet" or "seconds" not in pq.read_schema(file).names:
        return file.read_bytes()
    sink = pa.BufferOutputStream()
    pq.write_table(pq.read_table(file, partitioning=None).drop_columns("seconds"), sink)
    return sink.getvalue().to_pybytes()
