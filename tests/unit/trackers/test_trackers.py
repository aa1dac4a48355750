"""W&B and MLflow hold each number of metrics.json exactly once, however often a run is sent."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import done, mini, rloo
from local_server import Request, serving
from synthetic_runs import metrics_of, train_again, write_config

from rloo_pipeline.artifacts.files import read_json, write_json
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.judging import run_files
from rloo_pipeline.stages.track import track
from rloo_pipeline.trackers import to_mlflow, to_wandb, trackers
from rloo_pipeline.trackers.trackers import History, history_of

Curves = dict[str, dict[int, float]]
BLOCK = 32768
WANDB = Path(sys.executable).with_name("wandb")


@pytest.fixture(autouse=True)
def _a_home_of_its_own(tmp_path, monkeypatch) -> None:
    for name in ("WANDB_PROJECT", "WANDB_MODE", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_run(run: Path, rounds: int, variant: str = "", **changes: object) -> History:
    """Writes a run of 8 rounds, of which `rounds` are done, one second apart."""
    config = Config(**mini(**{"rounds": 8, **changes}))
    write_config(run, config)
    for number in range(1, rounds + 1):
        file = trackers.metrics_of(run, number)
        write_json(file, metrics_of(number, variant))
        os.utime(file, (1_700_000_000 + number,) * 2)
    return history_of(run, config, 8)


def numbers_of(run: Path) -> Curves:
    """The numbers in metrics.json of all rounds, by TRL's name and by round."""
    curves: Curves = {}
    for file in sorted(run.glob("rounds/*/metrics.json")):
        metrics = read_json(file)
        for name, value in metrics.items():
            if value is not None:
                curves.setdefault(f"train/{'global_step' if name == 'step' else name}", {})[metrics["round"]] = value
    return curves


def records_in(file: Path) -> list:
    """The records in a W&B file: 7 bytes of header, then a log of serialized records in LevelDB's format."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, part, records = file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:
            place += BLOCK - place % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(part))
            part = b""
    return records


def name_of(item) -> str:
    return item.key or "/".join(item.nested_key)


def wandb_curves(run: Path) -> Curves:
    """Every point in a run's folders, as `wandb sync` would send them; fails on a point that exists twice."""
    curves: Curves = {}
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        for record in records_in(file):
            for item in record.history.item:
                name = name_of(item)
                if not name.startswith("_"):
                    number = record.history.step.num // 2  # a round has two rows, the second for its training
                    assert number not in curves.setdefault(name, {}), "a point exists twice"
                    curves[name][number] = float(item.value_json)
    return curves


