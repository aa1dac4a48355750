"""Checks a SLURM profile: its partitions exist, are up, and allow the time, memory and GPUs that jobs request, jobs
request as many GPUs as their engines use, and sbatch would take them, with their account, QOS and constraint.

Requests in the rules themselves are parsed from workflow/rules/*.smk: `growing(amount)` counts with the amount of its
first attempt, and a sum with its first number. `scoring_memory` follows from the configuration.
"""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rloo_pipeline.before_run import sbatch_options
from rloo_pipeline.before_run.findings import Finding
from rloo_pipeline.cluster import slurm
from rloo_pipeline.config import Config, Scoring
from rloo_pipeline.errors import UserError, one_line
from rloo_pipeline.runtime import guard
from rloo_pipeline.runtime.slurm_commands import UnansweredError, run
from rloo_pipeline.stages.table import ROWS, StageRow
from rloo_pipeline.workers import gpu_shares

RULE = re.compile(r"^(?:rule (\w+):|use rule (\w+) as (\w+) with:)", re.MULTILINE)
GROWING = re.compile(r"(mem_mb|runtime)=(?:growing\((\d+)|scoring_memory)")
GPUS = re.compile(r"gpu(?::(\d*[A-Za-z_][\w.+-]*))?(?::(\d+))?")
AMD = re.compile(r"(?:.*[_-])?mi\d{2,3}\w*", re.IGNORECASE)
"""Type of AMD's data center GPUs in a partition's resources, such as `gpu:mi250:8`."""
UNLIMITED = ("UNLIMITED", "infinite", "INVALID")


class Partition(NamedTuple):
    """A partition of the cluster."""

    up: bool
    minutes: float
    """Time limit of a job."""
    megabytes: float
    """Memory limit of a job on a node."""
    gres: str
    """Generic resources (GRES) of its nodes, such as `gpu:h100:4`."""
    is_default: bool = False
    """True if jobs that name no partition start here."""


class ResourceRequest(NamedTuple):
    """The resources that a rule requests."""

    partition: str | None
    minutes: float
    megabytes: float
    gres: str | None
    engine_gpus: tuple[str, int] | None = None
    """Configuration key that sets the number of GPUs per node for its engine, and that number."""
    attempts: int = 1
    """Number of attempts; attempt n requests n times the minutes."""
    longest: float = float("inf")
    """Limit of the minutes that an attempt requests, from `resources` in the profile."""
    options: tuple[str, ...] = ()
    """Options of sbatch."""
    fault: str = ""
    """Snakemake's reason not to submit such a job."""


USE_OURS = "write `executor: rloo-slurm`, and `rloo-slurm-…` for its keys `slurm-…`, as in profiles/slurm"
"""Advice for a profile for Snakemake's own SLURM executor."""
OTHER_OPTIONS = (
    "see `sinfo -R` for nodes that are down; else set slurm_account, qos, constraint or slurm_extra under "
    "default-resources in the profile as your site asks for, or what these rules request under set-resources"
)
"""Advice for a job that SLURM would not start."""


def findings(profile: Path, rules: Path, config: Config) -> Iterator[Finding]:
    """Runs all checks of SLURM; none if the profile is for another executor.

    Args:
        profile: folder of the Snakemake profile.
        rules: folder with the .smk files.
        config: the run's configuration.

    Raises:
        UserError: the profile cannot be read.
    """
    settings = read_profile(profile)
    if settings.get("executor") == "slurm" or any(key.startswith("slurm-") for key in settings):
        yield Finding("profile", False, f"{profile} is for Snakemake's own SLURM executor", USE_OURS)
        return
    if settings.get("executor") != "rloo-slurm":
        return
    try:
        guard.require("snakemake-executor-plugin-slurm")
    except UserError as error:
        message, _, fix = str(error).rpartition(": ")
        yield Finding("profile", False, message, fix)
        return
    if not (shutil.which("scontrol") and shutil.which("sinfo")):
        yield Finding("slurm", False, "no scontrol and sinfo on the PATH", "run this on a login or compute node")
        return
    try:
        shown = "\n".join(run("scontrol", "show", "partition", "-o"))
        nodes = "\n".join(run("sinfo", "-h", "-o", "%R|%m|%G"))
    except UserError as error:
        yield Finding("slurm", False, f"does not respond ({error})", "check whether SLURM is up")
        return
    yield from compare_requests(partitions(shown, nodes), requests(settings, rules, config), refusal)


