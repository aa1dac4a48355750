"""No change of a table or of a JSON file goes unseen, and the tables of a round belong together."""

import contextlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rloo_pipeline.artifacts import files, round_tables, tables
from rloo_pipeline.artifacts.round_tables import RoundFiles
from rloo_pipeline.config import Rollout
from rloo_pipeline.errors import UserError
from rloo_pipeline.version import VERSION, __version__


def write_round(folder: Path, **changes: list) -> RoundFiles:
    """Writes a shard of 2 groups of 2 completions with scores and reference log-probs; `changes` replace columns."""
    columns = {
        "prompt_id": ["p0", "p0", "p1", "p1"],
        "sample": [0, 1, 0, 1],
        "prompt_ids": [[4, 5]] * 4,
        "completion_ids": [[6, 7, 2]] * 4,
        "completion": ["yes"] * 4,
        "sampling_logps": [[-0.5, -0.25, -1.0]] * 4,
        "finish_reason": ["stop"] * 4,
        "seed": [0] * 4,
        "reference_logps": [[-1.0, -1.0, -1.0]] * 4,
        "scores/answer": [1.0, 0.0, None, 1.0],
        "reward": [1.0, 0.0, None, 1.0],
        "seconds": [0.0] * 4,
        "error": [None] * 4,
    } | changes
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    places = RoundFiles(*([folder / f"{kind}.parquet"] for kind in ("rollouts", "scores", "reference")))
    about = {"run": "test", "round": 3, "shard": 0, "seed": 1, "policy": "abc"}
    schemas = {"rollouts": tables.ROLLOUTS, "scores": tables.scores_schema(["answer"]), "reference": tables.REFERENCE}
    for (kind, schema), (path,) in zip(schemas.items(), places[:3], strict=True):
        rows_of_schema = [{field.name: row.get(field.name) for field in schema} for row in rows]
        tables.write(path, rows_of_schema, schema, kind, **about)
        if kind == "rollouts":
            about = tables.facts_about(tables.read(path, kind))
    return places


EPISODE = {
    "prompt_id": "p0",
    "sample": 0,
    "prompt_ids": [4],
    "completion_ids": [5, 6, 7, 8],
    "completion": "",
    "sampling_logps": [-1.0, -1.0, -1.0],
    "finish_reason": "stop",
    "seed": 0,
    "loss_mask": [True, False, True, True],
    "turns": [(0, 1, "assistant"), (1, 2, "tool"), (2, 4, "assistant")],
    "messages": "[]",
    "environment_reward": None,
    "environment_state": None,
    "tool_calls": 1,
    "tool_failures": 0,
}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, None),
        ({"turns": [(0, 1, "assistant"), (2, 3, "assistant"), (3, 4, "assistant")]}, None),
        ({"loss_mask": [True, False, True]}, "row 1 has 3 values of loss_mask for 4 tokens"),
        ({"sampling_logps": [-1.0]}, "row 1 has 1 sampling_logps for 3 tokens that the model sampled"),
        ({"loss_mask": [False] * 4, "sampling_logps": []}, "row 1 has no token that the model sampled"),
        ({"finish_reason": "turns"}, "finish_reason 'turns' is not one of stop, length, abort"),
        ({"loss_mask": [True, True, False, True]}, "row 1 has turns that do not fit"),
        ({"turns": [(0, 1, "assistant"), (2, 5, "assistant")]}, "row 1 has turns that do not fit"),
        ({"turns": [(2, 4, "assistant"), (0, 1, "assistant")]}, "row 1 has turns that do not fit"),
        ({"turns": [(0, 1, "assistant"), (1, 2, "system"), (2, 4, "assistant")]}, "row 1 has turns that do not fit"),
    ],
)
def test_an_episode_that_contradicts_itself_is_refused(changes, sentence, tmp_path) -> None:
    path, rows = tmp_path / "rollouts.parquet", [EPISODE, EPISODE | {"sample": 1} | changes]
    rows = [
        row | {"turns": [dict(zip(("start", "end", "role"), t, strict=True)) for t in row["turns"]]} for row in rows
    ]
    tables.write(path, rows, tables.EPISODES, "rollouts", run="test")
    if sentence is None:
        assert tables.is_episodes(table := tables.read(path, "rollouts"))
        assert tables.sampled_lengths(table) == [3, 3]
        return
    with pytest.raises(UserError, match=rf"rollouts\.parquet: {sentence}.*; delete it and run again"):
        tables.read(path, "rollouts")


def test_a_flip_of_any_byte_of_a_table_is_seen(tmp_path) -> None:
    path = write_round(tmp_path).rollouts[0]
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        with pytest.raises(UserError, match=r"rollouts\.parquet: .*; delete it and run again"):
            tables.read(path, "rollouts", ["sample"])


