"""`rloo doctor` finds the problems of a node and says what to do, and passes a node without any."""

import argparse
import logging
import os
from pathlib import Path

import pytest
import yaml
from helpers import ROOT, executable, mini

from rloo_pipeline.before_run import gpus, image, node_checks, slurm_checks
from rloo_pipeline.before_run.slurm_checks import ResourceRequest
from rloo_pipeline.cli import main
from rloo_pipeline.config import Config

LOCK = "nvidia-cuda-runtime==13.0.96\ntorch==2.13.0\n"
SHOWN = (
    "PartitionName=cpu AllowGroups=ALL State=UP MaxTime=1-00:00:00 MaxMemPerNode=UNLIMITED\n"
    "PartitionName=gpu State=UP MaxTime=02:00:00 MaxMemPerNode=64000\n"
    "PartitionName=old State=DOWN MaxTime=UNLIMITED MaxMemPerNode=UNLIMITED\n"
)
NODES = "cpu|192000|(null)\ngpu|515000+|gpu:h100:4(S:0-1)\ngpu|515000|gpu:a100:2\nold|1|(null)\n"


@pytest.mark.parametrize(
    ("script", "ok", "message"),
    [
        ("echo apptainer version 1.4.5", True, "1.4.5"),
        ("echo apptainer version 1.0.3", False, "1.0.3"),
        ("exit 1", False, "does not start"),
        (None, False, "not on the PATH"),
    ],
)
def test_apptainer_must_start_and_be_recent_enough(tmp_path, script, ok, message) -> None:
    if script:
        executable(tmp_path, "apptainer", script)
    finding = image.apptainer(str(tmp_path / "apptainer") if script else None)
    assert finding.ok == ok
    assert message in finding.message
    assert ok or "module" in finding.fix


@pytest.mark.parametrize("status", [0, 1])
def test_users_must_be_able_to_create_namespaces(tmp_path, monkeypatch, status) -> None:
    executable(tmp_path, "unshare", f"exit {status}")
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = image.namespaces()
    assert finding.ok == (status == 0)
    assert "user.max_user_namespaces" in finding.fix


@pytest.mark.parametrize(
    ("starts", "subjects"),
    [
        (True, ["apptainer", "image", "image runs", "CUDA"]),
        (False, ["apptainer", "image", "user namespaces", "image runs"]),
    ],
)
def test_without_user_namespaces_an_image_that_starts_all_the_same_is_no_problem(
    tmp_path, monkeypatch, starts, subjects
) -> None:
    """As with a setuid Apptainer, or where AppArmor allows them to Apptainer alone."""
    reads = "echo torch" if starts else "exit 1"
    executable(tmp_path, "apptainer", f"[ $1 = --version ] && echo 1.4.5 && exit\n{reads}")
    executable(tmp_path, "unshare", "exit 1")
    (tmp_path / "image.sif").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    findings = list(image.findings(str(tmp_path / "image.sif")))
    assert [finding.subject for finding in findings] == subjects
    assert all(finding.ok for finding in findings) == starts


def test_an_image_that_apptainer_unpacks_for_each_stage_is_told(tmp_path, monkeypatch) -> None:
    """As without squashfuse or /dev/fuse."""
    says = "echo 'INFO:    Converting SIF file to temporary sandbox...' >&2"
    executable(tmp_path, "apptainer", f"[ $1 = --version ] && echo 1.4.5 && exit\n{says}; echo torch")
    (tmp_path / "image.sif").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert [finding.subject for finding in image.findings(str(tmp_path / "image.sif")) if finding.note] == [
        "image mounts"
    ]


@pytest.mark.parametrize(
    ("lock", "driver", "oks"),
    [
        (LOCK, (13, 0), [True, True]),
        (LOCK, (13, 2), [True, True]),
        (LOCK, (12, 8), [True, False]),
        (LOCK, None, [True, False]),
        ("torch==2.13.0+cpu\n", None, [True, True]),
        (None, (13, 0), [False]),
    ],
)
def test_the_cuda_of_the_image_is_compared_with_the_driver(lock, driver, oks) -> None:
    assert [finding.ok for finding in image.cuda(lock, driver)] == oks