def mlflow_curves(run: Path) -> Curves:
    """Every point of the only run in the MLflow store; fails on a point that exists twice."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run / 'mlflow' / 'mlflow.db'}")
    [experiment] = client.search_experiments(filter_string="name = 'rloo_pipeline'")
    [stored] = client.search_runs([experiment.experiment_id])
    curves: Curves = {}
    for name in stored.data.metrics:
        points = client.get_metric_history(stored.info.run_id, name)
        assert len({point.step for point in points}) == len(points), "a point exists twice"
        curves[f"train/{name}"] = {point.step: point.value for point in points}
    assert stored.data.params["algorithm.beta"] == "0.05"
    return curves


@pytest.mark.parametrize(("send", "read"), [(to_wandb.send, wandb_curves), (to_mlflow.send, mlflow_curves)])
def test_every_number_is_stored_once(send, read, tmp_path) -> None:
    run = tmp_path / "run"
    history = write_run(run, 3)
    for sent in (history, history, write_run(run, 5)):  # repeated, then extended
        send(sent, run)
        assert read(run) == {
            name: {number: value for number, value in points.items() if number <= len(sent.points)}
            for name, points in numbers_of(run).items()
        }
    shutil.rmtree(run / "rounds" / "00005")
    send(write_run(run, 4, "repeated"), run)
    assert read(run) == numbers_of(run)
    assert read(run)["train/reward"].keys() == {1, 2, 3, 4}


def test_rounds_that_wandb_has_sent_are_in_no_folder_to_be_sent(tmp_path) -> None:
    run = tmp_path / "run"
    to_wandb.send(write_run(run, 2), run)
    [first] = run.glob("wandb/offline-run-*")
    (first / f"run-{write_run(run, 2).id}.wandb.synced").touch()  # as `wandb sync` leaves it
    for rounds in (2, 3, 4):
        to_wandb.send(write_run(run, rounds), run)
    assert wandb_curves(run) == numbers_of(run)
    [same, second] = sorted(run.glob("wandb/offline-run-*"))
    assert same == first
    steps = [record.history.step.num for file in second.glob("*.wandb") for record in records_in(file)]
    assert sorted({step for step in steps if step}) == [6, 8]
    history = write_run(run, 4, "repeated")
    to_wandb.send(history, run)
    [file] = run.glob("wandb/offline-run-*/*.wandb")
    assert file.name == f"run-{history.id}-2.wandb", "the server has other numbers of the first one"
    assert wandb_curves(run) == numbers_of(run)


def wandb_server(request: Request, _: int) -> tuple[int, Any]:
    """Answers `wandb sync` as the server of W&B does, as far as it asks."""
    project = {"id": "1", "name": "rloo_pipeline", "entity": {"id": "2", "name": "me"}}
    bucket = {"id": "3", "name": "run", "config": "{}", "historyLineCount": 0, "project": project}
    asked = str(request.body.get("query"))
    if "upsertBucket" in asked:
        return 200, {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
    if "createRunFiles" in asked:
        return 200, {"data": {"createRunFiles": {"runID": "3", "uploadHeaders": [], "files": []}}}
    return 200, {"data": {"model": {**project, "bucket": None}}} if "query" in request.body else {}


def test_wandb_sync_sends_every_number_once(tmp_path) -> None:
    run, curves = tmp_path / "run", Curves()
    with serving(wandb_server) as server:
        keys = {"WANDB_BASE_URL": server.address, "WANDB_API_KEY": "a" * 40, "WANDB_ERROR_REPORTING": "false"}
        for rounds in (3, 5):
            to_wandb.send(write_run(run, rounds), run)
            folders = sorted(run.glob("wandb/offline-run-*"))
            command = [WANDB, "sync", *folders]
            subprocess.run(command, env=os.environ | keys, cwd=tmp_path, capture_output=True, check=True)
        sent = [request.body["files"] for request in server.requests if "files" in request.body]
    for line in [line for files in sent for line in files.get("wandb-history.jsonl", {"content": []})["content"]]:
        row = json.loads(line)
        for name, value in row.items():
            if not name.startswith("_"):
                assert row["_step"] // 2 not in curves.setdefault(name, {}), "a point is sent twice"
                curves[name][row["_step"] // 2] = value
    assert curves == numbers_of(run)


def test_a_configuration_that_comes_back_is_another_run_of_wandb(tmp_path) -> None:
    run, names = tmp_path / "run", list[str]()
    for rate in (0.1, 0.2, 0.1, 0.2, 0.1):
        history = write_run(run, 1, update={"learning_rate": rate})
        to_wandb.send(history, run)
        [file] = run.glob("wandb/offline-run-*/*.wandb")
        file.with_suffix(".wandb.synced").touch()
        names.append(file.stem.removeprefix("run-"))
    a, b = names[:2]
    assert names == [a, b, f"{a}-2", f"{b}-2", f"{a}-3"], "the server has the earlier ones"


def test_a_run_of_a_killed_writer_is_rewritten(tmp_path) -> None:
    from mlflow import MlflowClient

    run = tmp_path / "run"
    to_mlflow.send(write_run(run, 2), run)
    client = MlflowClient(tracking_uri=f"sqlite:///{run / 'mlflow' / 'mlflow.db'}")
    [stored] = client.search_runs([e.experiment_id for e in client.search_experiments()])
    client.set_tag(stored.info.run_id, to_mlflow.WRITING, "true")
    client.log_metric(stored.info.run_id, "reward", 7.0, step=3)
    to_mlflow.send(write_run(run, 3), run)
    assert mlflow_curves(run) == numbers_of(run)


def test_wandb_gets_the_configuration_and_nothing_about_the_machine(tmp_path) -> None:
    run = tmp_path / "run"
    history = write_run(run, 2)
    assert "wandb sync" in to_wandb.send(history, run)
    [file] = run.glob("wandb/offline-run-*/*.wandb")
    assert file.parent.name == f"offline-run-20231114_221321-{history.id}"
    records = records_in(file)
    [started] = [record.run for record in records if record.HasField("run")]
    assert (started.run_id, started.display_name, started.project) == (history.id, "mini", "rloo_pipeline")
    keys = {update.key for update in started.config.update}
    assert {"algorithm", "rewards", "seed"} <= keys
    times = [item.value_json for r in records for item in r.history.item if name_of(item) == "_timestamp"]
    assert [float(time) for time in times] == [1_700_000_001, 1_700_000_002]
    names = subprocess.run([WANDB, "sync", "--dry-run", file.parent], capture_output=True, text=True, check=True)
    assert file.name in names.stderr + names.stdout, "wandb sync takes the folder"


def test_the_id_depends_on_everything_that_decides_the_numbers(tmp_path) -> None:
    first = write_run(tmp_path / "a", 1).id
    assert first.startswith("mini-")
    assert write_run(tmp_path / "b", 1, gates={"memory": {"action": "off"}}, keep_every=2).id == first
    config = Config(**mini(rounds=9))
    assert trackers.identity(config) == first, "a longer run has the same id"
    assert write_run(tmp_path / "c", 1, update={"learning_rate": 0.5}).id != first
    weighted = {"algorithm": {"mismatch": {"correction": "sequence_tis"}}}
    ids = {trackers.identity(Config(**mini(rollout={"lag": lag}, **weighted))) for lag in (0, 1, 2)}
    assert len(ids) == 3, "the lag is no parameter of a stage"


def test_held_out_accuracy_is_at_the_step_of_its_policy_under_trls_names(tmp_path) -> None:
    run = tmp_path / "run"
    write_run(run, 3)
    summary = {"prompts": 9, "accuracy": 0.5, "rewards": {"answer": {"value": 0.5}, "reward": {"value": 0.25}}}
    for number in (1, 2):
        measured = summary | {"policy": number - 1, "completions/mean_length": 20.0}
        write_json(trackers.held_out_of(run, number), measured)
    assert trackers.with_accuracy(run, 1, 3) == 2, "the third round is sent when its accuracy is there"
    history = write_run(run, 3)
    expected = {"eval/accuracy": 0.5, "eval/rewards/answer/mean": 0.5, "eval/reward": 0.25}
    for point in history.points:
        assert point.held_out == ({**expected, "eval/completions/mean_length": 20.0} if point.round < 3 else {})
    to_mlflow.send(history, run)
    assert mlflow_curves(run)["train/eval_reward"] == {0: 0.25, 1: 0.25}
    to_wandb.send(history, run)
    [file] = run.glob("wandb/offline-run-*/*.wandb")
    rows = [{name_of(item): float(item.value_json) for item in record.history.item} for record in records_in(file)]
    assert [row["train/global_step"] for row in rows if "eval/reward" in row] == [0, 1]
    assert [row["train/global_step"] for row in rows if "train/reward" in row] == [1, 2, 3]


def test_rounds_older_than_the_one_before_are_not_sent(tmp_path) -> None:
    write_run(tmp_path, 5)
    assert run_files.in_order_of_time(tmp_path, 2, 8) == 5
    os.utime(trackers.metrics_of(tmp_path, 3), (1_800_000_000,) * 2)
    assert run_files.in_order_of_time(tmp_path, 2, 8) == 3
    assert run_files.in_order_of_time(tmp_path, 4, 8) == 5


def test_a_missing_library_gives_a_one_line_error() -> None:
    trackers.require(["wandb", "mlflow"])
    with pytest.raises(UserError, match="report_to: this environment has no no_such_library; run `make setup`"):
        trackers.require(["mlflow", "no_such_library"])


@pytest.mark.parametrize("store", ["mlruns", "./mlruns", "/home/me/ml runs", "file:mlruns", "file:///home/me/mlruns"])
def test_mlflow_in_a_folder_is_refused(store, monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    trackers.require(["wandb"])
    with pytest.raises(UserError, match=f"MLFLOW_TRACKING_URI: .* in a folder .{re.escape(store)}.; name a database"):
        trackers.require(["mlflow"])


@pytest.mark.parametrize("store", ["", "http://host:5000", "sqlite:///mlflow.db", "databricks", "databricks://a", "uc"])
def test_other_stores_of_mlflow_are_not(store, monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    trackers.require(["mlflow"])


def test_a_job_sends_new_rounds_and_an_unreachable_tracker_ends_no_run(tmp_path, monkeypatch) -> None:
    run, outputs = tmp_path / "run", [tmp_path / f"run/tracking/0000{number}.json" for number in (1, 2, 3)]
    write_run(run, 2, report_to="mlflow", evaluation={"each_round": 0})
    unreachable = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    outcome = done("track", run, "--round", 1, "--output", outputs[0], **unreachable)
    assert "warn: mlflow did not take the metrics: unexpected MlflowException" in outcome.stderr
    assert read_json(outputs[0]) == {"rounds": 2, "sent": {}}
    track(run, None, 2, outputs[0], outputs[1])
    assert mlflow_curves(run) == numbers_of(run)
    before = (run / "mlflow" / "mlflow.db").stat().st_mtime_ns
    track(run, None, 2, outputs[1], outputs[2])
    assert read_json(outputs[2]) == read_json(outputs[1])
    assert (run / "mlflow" / "mlflow.db").stat().st_mtime_ns == before, "nothing is sent twice"
    for name, value in unreachable.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Exception, match=r"127\.0\.0\.1"):
        track(run, None, None, None, None)


def test_a_run_without_tracker_or_round_is_an_error(tmp_path) -> None:
    write_run(tmp_path / "run", 0)
    assert "report_to names no tracker; name one with --to" in rloo("track", tmp_path / "run").stderr
    with pytest.raises(UserError, match="no round is done yet"):
        track(tmp_path / "run", ["wandb"], None, None, None)


def test_a_tracker_is_its_name_among_the_keys_and_its_module() -> None:
    assert {"wandb", "mlflow"} <= set(trackers.TRACKERS)
    for name in trackers.TRACKERS:
        assert trackers.sender(name).__doc__


def test_rounds_of_an_earlier_training_are_not_sent(tmp_path, monkeypatch) -> None:
    histories = list[History]()

    def send(history: History, _: Path) -> str:
        histories.append(history)
        return "sent"

    monkeypatch.setattr(trackers, "sender", lambda _: send)
    write_run(tmp_path / "run", 8)
    train_again(tmp_path / "run", 5)
    track(tmp_path / "run", ["wandb"], None, None, None)
    assert [point.round for point in histories[0].points] == [1, 2, 3, 4, 5]
    assert not histories[0].finished