def test_a_table_of_another_kind_or_version_or_one_that_was_written_anew_is_refused(tmp_path, monkeypatch) -> None:
    path = write_round(tmp_path).rollouts[0]
    with pytest.raises(UserError, match="holds 'rollouts', not 'scores'; delete it and run again"):
        tables.read(path, "scores")
    pq.write_table(tables.read(path, "rollouts"), path)
    with pytest.raises(UserError, match="has no digest, so it was changed since it was written"):
        tables.read(path, "rollouts")
    monkeypatch.setattr(tables, "SCHEMA_VERSION", "3")
    path = write_round(tmp_path).rollouts[0]
    monkeypatch.undo()
    with pytest.raises(UserError, match=f"schema version 3, but this program reads {tables.SCHEMA_VERSION}"):
        tables.read(path, "rollouts")


def test_a_table_with_a_large_footer_is_saved_and_read(tmp_path) -> None:
    schema = pa.schema([("reward", pa.float64())])
    tables.write(tmp_path / "rewards.parquet", [{"reward": 1.0}], schema, "rewards", about="0" * 100_000)
    assert tables.read(tmp_path / "rewards.parquet", "rewards")["reward"].to_pylist() == [1.0]


def test_a_flip_of_any_byte_of_a_json_file_is_seen_or_changes_nothing(tmp_path) -> None:
    path, value = tmp_path / "metrics.json", {"round": 3, "reward": 1e-05, "shares": {"4": [0.5, None]}}
    files.write_json(path, value)
    content = path.read_bytes()
    unseen = 0
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        with contextlib.suppress(UserError):
            assert files.read_artifact(path) == value
            unseen += 1
    assert unseen < 5


@pytest.mark.parametrize("text", ["{}", "[]", "", "null", "3", '{"a": 1', '{"blake2b": "x"}', "[" * 100_000])
def test_json_that_no_stage_wrote_gives_a_one_line_error(text, tmp_path) -> None:
    path = tmp_path / "assets.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"assets\.json.*; delete it and run again"):
        files.read_artifact(path)


def test_json_of_another_name_or_round_is_refused(tmp_path) -> None:
    path = tmp_path / "metrics.json"
    files.write_json(path, {"round": 3})
    assert files.read_artifact(path, round=3) == {"round": 3}
    with pytest.raises(UserError, match="its round is 3, but 4 is expected here"):
        files.read_artifact(path, round=4)
    path.rename(tmp_path / "checks.json")
    with pytest.raises(UserError, match="was changed"):
        files.read_artifact(tmp_path / "checks.json")


def test_a_round_is_read_with_what_belongs_to_it(tmp_path) -> None:
    read = write_round(tmp_path).read(8, run="test", round=3, policy="abc")
    assert [len(table) for table in (read.rollouts, read.scores, read.reference)] == [4, 4, 4]
    assert read.refilled == 0


@pytest.mark.parametrize(
    ("changes", "belongs", "sentence"),
    [
        ({}, {"round": 4}, r"rollouts\.parquet: its round is 3, but 4 is expected here"),
        ({}, {"policy": "abd"}, r"rollouts\.parquet: its policy is abc, but abd is expected here"),
        ({}, {"vocabulary": 7}, r"rollouts\.parquet: completion_ids from 2 to 7, but the policy's vocabulary has 7"),
        ({"prompt_ids": [[4], [-1], [4], [4]]}, {}, r"rollouts\.parquet: prompt_ids from -1 to 4"),
        ({"sampling_logps": [[-1.0, -1.0]] * 4}, {}, r"rollouts\.parquet: row 0 has 2 sampling_logps for 3 tokens"),
        ({"sample": [0, 1, 0, 0]}, {}, r"rollouts\.parquet: its rows are not groups of 2 completions"),
        (
            {"reference_logps": [[-1.0] * 3, [-1.0] * 2, [-1.0] * 3, [-1.0] * 3]},
            {},
            r"reference\.parquet: row 1 has 2 reference_logps for 3 tokens",
        ),
        (
            {"reference_logps": [[-1.0, float("nan"), -1.0]] * 4},
            {},
            r"reference\.parquet: reference_logps has values that are not finite",
        ),
        ({"reward": [1.0, float("inf"), None, 0.0]}, {}, r"scores\.parquet: reward has values that are not finite"),
    ],
)
def test_what_does_not_belong_together_gives_a_one_line_error(changes, belongs, sentence, tmp_path) -> None:
    with pytest.raises(UserError, match=f"{sentence}.*; delete it and run again"):
        write_round(tmp_path, **changes).read(**{"vocabulary": 8, **belongs})