def test_the_pinned_list_of_the_gpu_image_names_its_cuda() -> None:
    messages = [finding.message for finding in image.cuda((ROOT / "requirements" / "cuda.txt").read_text(), (12, 4))]
    assert messages[1] == "image of CUDA 13.0, which needs driver 580 or newer; the driver here is for CUDA 12.4"


def test_a_quota_that_is_too_small_is_a_problem() -> None:
    header = "Disk quotas for user me (uid 1):\n  Filesystem blocks quota limit grace files quota limit grace\n"
    lines = f"{header}/dev/sda1 900000 1000000 1100000 0 10 0 0 0\n/dev/sdb1 5 0 0 0 1 0 0 0\n"
    (finding,) = node_checks.quota(lines, needed=50e6)
    assert finding.ok
    assert finding.message == "0.1 GB of the quota on /dev/sda1 is left"
    assert not next(node_checks.quota(lines, needed=5e9)).ok


@pytest.mark.parametrize(
    ("time", "minutes"),
    [("UNLIMITED", float("inf")), ("30:00", 30), ("02:00:00", 120), ("1-12:00:00", 2160), ("2-0", 2880)],
)
def test_times_of_slurm_are_parsed(time, minutes) -> None:
    assert slurm_checks.minutes_of(time) == minutes


def test_requests_are_compared_with_partitions() -> None:
    by_name = slurm_checks.partitions(SHOWN, NODES)
    for request, word in (
        (ResourceRequest("gpu", 120, 64000, "gpu:1"), ""),
        (ResourceRequest("gpu", 60, 8000, "gpu:h100:4"), ""),
        (ResourceRequest(None, 60, 8000, None), ""),
        (ResourceRequest("gpu", 121, 8000, "gpu:1"), "set `runtime: 120` or less"),
        (ResourceRequest("gpu", 60, 64001, "gpu:1"), "set `mem_mb: 64000` or less"),
        (ResourceRequest("cpu", 60, 193000, None), "mem_mb"),
        (ResourceRequest("gpu", 60, 8000, "gpu:h200:1"), "gres"),
        (ResourceRequest("gpu", 60, 8000, "gpu:a100:3"), "gres"),
        (ResourceRequest("cpu", 60, 8000, "gpu:1"), "gres"),
        (ResourceRequest("gpu", 60, 8000, "gpu:nvidia_a100-sxm4-80gb:1"), "write gpu:N, without a type"),
        (ResourceRequest("old", 60, 8000, None), "slurm_partition"),
        (ResourceRequest("none", 60, 8000, None), "slurm_partition"),
        (ResourceRequest("cpu,gpu", 60, 8000, "gpu:1"), ""),
        (ResourceRequest("cpu,gpu", 121, 8000, "gpu:1"), "gres"),
        (ResourceRequest("gpu,none", 60, 8000, "gpu:1"), "slurm_partition"),
        (ResourceRequest("gpu", 60, 8000, "gpu:h100:4", ("deepspeed.processes", 4)), ""),
        (
            ResourceRequest("gpu", 60, 8000, "gpu:h100:4", ("deepspeed.processes", 8)),
            "lower deepspeed.processes",
        ),
        (ResourceRequest(None, 60, 8000, "gpu:1", ("vllm.tensor_parallel_size", 2)), "set gres"),
        (ResourceRequest("cpu", 60, 8000, None, ("deepspeed.processes", 8)), ""),
    ):
        message, fix = slurm_checks.judge(by_name, request)
        assert (word in fix) if word else not fix, (request, message, fix)


def test_slices_of_gpus_whose_type_begins_with_a_digit_are_counted() -> None:
    whole = slurm_checks.partitions(SHOWN, NODES)["gpu"]
    sliced = {"gpu": whole._replace(gres="gpu:1g.10gb:4(S:0-1)")}
    for gres, fits in (("gpu:4", True), ("gpu:1g.10gb:4", True), ("gpu:5", False), ("gpu:3g.40gb:1", False)):
        _, fix = slurm_checks.judge(sliced, ResourceRequest("gpu", 60, 8000, gres))
        assert (not fix) is fits, gres


