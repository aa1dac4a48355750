"""Files of another run are refused, by what they were made from."""

import errno
import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers import mini

from rloo_pipeline.artifacts import assets, files, lineage, manifest, policy, tables
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.round_tables import RoundFiles
from rloo_pipeline.cli.stage_options import OUTPUTS
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.judging import run_files

KEY = {"prompt_id": "p", "sample": 0}


def write_policy(folder: Path, weights: str, **made_from: object) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text(weights)
    return policy.seal(folder, folder.name, **made_from)


def write_assets(folder: Path, model: Path, **about: object) -> Path:
    folder.mkdir(parents=True)
    places = {"model": {"path": str(model), "revision": None}, "train": {"path": "rows.py:rows", "revision": None}}
    assets.write(folder, places, **about)
    return folder


def write_table(path: Path, kind: str = "train", **about: object) -> Path:
    rows = [{**KEY, "advantage": 0.0, "clipped": False, "masked": False}]
    tables.write(path, rows, tables.TRAIN, kind, **about)
    return path


def test_a_file_of_a_run_with_another_seed_is_refused(tmp_path) -> None:
    own = write_table(tmp_path / "own.parquet", seed=1)
    write_policy(tmp_path / "policies" / "00001", "a", seed=2)
    older = tmp_path / "older"
    older.mkdir()
    manifest.write_manifest(older, round=1)
    lineage.require_own(1, [own, older, tmp_path / "missing"])
    for other in (tmp_path / "policies" / "00001", write_table(tmp_path / "other.parquet", seed=2)):
        with pytest.raises(
            UserError, match=f"{other}: made by another run, with seed 2, but this run has seed 1; restore"
        ):
            lineage.require_own(1, [own, other])


def test_prompts_and_policies_are_of_the_same_assets_wherever_these_lie(tmp_path) -> None:
    digests = {}
    for name, weights in (("a", "x"), ("b", "x"), ("c", "y")):
        write_policy(tmp_path / name / "model", weights)
        digests[name] = lineage.assets_digest(write_assets(tmp_path / name / "assets", tmp_path / name / "model"))
    assert digests["a"] == digests["b"] != digests["c"]
    write_policy(tmp_path / "policies" / "00000", "x", assets=digests["a"])
    write_policy(tmp_path / "policies" / "00001", "x", assets=None)  # trained from a policy of an older version
    lineage.require_own(1, [tmp_path / "policies" / name for name in ("00000", "00001")] + [tmp_path / "b" / "assets"])
    with pytest.raises(
        UserError, match=r"c/assets: made by another run, from a different model or different data than .*00000"
    ):
        lineage.require_own(1, [tmp_path / "policies" / "00000", tmp_path / "c" / "assets"])


def test_assets_differ_by_a_revision_a_generator_or_what_was_built_from_them(tmp_path) -> None:
    def digest(
        name: str, path: str = "cache/a", revision: str = "a1", rows: str = "mine.py:rows", built: str = "x"
    ) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(built)
        places = {"model": {"path": path, "revision": revision}, "train": {"path": rows, "revision": None}}
        assets.write(tmp_path / name, places)
        return lineage.assets_digest(tmp_path / name)

    own = digest("own")
    assert digest("moved", path="elsewhere/a") == own
    changes = {"revision": "a2", "rows": "mine.py:others", "built": "y"}
    assert len({own, *(digest(key, **{key: value}) for key, value in changes.items())}) == 4


@pytest.fixture
def config() -> Config:
    return Config(**mini())


def changed(config: Config, section: str, **changes: object) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=changes)})


def test_a_table_that_other_keys_decided_is_refused_by_the_name_of_the_key(tmp_path, config) -> None:
    with tables.common_facts(**lineage.decided(config, "rollout")):
        made = write_table(tmp_path / "made.parquet", "rollouts")
    lineage.require_configured(config, [made, write_table(tmp_path / "older.parquet"), tmp_path / "missing"])
    for same in (changed(config, "rollout", lag=1), changed(config, "update", learning_rate=0.5)):
        lineage.require_configured(same, [made])
    with pytest.raises(
        UserError,
        match=r"made\.parquet: made with rollout\.temperature 1\.0, but this run has 0\.5; restore this run's own",
    ):
        lineage.require_configured(changed(config, "rollout", temperature=0.5), [made])
    assert lineage.DECIDED not in lineage.facts_of(tmp_path / "older.parquet")


@pytest.mark.parametrize("reverse", [False, True])
def test_a_section_that_one_of_both_leaves_out_is_another_value(tmp_path, reverse) -> None:
    configs = Config(**mini()), Config(**mini(update={"lora": {"r": 4}}))
    before, now = reversed(configs) if reverse else configs
    made = write_table(tmp_path / "train.parquet", **lineage.decided(before, "update"))
    lineage.require_configured(before, [made])
    with pytest.raises(
        UserError,
        match=r"made with update\.lora\.\w+ \S+, but this run has update\.lora null;"
        if reverse
        else r"made with update\.lora null, but this run has update\.lora\.\w+ \S+;",
    ):
        lineage.require_configured(now, [made])


