"""`refill` samples further groups until as many teach as an update trains on, or the limit is reached."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import Round, done, rloo, succeeded, write_prompts

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Rollout
from rloo_pipeline.report.run_tables import read_round
from rloo_pipeline.seeds import derive, rows_of_round

pytestmark = [pytest.mark.slow, pytest.mark.long]

REWARD = """
def apart(teaches, **_):
    return [float(teaches[0] and place % 2) for place in range(len(teaches))]
"""
GROUPS, K = 16, 4
ROWS = [
    {"prompt_id": f"p{row}", "prompt": f"{row}+1=", "prompt_ids": [4 + row % 10, 5, 6], "teaches": row % 3 == 0}
    for row in range(60)
]
FIRST = {ROWS[row]["prompt_id"] for row in rows_of_round(len(ROWS), GROUPS, 1, derive(1, "prompts"))}


class Refilled(Round):
    """A round of which the first `taught` groups teach, with prompts that a refill can sample."""

    def __init__(self, folder: Path, model: Path, teaching: int, refill: int, **changes) -> None:
        reward = folder / "reward.py"
        folder.mkdir()
        reward.write_text(REWARD)
        rewards = [{"function": f"{reward}:apart", "name": "answer"}]
        algorithm = {"filter_zero_variance": True, **changes}
        super().__init__(
            folder / "run", model, rewards=rewards, algorithm=algorithm,
            rollout={"refill": refill, "max_completion_length": 8},
        )  # fmt: skip
        self.prompts = folder / "prompts"
        self.prompts.mkdir()
        write_prompts(self.prompts, ROWS)
        self.write(1)
        for place in range(2):
            self._teach(place, max(0, min(GROUPS // 2, teaching - place * GROUPS // 2)))

    def _teach(self, shard: int, teaching: int) -> None:
        file = self._table(1, "scores", shard)
        scores = tables.read(file, "scores")
        rows = scores.to_pylist()
        for place, row in enumerate(rows):
            row["reward"] = row["scores/answer"] = float(place < teaching * K and place % 2)
        tables.save(file, pa.Table.from_pylist(rows, schema=scores.schema))

    def one_shard(self) -> "Refilled":
        """Puts the tables of both shards into one, which is then the only shard."""
        for kind in ("rollouts", "scores"):
            shards = [tables.read(self._table(1, kind, shard), kind) for shard in range(2)]
            about = tables.footer(shards[0])
            if kind == "scores":
                about["rollouts"] = tables.footer(tables.read(self._table(1, "rollouts", 0), "rollouts"))["digest"]
            tables.save(self._table(1, kind, 0), pa.concat_tables(shards).replace_schema_metadata(about))
        return self

    def file(self, kind: str) -> Path:
        return self.run / "rounds" / "00001" / "refill" / f"{kind}.parquet"

    def refill(self, shards: int = 2) -> None:
        """Runs the stage, and that for its reference log-probs."""
        paths = [[self._table(1, kind, shard) for shard in range(shards)] for kind in ("rollouts", "scores")]
        log = f"--log={self.run / 'refill.log'}"
        done(
            *("refill", "--prompts", self.prompts, "--policy", self.model, "--round", 1, "--rollouts", *paths[0]),
            *("--scores", *paths[1], "--output", self.file("rollouts"), "--output-scores", self.file("scores"), log),
        )
        files = ("--rollouts", self.file("rollouts"), "--output", self.file("reference"))
        done("reference", "--policy", self.model, *files)
        reference = tables.read(self.file("reference"), "reference")
        about = {key: value for key, value in tables.footer(reference).items() if key != "policy"}
        tables.save(self.file("reference"), reference.replace_schema_metadata(about))  # the made-up ones have none

    def update_arguments(self, number: int = 1) -> tuple[object, ...]:
        """Trains on the refill too, where there is one."""
        arguments = list(super().update_arguments(number))
        for kind in ("rollouts", "scores", "reference") if self.file("rollouts").exists() else ():
            arguments.insert(arguments.index(f"--{kind}") + 3, self.file(kind))
        return tuple(arguments)

    def train(self) -> dict[str, float | None]:
        succeeded(self.update())
        return json.loads((self.run / "rounds" / "00001" / "metrics.json").read_text())

    def sampled(self) -> list[str]:
        """Prompts of the refill, in order."""
        return pq.read_table(self.file("rollouts"))["prompt_id"].to_pylist()[::K]

    def refills(self) -> int:
        return int(tables.footer(tables.read(self.file("rollouts"), "rollouts"))["refills"])


def expected(teaching: int, refill: int, flags: Sequence[bool]) -> tuple[int, int]:
    """Prompts and times that a refill samples, where the prompts after one another teach or not."""
    sampled = times = 0
    while times < refill and (now := teaching + sum(flags[:sampled])) < GROUPS:
        share = now / (GROUPS + sampled)
        sampled += min(GROUPS, math.ceil((GROUPS - now) / share)) if share else GROUPS
        times += 1
    return sampled, times


def test_it_samples_what_is_missing_and_the_update_trains_on_groups_that_teach(tmp_path, tiny_model) -> None:
    run = Refilled(tmp_path / "two", tiny_model, teaching=12, refill=3)
    run.refill()
    flags = [ROWS[int(name[1:])]["teaches"] for name in run.sampled()]
    assert any(flags), "else nothing is chosen"
    assert not all(flags), "else nothing is left out"
    assert (len(flags), run.refills()) == expected(12, 3, flags)
    assert len(set(run.sampled())) == len(flags)
    assert not FIRST & set(run.sampled()), "what the round has sampled is not sampled again"
    rollouts = pq.read_table(run.file("rollouts")).to_pylist()
    assert [row["seed"] for row in rollouts[:K]] == [
        derive(1, "round", 1, rollouts[0]["prompt_id"], sample) for sample in range(K)
    ]
    metrics = run.train()
    teaching = 12 + sum(flags)
    assert (metrics["groups/sampled"], metrics["groups/refilled"]) == (GROUPS + len(flags), len(flags))
    assert metrics["groups/teaching"] == teaching
    assert metrics["groups/tokens_per_teaching"] == metrics["num_completion_tokens"] / min(teaching, GROUPS)
    assert metrics["trained_completions"] == min(teaching, GROUPS) * K
    trained = pq.read_table(run.run / "rounds" / "00001" / "train.parquet").to_pylist()
    used = list(dict.fromkeys(row["prompt_id"] for row in trained if not row["masked"]))
    first = [f"{shard}-{group}" for shard in range(2) for group in range(8)][:12]
    assert used == [*first, *(name for name, flag in zip(run.sampled(), flags, strict=True) if flag)][:GROUPS]
    shown = read_round(run.run / "rounds" / "00001", Rollout(shards=2, refill=3))
    teaching_prompts = {row["prompt_id"] for row in shown.to_pylist() if row["advantage"]}
    assert (len(shown), teaching_prompts) == (metrics["groups/sampled"] * K, set(used))
    whole = Refilled(tmp_path / "one", tiny_model, teaching=12, refill=3).one_shard()
    whole.refill(shards=1)
    assert pq.read_table(whole.file("rollouts")).equals(pq.read_table(run.file("rollouts"))), "whatever the shards are"


def test_it_ends_at_its_limit_where_no_group_teaches(tmp_path, tiny_model) -> None:
    run = Refilled(tmp_path / "none", tiny_model, teaching=0, refill=2, beta=0)
    run.prompts = tmp_path / "dull"
    run.prompts.mkdir()
    write_prompts(run.prompts, [row | {"teaches": False} for row in ROWS])
    run.refill()
    assert (len(run.sampled()), run.refills()) == (2 * GROUPS, 2)
    metrics = run.train()
    assert (metrics["groups/sampled"], metrics["groups/refilled"], metrics["groups/teaching"]) == (48, 32, 0)
    assert (metrics["groups/tokens_per_teaching"], metrics["trained_completions"], metrics["loss"]) == (None, 0, None)


def test_where_enough_groups_teach_nothing_changes(tmp_path, tiny_model) -> None:
    plain, refilled = (
        Refilled(tmp_path / f"{name}", tiny_model, teaching=16, refill=2) for name in ("plain", "refill")
    )
    refilled.refill()
    assert (refilled.sampled(), refilled.refills()) == ([], 0)
    assert not pq.read_table(refilled.file("reference")).num_rows
    assert "0 of at most 2 refills, sampled in 0.00 s" in (refilled.run / "refill.log").read_text()
    metrics = refilled.train()
    assert metrics == plain.train()
    assert (metrics["groups/refilled"], metrics["groups/teaching"]) == (0, 16)
    assert Policy(refilled.policy(1)).digest == Policy(plain.policy(1)).digest


def test_scores_of_another_round_are_refused(tmp_path, tiny_model) -> None:
    run = Refilled(tmp_path / "wrong", tiny_model, teaching=16, refill=2)
    files = [run._table(1, kind, 0) for kind in ("rollouts", "scores")]
    arguments = ("refill", "--prompts", run.prompts, "--policy", tiny_model, "--round", 2)
    outputs = ("--output", run.file("rollouts"), "--output-scores", run.file("scores"))
    outcome = rloo(*arguments, "--rollouts", files[0], "--scores", files[1], *outputs)
    assert outcome.returncode == 1
    assert "rollouts/000.parquet" in outcome.stderr
    assert "delete it and run again" in outcome.stderr