def test_a_later_attempt_that_its_partition_does_not_allow_is_a_note() -> None:
    by_name = slurm_checks.partitions(SHOWN, NODES)
    (fits,) = slurm_checks.compare_requests(by_name, {"update": ResourceRequest("gpu", 60, 8000, "gpu:1", None, 2)})
    (grows,) = slurm_checks.compare_requests(by_name, {"update": ResourceRequest("gpu", 60, 8000, "gpu:1", None, 3)})
    assert (fits.ok, fits.note, grows.ok, grows.note) == (True, False, True, True)
    assert "attempt 3 would request 180 minutes, but 120 are allowed" in grows.message
    limited = ResourceRequest("gpu", 60, 8000, "gpu:1", None, 3, longest=120)
    (finding,) = slurm_checks.compare_requests(by_name, {"update": limited})
    assert not finding.note


def test_limits_of_the_profile_hold_for_the_requests_of_all_rules() -> None:
    settings = slurm_checks.read_profile(ROOT / "profiles" / "slurm")
    rules, config = ROOT / "workflow" / "rules", Config(**mini())
    without = slurm_checks.requests(settings, rules, config)
    settings["resources"] = {"runtime": 45, "mem_mb": 6000}
    by_rule = slurm_checks.requests(settings, rules, config)
    assert (without["update"].minutes, by_rule["update"].minutes, by_rule["report"].minutes) == (240, 45, 30)
    assert (without["score"].megabytes, by_rule["score"].megabytes, by_rule["update"].megabytes) == (4000, 4000, 6000)
    assert {request.longest for request in by_rule.values()} == {45}
    settings["resources"] = ["runtime=45", "mem_mb=6000"]
    assert slurm_checks.requests(settings, rules, config) == by_rule, "which Snakemake reads, too"