def read_profile(profile: Path) -> dict[str, Any]:
    """Reads the settings of a profile.

    Raises:
        UserError: the file is missing, or not YAML.
    """
    file = profile / "profile.v9+.yaml"
    try:
        return dict(yaml.safe_load(file.read_text(encoding="utf-8")) or {})
    except FileNotFoundError:
        raise UserError(f"{file}: no such profile; pass its folder with --profile") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{file}: not a profile ({one_line(error)}); correct it, or name another one") from error


def partitions(shown: str, nodes: str) -> dict[str, Partition]:
    """Partitions by name.

    Args:
        shown: output of `scontrol show partition -o`.
        nodes: output of `sinfo -h -o '%R|%m|%G'`.
    """
    node_memory: dict[str, float] = {}
    gres: dict[str, str] = {}
    for name, memory, gpus in (line.strip().split("|", 2) for line in nodes.splitlines() if line.count("|") == 2):
        node_memory[name] = max(node_memory.get(name, 0.0), float(re.sub(r"\D", "", memory) or 0))
        gres[name] = f"{gres.get(name, '')} {gpus}".strip()
    by_name = {}
    for line in shown.splitlines():
        facts = dict(field.split("=", 1) for field in line.split() if "=" in field)
        if partition := facts.get("PartitionName"):
            limit = facts.get("MaxMemPerNode", "UNLIMITED")
            megabytes = node_memory.get(partition, float("inf")) if limit in UNLIMITED else float(limit)
            minutes = minutes_of(facts.get("MaxTime", "UNLIMITED"))
            up, is_default = facts.get("State") == "UP", facts.get("Default") == "YES"
            by_name[partition] = Partition(up, minutes, megabytes, gres.get(partition, ""), is_default)
    return by_name


def refuse_too_long(options: Mapping[str, Any]) -> None:
    """Refuses a job that sbatch would take but SLURM never start, since its partition does not allow so much time.

    Args:
        options: options of sbatch by name. A job is not checked if it names a QOS, which may lift the limit, or the
            least time that it needs, or another cluster.

    Raises:
        UserError: all of the partitions that it names, or the default one, allow less time.
    """
    time, partition = str(options["time"]), options.get("partition")
    if {"qos", "clusters", "time-min"} & options.keys() or partition is True:
        return
    try:
        by_name = partitions("\n".join(run("scontrol", "show", "partition", "-o")), "")
        minutes = _minutes_of_job(time)
    except (UserError, ValueError):
        return  # sbatch says what is wrong
    names = partition.split(",") if partition else _default(by_name)
    limits = [by_name[name].minutes if name in by_name else float("inf") for name in names]  # scontrol hides some
    longest = max(limits, default=float("inf"))
    if minutes > longest:
        raise UserError(
            f"--time {time}: partition {' or '.join(names)} allows {longest:.0f} minutes, so sbatch would take the job "
            "and SLURM never start it; ask for less, since the job requeues itself until the run is finished, or name "
            "another partition with --sbatch partition=NAME, or the QOS that lifts the limit with --sbatch qos=NAME"
        )


def _minutes_of_job(time: str) -> float:
    """Converts the value of sbatch's `--time`, where a number alone is minutes, and 0 or -1 stands for no limit."""
    if time.upper() in ("UNLIMITED", "INFINITE", "-1"):
        return float("inf")
    return minutes_of(time if re.search("[:-]", time) else f"{time}:00") or float("inf")


def _default(by_name: Mapping[str, Partition]) -> list[str]:
    """Name of the default partition; empty if the cluster has none."""
    return [name for name, partition in by_name.items() if partition.is_default]


def minutes_of(time: str) -> float:
    """Converts a SLURM time, [days-]hours:minutes:seconds, to minutes."""
    if time in UNLIMITED:
        return float("inf")
    days, _, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    padded = [*parts, 0, 0] if days else [*([0] * (3 - len(parts))), *parts]
    hours, minutes, seconds = padded[:3]
    return int(days or 0) * 1440 + hours * 60 + minutes + seconds / 60