def test_a_table_of_a_version_without_a_key_is_accepted(tmp_path, config) -> None:
    stage, only, params = json.loads(lineage.decided(config, "rollout")[lineage.DECIDED])
    del params["rollout"]["top_p"]
    older = write_table(tmp_path / "older.parquet", decided=json.dumps([stage, only, params]))
    lineage.require_configured(changed(config, "rollout", top_p=0.5), [older])


def test_the_scores_of_one_function_depend_neither_on_its_weight_nor_on_other_functions(tmp_path, config) -> None:
    name = config.rewards[0].column
    with tables.common_facts(**lineage.decided(config, "score", name)):
        part = write_table(tmp_path / "part.parquet", "part")
    first, *_ = config.rewards
    lineage.require_configured(
        config.model_copy(update={"rewards": [first.model_copy(update={"weight": 7.0})]}), [part]
    )
    other = first.model_copy(update={"batch": "all"})
    with pytest.raises(UserError, match="made with batch"):
        lineage.require_configured(config.model_copy(update={"rewards": [other]}), [part])


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({"minimum": 1, "of": ["a", "b"]}, {"minimum": 1, "of": ["a", "c"]}, r'of\[1\] "b", but this run has "c"'),
        ({"minimum": 1}, {}, "minimum 1, but this run does not set it"),
        ({"minimum": "not set"}, {}, r'minimum "not set", but this run does not set it'),
        ({"minimum": 60 * "a" + "b"}, {"minimum": 60 * "a" + "c"}, "minimum; restore"),
        ({}, {"minimum": None}, "minimum, but this run has null"),
        ({}, {"minimum": "not set"}, 'minimum, but this run has "not set"'),
    ],
)
def test_a_changed_option_of_a_reward_is_refused_by_its_name(tmp_path, config, before, now, expected) -> None:
    first, *others = config.rewards
    made_by, read_by = (
        config.model_copy(update={"rewards": [*others, first.model_copy(update={"options": options})]})
        for options in (before, now)
    )
    with tables.common_facts(**lineage.decided(made_by, "score")):
        made = write_table(tmp_path / "made.parquet", "scores")
    lineage.require_configured(made_by, [made])
    begins = "made without" if not before else "made with another value of" if ";" in expected else "made with"
    with pytest.raises(UserError, match=rf"{begins} rewards\[{len(others)}\]\.options\.{expected}"):
        lineage.require_configured(read_by, [made])


def test_weights_of_rewards_in_a_table_are_those_of_the_configuration(tmp_path, config) -> None:
    weights = {reward.column: reward.weight for reward in config.rewards}
    lineage.require_configured(config, [write_table(tmp_path / "own.parquet", weights=json.dumps(weights))])
    name = config.rewards[0].column
    for other in ({name: weights[name] + 1}, {"another": 1.0}):
        table = write_table(tmp_path / "changed.parquet", weights=json.dumps(weights | other))
        with pytest.raises(UserError, match=rf"made with weight of {next(iter(other))} .*, but this run has"):
            lineage.require_configured(config, [table])


def test_a_policy_that_this_run_did_not_train_is_refused(tmp_path) -> None:
    folder = tmp_path / "policies" / "00002"
    digest = write_policy(folder, "own")
    assert Policy(folder).digest == digest, "a run in flight has no table yet"
    write_table(tmp_path / "rounds" / "00002" / lineage.TRAIN, policy=digest)
    assert Policy(folder).digest == digest
    write_table(tmp_path / "rounds" / "00002" / lineage.TRAIN, policy="0" * 64)
    with pytest.raises(UserError, match="00002: not the policy that round 2 of this run trained"):
        Policy(folder).digest


def test_facts_are_not_left_out_because_the_file_system_fails(tmp_path, monkeypatch) -> None:
    """The manifest of the next policy would lack what its readers compare."""
    folder = tmp_path / "policies" / "00001"
    write_policy(folder, "own", assets="0" * 64)
    assert lineage.of_policy(1, Policy(folder).manifest, "1" * 64, {})["assets"] == "0" * 64
    for code, told in ((errno.ESTALE, "the file system failed"), (errno.ENOTCONN, "Transport endpoint")):
        monkeypatch.setattr(Path, "read_text", Mock(side_effect=OSError(code, os.strerror(code))))
        with pytest.raises(UserError, match=f"^{folder}: {told}"):
            lineage.facts_of(folder)
        with pytest.raises(OSError, match=os.strerror(code)):
            Policy(folder).manifest