def test_sbatch_is_asked_for_what_the_profile_sets(tmp_path, monkeypatch) -> None:
    """Only SLURM knows which account, QOS, constraint or reservation it wants."""
    settings = slurm_checks.read_profile(ROOT / "profiles" / "slurm")
    settings["default-resources"] |= {
        "slurm_account": "mine,other",
        "slurm_extra": "'--mail-user=me --wckey=\"a b\"'",
    }
    settings["set-resources"]["update"] |= {"constraint": "'a100'", "qos": "long", "clusters": "big"}
    settings["set-resources"]["report"] = {"mem_mb_per_cpu": 2000, "cpus_per_task": 3}
    settings["rloo-slurm-reservation"] = "course"
    config = Config(**mini(deepspeed={"processes": 2, "nodes": 2}))
    by_rule = slurm_checks.requests(settings, ROOT / "workflow" / "rules", config)
    asked = ["-A", "mine", "-p", "gpu", "--clusters", "big", "-t", "240", "-C", "a100", "--qos=long", "--mem", "16000"]
    asked += ["--nodes=2", "--reservation=course", "--ntasks=2", f"--cpus-per-task={config.deepspeed.threads}"]
    asked += ["--mail-user=me", "--wckey=a b", "--gres=gpu:1"]
    assert [*by_rule["update"].options] == asked
    assert slurm_checks.judge({}, by_rule["update"]) == ("a cluster that the profile names", ""), (
        "SLURM knows its partitions"
    )
    of_report = " ".join(by_rule["report"].options)
    assert "--mem-per-cpu 2000 --reservation=course --ntasks=1 --cpus-per-task=3" in of_report

    refuses = "sbatch: error: Batch job submission failed: Invalid qos specification"
    executable(
        tmp_path, "sbatch", f'echo "$*" >>{tmp_path}/asked; case "$*" in *--qos*) echo "{refuses}" >&2; exit 1; esac'
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    by_name = slurm_checks.partitions(SHOWN.replace("02:00:00", "1-0"), NODES)
    jobs = {rule: by_rule[rule] for rule in ("update", "rollout")}
    findings = {
        finding.subject: finding for finding in slurm_checks.compare_requests(by_name, jobs, slurm_checks.refusal)
    }
    assert findings["slurm rollout"].ok
    assert not findings["slurm update"].ok
    assert findings["slurm update"].message == f"SLURM would not start a job with {' '.join(asked)}: {refuses}"
    assert (tmp_path / "asked").read_text().splitlines()[0] == f"--test-only {' '.join(asked)} --wrap=true"

    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert slurm_checks.refusal(jobs["update"]) == "", "in a job, where sbatch may be refused for other reasons"


@pytest.mark.parametrize(
    ("extra", "reason"),
    [("--wckey='a", "slurm_extra is --wckey='a: No closing quotation"), ("'--mem=4'", "option is not allowed")],
)
def test_what_snakemake_would_not_submit_is_a_problem_without_asking_slurm(extra, reason) -> None:
    settings = slurm_checks.read_profile(ROOT / "profiles" / "slurm")
    settings["set-resources"]["update"]["slurm_extra"] = extra
    by_rule = slurm_checks.requests(settings, ROOT / "workflow" / "rules", Config(**mini()))
    by_name = slurm_checks.partitions(SHOWN.replace("02:00:00", "1-0"), NODES)
    (finding,) = slurm_checks.compare_requests(by_name, {"update": by_rule["update"]}, pytest.fail)
    assert not finding.ok
    assert reason in finding.message


@pytest.mark.parametrize(
    "error",
    [
        "sbatch: error: Unable to contact slurm controller (connect failure)",
        "sbatch: error: QOSMaxSubmitJobPerUserLimit",
    ],
)
def test_slurm_that_does_not_judge_requests_is_a_note_and_is_asked_once(tmp_path, monkeypatch, error) -> None:
    executable(tmp_path, "sbatch", f'echo >>{tmp_path}/asked; echo "{error}" >&2; exit 1')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    jobs = {rule: ResourceRequest("gpu", minutes, 8000, "gpu:1") for rule, minutes in (("update", 60), ("rollout", 30))}
    by_name = slurm_checks.partitions(SHOWN, NODES)
    *judged, note = slurm_checks.compare_requests(by_name, jobs, slurm_checks.refusal)
    assert [finding.ok for finding in judged] == [True, True]
    assert note.ok
    assert note.note
    assert note.message == f"could not be asked whether it would start all jobs: {error}"
    assert (tmp_path / "asked").read_text() == "\n"


def test_gpus_of_amd_are_told_on_the_node_and_in_its_partition(monkeypatch) -> None:
    monkeypatch.setattr(gpus.devices, "has_gpu", lambda: False)
    monkeypatch.setattr(gpus.Path, "exists", lambda path: str(path) == "/dev/kfd")
    (finding,) = gpus.findings(Config(**mini()), in_image=True)
    assert finding.note
    assert finding.message == "AMD GPUs are not supported: everything would run on the CPU here"
    by_name = slurm_checks.partitions(SHOWN, "gpu|515000|gpu:mi250:8(S:0-3)\n")
    message, fix = slurm_checks.judge(by_name, ResourceRequest("gpu", 60, 8000, "gpu:1"))
    assert message == "partition 'gpu' has AMD GPUs (mi250), which are not supported"
    assert fix


@pytest.mark.parametrize(("gres", "refused"), [("gpu:1", False), ("gpu:a100:1", False), ("gpu:mi250:1", True)])
def test_a_partition_with_gpus_of_several_makers_is_refused_for_those_of_amd_alone(gres, refused) -> None:
    by_name = slurm_checks.partitions(SHOWN, "gpu|515000|gpu:a100:4\ngpu|515000|gpu:mi250:8(S:0-3)\n")
    message, fix = slurm_checks.judge(by_name, ResourceRequest("gpu", 60, 8000, gres))
    assert bool(fix) is refused
    assert ("AMD GPUs (mi250)" in message) is refused


@pytest.mark.parametrize(
    ("gres", "options", "warned"),
    [
        ("gpu:2", (), True),
        ("gpu", (), True),
        ("gpu:a100:1", (), False),
        ("gpu:1", ("-C a100",), False),
        ("gpu:1", ("--clusters", "other"), False),
        (None, (), False),
    ],
)
@pytest.mark.parametrize("partition", ["gpu", None])
def test_a_request_without_a_type_that_may_get_gpus_of_amd_is_a_note(partition, gres, options, warned) -> None:
    request = ResourceRequest(partition, 60, 8000, gres, options=options)
    mixed = "gpu|515000|gpu:a100:4(S:0-1)\ngpu|515000|gpu:mi250:8(S:0-3)\n"
    shown = SHOWN.replace("=gpu ", "=gpu Default=YES ")
    for nodes, note in ((mixed, warned), (NODES, False)):
        (finding,) = slurm_checks.compare_requests(slurm_checks.partitions(shown, nodes), {"update": request})
        assert finding.ok
        assert finding.note == note
        number = (gres or "").removeprefix("gpu").removeprefix(":") or "1"
        expected = (
            "; it may get AMD GPUs (mi250), which are not supported: write "
            f"`gres: gpu:a100:{number}` or `constraint: NAME` for these rules under set-resources in the profile"
        )
        assert finding.message.endswith(expected) == note


@pytest.mark.parametrize("nvidia", ["gpu:4", "gpu:nvidia_a100-sxm4-80gb:4"])
def test_a_type_that_cannot_be_requested_is_not_advised_against_gpus_of_amd(nvidia) -> None:
    by_name = slurm_checks.partitions(SHOWN, f"gpu|515000|{nvidia}\ngpu|515000|gpu:mi250:8(S:0-3)\n")
    (finding,) = slurm_checks.compare_requests(by_name, {"update": ResourceRequest("gpu", 60, 8000, "gpu:1")})
    assert "(mi250), which are not supported: write `constraint: NAME` for these rules" in finding.message


def test_the_gpus_that_the_rule_itself_requests_for_a_reward_are_compared_with_its_partition() -> None:
    own = {"function": "own.py:judge", "gpus": 2}
    for rewards, gres in ([own], "gpu:2"), (mini()["rewards"], None):
        settings = slurm_checks.read_profile(ROOT / "profiles" / "slurm")
        config = Config(**mini(rewards=rewards))
        assert slurm_checks.requests(settings, ROOT / "workflow" / "rules", config)["score_alone"].gres == gres
        settings["default-resources"]["gres"] = "gpu:h100:8"
        of_rule = slurm_checks.requests(settings, ROOT / "workflow" / "rules", config)["score_alone"]
        assert of_rule.gres == (gres or "gpu:h100:8"), "Snakemake's defaults are for what the rule does not set"
        settings["set-resources"]["score_alone"]["gres"] = "gpu:a100:1"
        of_profile = slurm_checks.requests(settings, ROOT / "workflow" / "rules", config)["score_alone"]
        assert of_profile.gres == "gpu:a100:1"


def test_the_profile_replaces_all_defaults_of_snakemake_that_read_the_sizes_of_files() -> None:
    defaults = slurm_checks.read_profile(ROOT / "profiles" / "slurm")["default-resources"]
    assert {"mem_mb", "disk_mb"} <= defaults.keys()


def test_requests_are_read_from_the_workflow_and_the_profile() -> None:
    settings = slurm_checks.read_profile(ROOT / "profiles" / "slurm")
    rules, config = ROOT / "workflow" / "rules", Config(**mini(deepspeed={"processes": 8, "nodes": 2}))
    by_rule = slurm_checks.requests(settings, rules, config)
    assert {"rollout", "score", "update", "update_last", "update_transient", "evaluate", "report"} <= by_rule.keys()
    assert by_rule["update_last"] == by_rule["update"]
    assert by_rule["update"].minutes == 240
    assert by_rule["score"].megabytes == 4000, "one worker"
    many = Config(**mini(scoring={"workers": 64}))
    assert slurm_checks.requests(settings, rules, many)["score"].megabytes == 67000
    assert by_rule["update"].partition == "gpu"
    settings["set-resources"]["update"]["runtime"] = "30 * attempt"
    assert slurm_checks.requests(settings, rules, config)["update"][1::4] == (30, 3)
    settings["set-resources"]["update"]["runtime"] = 30
    assert slurm_checks.requests(settings, rules, config)["update"].attempts == 1
    settings["set-resources"]["update"] |= {"runtime": "4h", "mem": "64GB"}
    assert slurm_checks.requests(settings, rules, config)["update"][1:3] == (240, 64000)
    settings["set-resources"]["warmstart"] = {"gpu": 8, "gpu_model": "h100"}
    assert slurm_checks.requests(settings, rules, config)["warmstart"].gres == "gpu:h100:4", "of two nodes"
    as_mappings = slurm_checks.requests(settings, rules, config)
    settings["default-resources"] = [f"{name}={value}" for name, value in settings["default-resources"].items()]
    settings["set-resources"] = [
        f"{rule}:{name}={value}" for rule, own in settings["set-resources"].items() for name, value in own.items()
    ]
    assert slurm_checks.requests(settings, rules, config) == as_mappings, "which Snakemake reads, too"
    used = {rule: request.engine_gpus for rule, request in by_rule.items() if request.gres}
    assert {rule for rule, by in used.items() if by == ("deepspeed.processes", 4)} == {
        *("warmstart", "update", "update_last", "update_transient")
    }
    without_gpus = {"checks", "reference", "refill_reference", "distance", "refill", "difficulty"}
    without_gpus |= {"evaluate_chosen", "prove_chosen", "teacher", "reward_model", "harness"}
    assert {rule for rule, by in used.items() if by is None} == without_gpus
    refills = Config(**mini(rollout={"refill": 1}, algorithm={"filter_zero_variance": True}))
    request = slurm_checks.requests(settings, rules, refills)["refill"]
    assert request.engine_gpus == ("vllm.tensor_parallel_size", 1), "where it is used"
    tools = ["rloo_pipeline.environments.tools:calculator"]
    with_environments = slurm_checks.requests(
        settings, rules, Config(**mini(rollout={"tools": tools, "environment_gpus": 1}))
    )
    message, fix = slurm_checks.judge({}, with_environments["rollout"])
    assert message == ("requests gpu:1, but vllm.tensor_parallel_size + rollout.environment_gpus uses 2 GPUs per node")
    assert fix.startswith("set gres to that number in the profile")
    assert set(used.values()) <= {None, ("deepspeed.processes", 4), ("vllm.tensor_parallel_size", 1)}


def test_all_gpus_that_a_stage_uses_are_compared_with_its_request() -> None:
    """Log-probs of a model that ZeRO 3 splits run on the ranks of an update; where samples are scored at once, a reward
    function may need more GPUs than the engine.
    """
    settings = slurm_checks.read_profile(ROOT / "profiles" / "slurm")
    rewards = [reward | {"gpus": 4} for reward in mini()["rewards"]]
    changes = {"deepspeed": {"processes": 8, "zero_stage": 3}, "rewards": rewards, "vllm": {"tensor_parallel_size": 2}}
    changes |= {"rollout": {"refill": 1}, "algorithm": {"filter_zero_variance": True}}
    changes |= {"select": {}, "dataset": {"dev": mini()["dataset"]["eval"]}}
    changes |= {"evaluation": {"harness": {"tasks": ["gsm8k"]}}}
    by_rule = slurm_checks.requests(settings, ROOT / "workflow" / "rules", Config(**mini(**changes)))
    for rule in ("reference", "refill_reference", "distance", "prove_chosen", "update"):
        assert by_rule[rule].engine_gpus == ("deepspeed.processes", 8), rule
    for rule in ("probe", "evaluate", "evaluate_chosen"):
        assert by_rule[rule].engine_gpus == ("rewards.gpus", 4), rule
    for rule in ("rollout", "harness"):
        assert by_rule[rule].engine_gpus == ("vllm.tensor_parallel_size", 2), rule
    without = Config(**mini(**changes | {"algorithm": {"filter_zero_variance": True, "beta": 0}}))
    assert slurm_checks.requests(settings, ROOT / "workflow" / "rules", without)["reference"].engine_gpus is None


def configure(folder: Path, **changes) -> Path:
    """A configuration whose data are a file."""
    (folder / "rows.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    source = {"path": "rows.jsonl", "generator": None, "options": {}}
    raw = mini(data_dir=str(folder), dataset={"train": source, "eval": source}, warmstart={"sft": None}, **changes)
    (folder / "config.yaml").write_text(yaml.safe_dump(raw))
    return folder / "config.yaml"


@pytest.mark.parametrize(
    ("executor", "subjects"),
    [
        ("slurm", ["profile"]),
        ("rloo-slurm", ["slurm"]),
        ("rloo-slurm\nslurm-requeue: true", ["profile"]),
        ("local", []),
    ],
)
def test_a_profile_of_the_plain_slurm_executor_is_a_problem(tmp_path, monkeypatch, executor, subjects) -> None:
    """Its keys would be ignored, and cancelled jobs would be submitted again."""
    (tmp_path / "profile.v9+.yaml").write_text(f"executor: {executor}\n")
    monkeypatch.setenv("PATH", str(tmp_path))  # no scontrol there
    findings = list(slurm_checks.findings(tmp_path, ROOT / "workflow" / "rules", Config(**mini())))
    assert [finding.subject for finding in findings] == subjects
    assert not any(finding.ok for finding in findings)


def test_a_node_without_problems_ends_with_0_and_one_with_some_with_1(tmp_path, monkeypatch, capsys, caplog) -> None:
    programs = tmp_path / "bin"
    executable(programs, "scontrol", f"cat <<'X'\n{SHOWN.replace('02:00:00', '1-0').replace('old', 'x')}X")
    executable(programs, "sinfo", f"cat <<'X'\n{NODES}X")
    executable(programs, "sbatch", "exit 0")
    executable(programs, "apptainer", f"[ $1 = --version ] && echo 1.4.5 && exit\ncat <<'X'\n{LOCK.splitlines()[1]}\nX")
    executable(programs, "unshare", "exit 0")
    (tmp_path / "image.sif").touch()
    changes = {"container": {"image": str(tmp_path / "image.sif"), "binds": [str(tmp_path)]}}
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(gpus.devices, "has_gpu", lambda: False)  # this machine's own is not that of the node
    monkeypatch.setattr(main.environment, "prepare", lambda _: None)  # it sets what other tests would inherit
    monkeypatch.setattr(logging, "raiseExceptions", False)  # libraries of earlier tests may log to a closed stream
    argv = ["doctor", str(configure(tmp_path, **changes)), "--profile", str(ROOT / "profiles" / "slurm")]
    main.main(argv)
    assert "what to do" not in capsys.readouterr().out
    (tmp_path / "rows.jsonl").unlink()
    (tmp_path / "image.sif").unlink()
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}")
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0half")
    changes["container"]["binds"] = [str(tmp_path / "none")]
    changes["model"] = {"build": None, "build_options": {}, "name_or_path": str(tmp_path / "weights")}
    configure(tmp_path, **changes)
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(SystemExit, match="1"):
        main.main(argv)
    output = capsys.readouterr()
    assert "5 problems" in caplog.text
    problems = ("image.sif does not exist", "correct container.binds", "truncated or damaged", "rows.jsonl")
    for message in ("rloo images cuda", *problems):
        assert message in output.out
    assert "Traceback" not in output.err, "only a log has it"


def test_caches_that_cannot_be_written_to_are_a_problem(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    for name in ("HF_HOME", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "file"))
    writable = {finding.subject: finding.ok for finding in node_checks.caches()}
    assert writable["cache folder"]
    assert not writable["HF_HOME folder"]
    assert not writable["TORCH_EXTENSIONS_DIR folder"]


def test_a_run_larger_than_the_disk_is_a_problem(tmp_path) -> None:
    assert next(node_checks.space(tmp_path, 1e3)).ok
    assert not next(node_checks.space(tmp_path, 1e18)).ok


def test_what_is_built_or_generated_needs_no_files() -> None:
    config = Config(**mini())
    assert all(finding.ok for finding in (*node_checks.model(config, ""), *node_checks.datasets(config, "")))


@pytest.mark.parametrize(("name", "notes"), [("x86_64", 0), ("aarch64", 1)])
def test_a_machine_on_which_nothing_has_run_yet_is_a_note(name, notes, monkeypatch) -> None:
    monkeypatch.setattr(node_checks.os, "uname", lambda: argparse.Namespace(machine=name))
    findings = list(node_checks.architecture())
    assert [(finding.ok, finding.note) for finding in findings] == [(True, True)] * notes