def requests(settings: Mapping[str, Any], rules: Path, config: Config) -> dict[str, ResourceRequest]:
    """The resources that each rule requests in its first attempt, from the profile's set-resources, the rule, or the
    profile's defaults, in this order.
    """
    default, per_rule = _resources(settings.get("default-resources")), settings.get("set-resources") or {}
    limits = {name: _amount(name, value) for name, value in _resources(settings.get("resources")).items()}
    longest = limits.get("runtime", float("inf"))
    by_rule = {}
    for rule, row, own in _rules(rules, config.scoring):
        if isinstance(per_rule, list):
            for_rule = _resources(
                [entry.removeprefix(f"{rule}:") for entry in per_rule if entry.startswith(f"{rule}:")]
            )
        else:
            for_rule = _resources(per_rule.get(rule))
        of_rewards = max((reward.gpus for reward in config.rewards), default=0) if rule == "score_alone" else 0
        by_function = {"gres": f"gpu:{of_rewards}"} if of_rewards else {}  # in the rule
        resources = default | own | by_function | for_rule
        minutes = min(_amount("runtime", resources.get("runtime")), longest)
        memory = min(_amount("mem", resources.get("mem_mb")), limits.get("mem_mb", float("inf")))
        grows = "attempt" in str(for_rule.get("runtime", "growing(attempt)"))
        attempts = 1 + int(settings.get("retries") or 0) if grows else 1
        resources = {
            name: sbatch_options.evaluated(name, value) for name, value in resources.items() if value is not None
        }
        partition, gres = resources.get("slurm_partition"), resources.get("gres")
        gpus = None if row is None else _engine_gpus(row, config)
        nodes = config.deepspeed.nodes if gpus and gpus[0] == "deepspeed.processes" else 1
        if not gres and isinstance(total := resources.get("gpu"), int):  # --gpus, of all nodes
            gres = ":".join(["gpu", *filter(None, [resources.get("gpu_model")]), str(total // nodes)])
        resources |= {"runtime": round(minutes), "mem_mb": round(memory)}  # 0: not asked for
        if resources.get("mem_mb_per_cpu"):
            memory = 0
        if gpus and nodes > 1:
            resources = sbatch_options.of_ranks(nodes, gpus[1], config.deepspeed.threads) | resources
        options, fault = sbatch_options.of_job(settings, resources)
        by_rule[rule] = ResourceRequest(partition, minutes, memory, gres, gpus, attempts, longest, options, fault)
    return by_rule


def _engine_gpus(row: StageRow, config: Config) -> tuple[str, int] | None:
    """The key that sets the GPUs per node for a rule's engine, and their number.

    None if the run has no jobs of the rule, or if one GPU is enough for any configuration.
    """
    role, vllm, ranks = gpu_shares.role_of(row.stage), config.vllm, config.deepspeed
    without_sft = row.stage == "warmstart" and not config.warmstart.sft
    if without_sft or (row.when is not None and not row.when(config, 1)):
        return None
    if role == "trainer" or (role == "logprobs" and ranks.splits_passes):
        return "deepspeed.processes", ranks.processes // ranks.nodes
    if role != "sampler":
        return None
    key, count = "vllm.tensor_parallel_size", vllm.tensor_parallel_size
    if row.stage == "harness":
        return key, count
    if vllm.data_parallel_size > 1:
        key, count = f"{key} · vllm.data_parallel_size", vllm.gpus
    of_rewards = max((reward.gpus for reward in config.rewards), default=0)
    if "rewards" in (row.decides or ()) and of_rewards > count:  # they take turns with the engine on its GPUs
        key, count = "rewards.gpus", of_rewards
    beside = config.rollout.environment_gpus
    return (f"{key} + rollout.environment_gpus", count + beside) if beside else (key, count)


def _rules(folder: Path, scoring: Scoring) -> Iterator[tuple[str, StageRow | None, dict[str, int]]]:
    """Rules that are submitted as jobs, with row and resources. A `use rule` inherits the resources of its base."""
    rows = {row.rule: row for row in ROWS}
    resources: dict[str, dict[str, int]] = {}
    for file in sorted(folder.glob("*.smk")):
        text = file.read_text(encoding="utf-8")
        headers = list(RULE.finditer(text))
        ends = [*(header.start() for header in headers), len(text)][1:]
        for header, end in zip(headers, ends, strict=False):
            growing = GROWING.findall(text[header.start() : end])
            own = {name: int(amount or scoring.memory_mb) for name, amount in growing}
            name = header[1] or header[3]
            resources[name] = own or resources.get(header[2] or "", {})
            if resources[name]:
                yield name, rows.get(name, rows.get(header[2])), resources[name]


def _resources(section: Mapping[str, Any] | list[str] | None) -> dict[str, Any]:
    """Resources in a profile: a mapping, or a list of NAME=VALUE. `mem` is an alias of `mem_mb` whose value may have a
    unit.
    """
    if isinstance(section, list):
        section = {name: yaml.safe_load(value) for name, _, value in (entry.partition("=") for entry in section)}
    return {"mem_mb" if name == "mem" else name: value for name, value in (section or {}).items()}


def _amount(name: str, value: Any) -> float:
    """Parses `runtime` into minutes or `mem` into megabytes as Snakemake does: 90, 2h, 64GB. For an expression such as
    `30 * attempt`, takes its first number.
    """
    from snakemake.exceptions import WorkflowError
    from snakemake.resources import Resource

    with suppress(WorkflowError):
        value = Resource.parse_human_friendly(name, value)
    match = re.search(r"\d+(?:\.\d+)?", str(value))
    return float(match[0]) if match else 0.0


def refusal(request: ResourceRequest) -> str:
    """SLURM's sentence if it would not start such a job; empty if it would, or in a job, where it may refuse any.

    Raises:
        UnansweredError: SLURM does not say, for example because its controller does not answer.
    """
    try:
        if slurm.own_job() is None:
            run("sbatch", "--test-only", *request.options, "--wrap=true")
    except UnansweredError:
        raise
    except UserError as error:
        return _reason(error)
    return ""


def _reason(error: UserError) -> str:
    """SLURM's own words in an error, without the command."""
    return str(error).partition("`: ")[2] or str(error)


def compare_requests(
    by_name: Mapping[str, Partition],
    by_rule: Mapping[str, ResourceRequest],
    refusal: Callable[[ResourceRequest], str] = lambda _: "",
) -> Iterator[Finding]:
    """Compares each request with its partition, then asks `refusal` for SLURM's reason against it, until SLURM does not
    answer. Rules with the same request share a finding.
    """
    groups: dict[ResourceRequest, list[str]] = {}
    for rule, request in by_rule.items():
        groups.setdefault(request, []).append(rule)
    unanswered = ""
    for request, rules in groups.items():
        message, fix = judge(by_name, request)
        try:
            if not (fix or unanswered) and (reason := refusal(request)):
                message, fix = f"SLURM would not start a job with {' '.join(request.options)}: {reason}", OTHER_OPTIONS
        except UnansweredError as error:
            unanswered = _reason(error)
        warning = "" if fix else _later_attempts(by_name, request) + _any_maker(by_name, request)
        yield Finding(f"slurm {', '.join(rules)}", not fix, message + warning, fix, note=bool(warning))
    if unanswered:
        yield Finding("slurm", True, f"could not be asked whether it would start all jobs: {unanswered}", note=True)


def _later_attempts(by_name: Mapping[str, Partition], request: ResourceRequest) -> str:
    """A warning about the time that the last attempt requests; empty if the partition allows it."""
    partition = by_name.get(request.partition or "")
    minutes = min(request.minutes * request.attempts, request.longest)
    if partition is None or minutes <= partition.minutes:
        return ""
    return (
        f"; attempt {request.attempts} would request {minutes:.0f} minutes, but {partition.minutes:.0f} are allowed, "
        f"so it would never start; `resources: {{runtime: {partition.minutes:.0f}}}` in the profile limits all jobs"
    )


def _any_maker(by_name: Mapping[str, Partition], request: ResourceRequest) -> str:
    """A warning about AMD GPUs that a request without a type may get; empty if it gets none."""
    gpus, deciding = GPUS.fullmatch(request.gres or ""), ("-C", "--constraint", "--clusters")
    if gpus is None or gpus[1] or any(option.startswith(deciding) for option in request.options):
        return ""
    names = request.partition.split(",") if request.partition else _default(by_name)
    models = [model for name in names if name in by_name for model, _ in GPUS.findall(by_name[name].gres)]
    amd = next(filter(AMD.fullmatch, models), "")
    if not amd:
        return ""
    others = (model for model in models if re.fullmatch(r"[\w.]+", model) and not AMD.fullmatch(model))
    by_type = "".join(f"`gres: gpu:{model}:{gpus[2] or 1}` or " for model in islice(others, 1))
    return (
        f"; it may get AMD GPUs ({amd}), which are not supported: write {by_type}`constraint: NAME` for these rules "
        "under set-resources in the profile"
    )


def judge(by_name: Mapping[str, Partition], request: ResourceRequest) -> tuple[str, str]:
    """Returns message and fix for a request; the fix is empty if the cluster can satisfy the request."""
    gpus = GPUS.fullmatch(request.gres or "")
    if gpus and request.engine_gpus and int(gpus[2] or 1) < request.engine_gpus[1]:
        key, count = request.engine_gpus
        message = f"requests {request.gres}, but {key} uses {count} GPUs per node"
        return message, f"set gres to that number in the profile, or lower {key}"
    if request.gres and not re.fullmatch(r"[\w.:]+", request.gres):
        message = f"requests {request.gres}, but Snakemake's SLURM plugin takes only letters, digits, _ and ."
        return message, "write gpu:N, without a type; `constraint` of the rule can name the model"
    if request.fault:
        return f"would not be submitted ({request.fault})", "correct it in the profile"
    if "--clusters" in request.options:  # by_name has the partitions of this one
        return "a cluster that the profile names", ""
    if request.partition is None:
        return "the default partition of the cluster", ""
    names = str(request.partition).split(",")  # SLURM starts a job in any of several partitions
    if unknown := [name for name in names if name not in by_name]:
        message = f"no partition '{unknown[0]}' (there are {', '.join(sorted(by_name)) or 'none'})"
        return message, "set slurm_partition in the profile"
    if len(names) > 1:
        verdicts = [judge(by_name, request._replace(partition=name)) for name in names]
        return next((verdict for verdict in verdicts if not verdict[1]), verdicts[0])
    partition, name = by_name[names[0]], f"partition '{request.partition}'"
    if not partition.up:
        return f"{name} is down", "wait, or set another slurm_partition"
    if request.minutes > partition.minutes:
        message = f"{name} allows {partition.minutes:.0f} minutes, but {request.minutes:.0f} are requested"
        return (
            message,
            f"set `runtime: {int(partition.minutes)}` or less for these rules under set-resources in the profile, or "
            f"`resources: {{runtime: {int(partition.minutes)}}}` for all",
        )
    if request.megabytes > partition.megabytes:
        message = f"{name} allows {partition.megabytes:.0f} MB, but {request.megabytes:.0f} are requested"
        return (
            message,
            f"set `mem_mb: {int(partition.megabytes)}` or less for these rules under set-resources in the profile, or "
            f"`resources: {{mem_mb: {int(partition.megabytes)}}}` for all",
        )
    if gpus and (amd := _amd(partition.gres, gpus[1])):
        return f"{name} has AMD GPUs ({amd}), which are not supported", "use a partition with NVIDIA GPUs"
    if request.gres and not _has_gres(partition.gres, request.gres):
        message = f"{name} has no node with {request.gres} (it has {partition.gres or 'none'})"
        return message, "set gres in the profile as `sinfo -o '%P %G'` shows it"
    gres = f", {request.gres}" if request.gres else ""
    return f"{name}: {request.minutes:.0f} minutes, {request.megabytes:.0f} MB{gres}", ""


def _amd(available: str, requested: str | None) -> str:
    """The AMD GPU that a job would get; empty if it may get another one."""
    models = [model for model, _ in GPUS.findall(available) if requested in (None, model)]
    return models[0] if models and all(map(AMD.fullmatch, models)) else ""


def _has_gres(available: str, requested: str) -> bool:
    """True if a node has the requested GPUs: a type and a number, or a number alone."""
    request = GPUS.fullmatch(requested)
    if request is None:
        return True  # other resources than GPUs
    kind, count = request[1], int(request[2] or 1)
    return any(kind in (None, model) and int(number or 1) >= count for model, number in GPUS.findall(available))