def test_metrics_of_another_update_are_refused(tmp_path) -> None:
    metrics = {"round": 1, "reward": 0.1 + 0.2, "kl": None}
    file = run_files.metrics_of(tmp_path, 1)
    files.write_json(file, metrics)
    assert run_files.read_metrics(tmp_path, 1) == metrics
    write_table(file.with_name(lineage.TRAIN), metrics=lineage.metrics_digest(metrics))
    assert run_files.read_metrics(tmp_path, 1) == metrics
    files.write_json(file, {**metrics, "reward": 0.3})
    with pytest.raises(UserError, match=r"metrics\.json: not the metrics of the update that wrote .*train\.parquet"):
        run_files.read_metrics(tmp_path, 1)


def test_a_reward_that_is_not_the_weighted_sum_of_its_scores_is_refused(tmp_path) -> None:
    path, schema = tmp_path / "scores.parquet", tables.scores_schema(["a", "b"])
    about = {tables.WEIGHTS: json.dumps({"a": 1.0, "b": 0.1})}
    row = {**KEY, "scores/a": 0.2, "scores/b": 0.3, "reward": 0.2 + 0.1 * 0.3, "seconds": 0.0, "error": None}
    unscored = row | {"scores/a": None, "scores/b": None, "reward": None, "prompt_id": "q"}
    tables.write(path, [row, unscored], schema, "scores", **about)
    tables.read(path, "scores")
    for reward in (0.23 + 1e-9, None):
        tables.write(path, [row | {"reward": reward}, unscored], schema, "scores", **about)
        with pytest.raises(UserError, match="its column reward is not the weighted sum of its functions' scores"):
            tables.read(path, "scores")


def test_scores_of_different_versions_of_functions_are_not_compared(tmp_path) -> None:
    first = write_table(tmp_path / "first.parquet", functions="one")
    other = write_table(tmp_path / "other.parquet")
    lineage.require_one_scoring([first, other])
    for facts in ({"functions": "two"}, {"functions": "one", "reward_models": "another"}):
        write_table(other, **facts)
        for together in (
            lambda: lineage.require_one_scoring([first, other]),
            lambda: RoundFiles([first, other], [first, other]).read(),
            lambda: RoundFiles([first, other], [first, other]).read_held_out(1, 1.0),
        ):
            with pytest.raises(UserError, match="were scored by different versions of your reward functions or models"):
                together()


def test_the_policies_of_a_training_are_named_by_its_tables(tmp_path) -> None:
    write_table(tmp_path / "rounds" / "00001" / "rollouts" / "000.parquet", policy="zero")
    write_table(tmp_path / "rounds" / "00001" / lineage.TRAIN, policy="one")
    named = [lineage.named_policy(tmp_path, number) for number in range(3)]
    assert named == [{"policy": "zero"}, {"policy": "one"}, {}]


def test_an_updates_table_names_the_functions_and_reward_models_of_its_scores(tmp_path) -> None:
    facts = {"functions": "one", "reward_models": "another"}
    scores = write_table(tmp_path / "scores.parquet", **facts, seed="0")
    assert lineage.of_metrics({}, scores) == {"metrics": lineage.metrics_digest({}), **facts}
    lineage.require_one_scoring([scores, write_table(tmp_path / lineage.TRAIN, **lineage.of_metrics({}, scores))])


def test_the_arguments_that_are_not_checked_are_those_of_stages() -> None:
    from rloo_pipeline.cli import stages

    names = {option.name for command in stages.COMMANDS for option in command.options}
    assert set(OUTPUTS) <= names


def test_a_key_that_was_added_later_is_compared_with_its_default(tmp_path, config) -> None:
    """`params` leaves the default out."""
    other = changed(config, "dataset", shuffle_dataset=False)
    for name, before, now, values in (("a", config, other, "true, .* false"), ("b", other, config, "false, .* true")):
        with tables.common_facts(**lineage.decided(before, "rollout")):
            made = write_table(tmp_path / f"{name}.parquet", "rollouts")
        lineage.require_configured(before, [made])
        with pytest.raises(UserError, match=f"made with dataset.shuffle_dataset {values}"):
            lineage.require_configured(now, [made])


def test_reward_models_are_compared_by_the_columns_that_tables_name(tmp_path) -> None:
    files = ({"a": "1", "b": "2"}, {"a": "1"}, {"b": "2"}, {}, {"b": "3"})
    paths = [
        write_table(tmp_path / f"{place}.parquet", reward_model_files=json.dumps(models))
        for place, models in enumerate(files)
    ]
    lineage.require_one_scoring(paths[:4])
    with pytest.raises(UserError, match=r"0\.parquet and .*4\.parquet were scored by different versions"):
        lineage.require_one_scoring(paths)
