"""Policies on the nodes' own disks: where they are refused, before a run and when it starts, and what is at its end."""

import json
import os
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import mini

from rloo_pipeline.artifacts import manifest, node_files
from rloo_pipeline.artifacts.model_dims import ModelDims
from rloo_pipeline.before_run import exchange, node_checks
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import devices, scratch
from rloo_pipeline.snakemake_ext import node_exchange


def configured(**changes) -> Config:
    return Config(**mini(keep_every=2, exchange="node", **changes))


@pytest.mark.parametrize(
    ("changes", "nodes", "as_jobs", "gpu", "sentence"),
    [
        ({}, 1, True, False, "each stage is a SLURM job, perhaps on another node: use `rloo submit`"),
        ({}, 2, False, False, "deepspeed.nodes is 1, but stages run on 2: set it to 2"),
        (
            {"deepspeed": {"processes": 2, "nodes": 2}, "workers": "never"},
            *(2, False, False, "on several nodes it needs warm workers: do not set workers: never"),
        ),
        ({}, 1, False, True, "a lost policy would be trained again with different rounding: set reproducible: true"),
    ],
)
def test_a_run_that_would_not_find_or_restore_its_policies_is_refused(
    changes, nodes, as_jobs, gpu, sentence, monkeypatch
) -> None:
    monkeypatch.setattr(devices, "has_gpu", lambda: gpu)
    with pytest.raises(UserError, match=f"exchange: node: {sentence}"):
        exchange.refuse(configured(**changes), nodes, as_jobs)
    exchange.refuse(Config(**mini(**changes)), nodes, as_jobs)


def test_one_machine_and_updates_on_all_nodes_are_right(monkeypatch) -> None:
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    exchange.refuse(configured(), 1, False)
    exchange.refuse(configured(deepspeed={"processes": 2, "nodes": 2}), 2, False)
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    exchange.refuse(configured(reproducible=True), 1, False)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"keep_every": 1}, "exchange: node cannot be used with keep_every: 1"),
        ({"update": {"lora": {}}}, "exchange: node cannot be used with update.lora"),
        ({"exchange": "tmp"}, "'tmp' is not a place for policies; write shared, node, or a path"),
    ],
)
def test_keys_that_make_it_useless_are_refused(changes, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        Config(**mini(**({"keep_every": 2, "exchange": "node"} | changes)))


def test_the_plan_counts_no_more_policies_at_a_time_than_stay_on_the_nodes() -> None:
    shape = ModelDims(3584, 28, 3584, 512, 18944, 152064, 7_600_000_000)
    for rounds, counted in {1: "0 of 1 ", 9: "4 of 9 "}.items():
        line = exchange.node_line(configured(rounds=rounds), shape)
        assert f"exchange: {counted}" in line
        assert f"/dev/shm, {min(int(counted[0]), 2)} at a time" in line


def test_a_folder_without_room_for_the_policies_is_refused_before_the_run_and_at_its_start(
    tmp_path, monkeypatch
) -> None:
    run = tmp_path / "run"
    (run / "policies" / "00000").mkdir(parents=True)
    (run / "policies" / "00000" / "model.safetensors").write_bytes(b"x" * 500_000)
    free = SimpleNamespace(free=900_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    monkeypatch.setenv("SCRATCH", str(tmp_path / "node"))
    config = Config(**mini(keep_every=2, exchange="$SCRATCH"))
    with pytest.raises(UserError, match="node: not a folder that you can write to on this machine; name another"):
        node_exchange.start({run: config}, 1)
    (tmp_path / "node").mkdir()
    with pytest.raises(UserError, match=r"0\.9 MB free, policies need 1\.0 MB; free some"):
        node_exchange.start({run: config}, 1)
    assert [finding.ok for finding in node_checks.machine(config)] == [True], "the model of mini is small"
    free.free = 1000
    assert [finding.ok for finding in node_checks.machine(config)] == [False]
    assert list((tmp_path / "node").iterdir()) == []
    left = tmp_path / "node" / "rloo-exchange-left"
    left.mkdir()
    left.with_name(f"{scratch.LOCK}{left.name}").write_text(socket.gethostname())
    with pytest.raises(UserError, match="free some"):
        node_exchange.start({run: config}, 1)
    assert list((tmp_path / "node").iterdir()) == [], "what a killed run left does not take the room"


def test_policies_on_the_node_are_copied_at_the_controllers_end_and_others_of_it_are_listed(
    tmp_path, monkeypatch, capsys
) -> None:
    policies, node = tmp_path / "policies", tmp_path / "node"
    node.mkdir()
    for number in (1, 2):
        folder = policies / f"{number:05d}"
        folder.mkdir(parents=True)
        place = node / f".{number}.tmp"
        place.mkdir()
        (place / "model").write_text("weights")
        (folder / "model.safetensors").symlink_to(place / "model")
        manifest.write_manifest(folder, policy=folder.name)
    job = SimpleNamespace(input=[policies / "00001", policies / "00002"], output=[])
    update = SimpleNamespace(input=[policies / "00001"], output=[policies / "00002"])
    assert node_exchange.lost([job]) == [policies / "00001", policies / "00002"]
    assert node_exchange.lost([job, update]) == [policies / "00001"]
    assert node_exchange.lost([SimpleNamespace(input=[policies / "merged"], output=[])]) == [], "of a rule of the user"
    (policies / "00003").mkdir()
    (policies / "00003" / "model.safetensors").symlink_to(node / ".2.tmp" / "model")
    manifest.write_manifest(policies / "00003", policy="00003")
    jobs = [SimpleNamespace(input=[policies / "00003"], output=[])]
    workflow = SimpleNamespace(local_exec=False, dag=SimpleNamespace(needrun_jobs=lambda: jobs))
    call = SimpleNamespace(workflow=workflow, runs=SimpleNamespace(configs={}))
    node_exchange.refuse_jobs(call)
    assert node_files.links(policies / "00003") == [], "its weights are on this machine, so jobs get them"
    (node / ".2.tmp" / "model").unlink()
    jobs[0].input = [policies / "00002"]
    with pytest.raises(UserError, match=r"00002: .* continue with `rloo submit` or `rloo run`"):
        node_exchange.refuse_jobs(call)
    monkeypatch.setenv(scratch.EXCHANGE, str(node))
    node_exchange._end(os.getpid(), [tmp_path])
    assert [len(node_files.links(policies / f"{number:05d}")) for number in (1, 2)] == [0, 1]
    assert "00002: its weights are no longer on this node; the next start restores it" in "".join(capsys.readouterr())
    assert manifest.verify_manifest(policies / "00001")
    state = Path(tmp_path / "trainer" / "00002" / "policy")
    state.mkdir(parents=True)
    (state / "model.safetensors").write_text("another")
    manifest.write_manifest(state.parent)
    with pytest.raises(UserError, match=r"could not be made again, see .*restore/00002\.log"):
        node_exchange.restore([policies / "00002"], 1, ["false"])
    (state / "model.safetensors").write_text("weights")
    manifest.write_manifest(state.parent)
    node_exchange.restore([policies / "00002"], 1, ["false"])
    assert manifest.verify_manifest(policies / "00002")
    assert json.loads((policies / "00002" / "manifest.json").read_text())["about"] == {"policy": "00002"}