def test_a_footer_says_which_version_wrote_the_table(tmp_path, monkeypatch) -> None:
    for version in (__version__, f"{__version__}+g0123456789ab"):
        monkeypatch.setenv(VERSION, version)
        [file] = write_round(tmp_path).rollouts
        assert tables.facts_in(file)["package_version"] == version


def test_scores_of_other_rollouts_are_refused(tmp_path) -> None:
    first, others = write_round(tmp_path / "a"), write_round(tmp_path / "b", seed=[1, 2, 3, 4])
    with pytest.raises(UserError, match=r"b/scores\.parquet: its rollouts is .* is expected here"):
        first._replace(scores=others.scores).read()
    with pytest.raises(UserError, match="--scores: 2 tables for 1 of rollouts"):
        first._replace(scores=[*first.scores, *others.scores]).read()


def test_shards_of_one_table_are_of_one_policy(tmp_path) -> None:
    shards = [write_round(tmp_path / name) for name in "ab"]
    first, second = (files.rollouts[0] for files in shards)

    def rewrite(path: Path, kind: str, **about: object) -> None:
        table = tables.read(path, kind)
        facts = {**tables.footer(table), **{key: str(value) for key, value in about.items()}}
        tables.save(path, table.replace_schema_metadata(facts))

    rewrite(second, "rollouts", shard=1)
    digests = [tables.footer(tables.read(path, "rollouts"))[tables.DIGEST] for path in (first, second)]
    both_shards = RoundFiles(*([*paths, *more] for paths, more in zip(*(files[:4] for files in shards), strict=True)))
    for kind in ("scores", "reference"):
        rewrite(getattr(shards[1], kind)[0], kind, shard=1, rollouts=digests[1])
    for path in both_shards.reference:
        rewrite(path, "reference", policy="of policy 0")
    assert len(both_shards.read().rollouts) == 8
    rewrite(both_shards.reference[1], "reference", policy="another")
    with pytest.raises(UserError, match=r"b/reference\.parquet: its policy is another, but of policy 0 is expected"):
        both_shards.read()
    assert len(tables.read_all([first, second], "rollouts")) == 8
    rewrite(second, "rollouts", policy="another")
    with pytest.raises(UserError, match=r"b/rollouts\.parquet: its policy is another, but abc is expected here"):
        tables.read_all([first, second], "rollouts")


def test_the_files_of_a_round_are_its_shards_and_then_its_refill(tmp_path) -> None:
    """And none that another number of shards, or a refill before, has left."""
    for name in ("rollouts/000", "rollouts/001", "rollouts/002", "refill/rollouts"):
        (tmp_path / f"{name}.parquet").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.parquet").touch()
    shards = [tmp_path / "rollouts" / f"00{shard}.parquet" for shard in range(2)]
    refill = tmp_path / "refill" / "rollouts.parquet"
    assert round_tables.files_of(tmp_path, "rollouts", Rollout(shards=2)) == shards
    assert round_tables.files_of(tmp_path, "rollouts", Rollout(shards=2, refill=1)) == [*shards, refill]
    scores = [round_tables.scores_beside(file).relative_to(tmp_path) for file in (shards[1], refill)]
    assert scores == [Path("scores/001.parquet"), Path("refill/scores.parquet")]


def test_a_weighted_sum_counts_what_was_scored_and_without_a_weighted_score_there_is_none() -> None:
    columns = [[1.0, None, None, None], [5.0, 5.0, 5.0, 0.0], [None, 0.5, None, 0.0]]
    sums = tables.weighted_sums([3.0, 0.0, -2.0], columns)
    assert [None if np.isnan(value) else value for value in sums.tolist()] == [3.0, -1.0, None, 0.0]


def test_a_new_nullable_column_leaves_the_tables_of_older_runs_readable(tmp_path) -> None:
    """Also where shards of one table were written before and after the column came."""
    older, *_ = write_round(tmp_path / "older").rollouts
    rows = tables.read(older, "rollouts").to_pylist()
    schema = tables.pa.schema([*tables.ROLLOUTS, tables.pa.field("weather", tables.pa.string())])
    facts = {"run": "test", "round": 3, "shard": 1, "seed": 1, "policy": "abc"}
    tables.write(tmp_path / "newer.parquet", [row | {"weather": "rain"} for row in rows], schema, "rollouts", **facts)
    assert tables.read(older, "rollouts", ["prompt_id", "weather"]).column_names == ["prompt_id"]
    both = tables.read_all([older, tmp_path / "newer.parquet"], "rollouts")
    assert both["weather"].to_pylist() == [None] * 4 + ["rain"] * 4
