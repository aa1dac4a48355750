"""A SLURM profile against the cluster's partitions and the configuration: partitions exist, are up, and allow the time,
memory and GPUs asked for, which are as many as the engines use.

What rules ask for by themselves is read from workflow/rules/*.smk, as `growing(amount)`: that of the first attempt,
and of a sum its first number.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.preflight import Finding

RULE = re.compile(r"^(?:rule (\w+):|use rule (\w+) as (\w+) with:)", re.MULTILINE)
ASKED = re.compile(r"(mem_mb|runtime)=growing\((\d+)")
GPUS = re.compile(r"gpu(?::([A-Za-z_][\w.-]*))?(?::(\d+))?")
UNLIMITED = ("UNLIMITED", "infinite", "INVALID")


class Partition(NamedTuple):
    """A partition of the cluster."""

    up: bool
    minutes: float
    """Longest job."""
    megabytes: float
    """Most memory of a job on a node."""
    gpus: str
    """Generic resources of its nodes, as `gpu:h100:4`."""


class Wanted(NamedTuple):
    """What a rule asks for."""

    partition: str | None
    minutes: float
    megabytes: float
    gres: str | None
    used_by: tuple[str, int] | None = None
    """The key of the configuration that says how many GPUs of a node its engine uses, and how many it says."""


def look(profile: Path, rules: Path, config: Config) -> Iterator[Finding]:
    """Everything about SLURM; nothing where the profile is for another executor.

    Raises:
        UserError: the profile cannot be read.
    """
    settings = read(profile)
    if settings.get("executor") != "slurm":
        return
    program, states = shutil.which("scontrol"), shutil.which("sinfo")
    if program is None or states is None:
        yield Finding("slurm", False, "no scontrol and sinfo on the PATH", "call it on a login or compute node")
        return
    shown = subprocess.run([program, "show", "partition", "-o"], capture_output=True, text=True, check=False)
    nodes = subprocess.run([states, "-h", "-o", "%R|%m|%G"], capture_output=True, text=True, check=False)
    if shown.returncode:
        yield Finding("slurm", False, f"it does not answer ({shown.stderr.strip()[:100]})", "see whether it is up")
        return
    yield from against(partitions(shown.stdout, nodes.stdout), wanted(settings, rules, config))


def read(profile: Path) -> dict[str, Any]:
    """A profile.

    Raises:
        UserError: it is not there, or not YAML.
    """
    file = profile / "profile.v9+.yaml"
    try:
        return dict(yaml.safe_load(file.read_text(encoding="utf-8")) or {})
    except FileNotFoundError:
        raise UserError(f"{file}: no such profile; name its folder with --profile") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{file}: not a profile ({' '.join(str(error).split())[:120]})") from error


def partitions(shown: str, nodes: str) -> dict[str, Partition]:
    """Partitions by name, from `scontrol show partition -o` and `sinfo -h -o '%R|%m|%G'`."""
    most: dict[str, float] = {}
    gres: dict[str, str] = {}
    for of, memory, gpus in (line.strip().split("|", 2) for line in nodes.splitlines() if line.count("|") == 2):
        most[of] = max(most.get(of, 0.0), float(re.sub(r"\D", "", memory) or 0))
        gres[of] = f"{gres.get(of, '')} {gpus}".strip()
    found = {}
    for line in shown.splitlines():
        facts = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if name := facts.get("PartitionName"):
            limit = facts.get("MaxMemPerNode", "UNLIMITED")
            memory_mb = most.get(name, float("inf")) if limit in UNLIMITED else float(limit)
            up = facts.get("State") == "UP"
            found[name] = Partition(up, minutes_of(facts.get("MaxTime", "UNLIMITED")), memory_mb, gres.get(name, ""))
    return found


def minutes_of(time: str) -> float:
    """SLURM's [days-]hours:minutes:seconds as minutes."""
    if time in UNLIMITED:
        return float("inf")
    days, _, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    filled = [*parts, 0, 0] if days else [*([0] * (3 - len(parts))), *parts]
    hours, minutes, seconds = filled[:3]
    return int(days or 0) * 1440 + hours * 60 + minutes + seconds / 60


def wanted(settings: Mapping[str, Any], rules: Path, config: Config) -> dict[str, Wanted]:
    """What each rule asks for in its first attempt: the profile's word, else the rule's, else the profile's default."""
    used = _used(config)
    asked = dict(_rules(rules))
    default, special = settings.get("default-resources") or {}, settings.get("set-resources") or {}
    made = {}
    for rule, own in asked.items():
        words = {**default, **own, **(special.get(rule) or {})}
        minutes, memory = _number(words.get("runtime")), _number(words.get("mem_mb"))
        made[rule] = Wanted(words.get("slurm_partition"), minutes, memory, words.get("gres"), used.get(rule))
    return made


def _used(config: Config) -> dict[str, tuple[str, int]]:
    """By rule the key that says how many GPUs of a node its engine uses, and how many it says."""
    ranks = ("deepspeed.processes", config.deepspeed.processes // config.deepspeed.nodes)
    parallel = ("vllm.tensor_parallel_size", config.vllm.tensor_parallel_size)
    training = ["update", "update_transient", "update_last", *(["warmstart"] if config.warmstart.sft else [])]
    sampling = ["probe", "trial_probe", "rollout", "evaluate", "harness"]
    return {**dict.fromkeys(training, ranks), **dict.fromkeys(sampling, parallel)}


def _rules(folder: Path) -> Iterator[tuple[str, dict[str, int]]]:
    """Rules of the workflow that are submitted, with the resources that they name; a rule `used` has its model's."""
    known: dict[str, dict[str, int]] = {}
    for file in sorted(folder.glob("*.smk")):
        text = file.read_text(encoding="utf-8")
        marks = list(RULE.finditer(text))
        ends = [*(mark.start() for mark in marks), len(text)][1:]
        for mark, end in zip(marks, ends, strict=False):
            own = {name: int(amount) for name, amount in ASKED.findall(text[mark.start() : end])}
            name = mark[1] or mark[3]
            known[name] = own or known.get(mark[2] or "", {})
            if known[name]:
                yield name, known[name]


def _number(value: Any) -> float:
    """A number of minutes or megabytes; an expression over attempts by its first number."""
    found = re.search(r"\d+(?:\.\d+)?", str(value if value is not None else 0))
    return float(found[0]) if found else 0.0


def against(found: Mapping[str, Partition], asked: Mapping[str, Wanted]) -> Iterator[Finding]:
    """Each rule's wishes against its partition; rules that ask for the same are one line."""
    groups: dict[Wanted, list[str]] = {}
    for rule, wish in asked.items():
        groups.setdefault(wish, []).append(rule)
    for wish, rules in groups.items():
        what = f"slurm {', '.join(rules)}"
        said, cure = judge(found, wish)
        yield Finding(what, not cure, said, cure)


def judge(found: Mapping[str, Partition], wish: Wanted) -> tuple[str, str]:
    """What there is to say of a wish, and what to do about it; nothing where it can be had."""
    have = ", ".join(sorted(found)) or "none"
    asked = GPUS.fullmatch(wish.gres or "")
    if asked and wish.used_by and int(asked[2] or 1) < wish.used_by[1]:
        key, count = wish.used_by
        return (
            f"{wish.gres} is asked for, {key} uses {count} of a node",
            f"set gres to so many in the profile, or lower {key}",
        )
    if wish.partition is None:
        return "the cluster's default partition", ""
    part = found.get(wish.partition)
    if part is None:
        return f"no partition '{wish.partition}' (there are {have})", "set slurm_partition in the profile"
    name = f"partition '{wish.partition}'"
    if not part.up:
        return f"{name} is not up", "wait, or set another slurm_partition"
    if wish.minutes > part.minutes:
        said = f"{name} allows {part.minutes:.0f} minutes, {wish.minutes:.0f} are asked for"
        return said, "set runtime under set-resources in the profile"
    if wish.megabytes > part.megabytes:
        said = f"{name} allows {part.megabytes:.0f} MB, {wish.megabytes:.0f} are asked for"
        return said, "set mem_mb under set-resources in the profile"
    if wish.gres and not _has(part.gpus, wish.gres):
        said = f"{name} has no node with {wish.gres} (it has {part.gpus or 'none'})"
        return said, "set gres in the profile as sinfo -o '%P %G' has it"
    gpus = f", {wish.gres}" if wish.gres else ""
    return f"{name}: {wish.minutes:.0f} minutes, {wish.megabytes:.0f} MB{gpus}", ""


def _has(gpus: str, wish: str) -> bool:
    """Whether some node has what `gres` asks for: a kind and a count, or a count alone."""
    asked = GPUS.fullmatch(wish)
    if asked is None:
        return True  # of another kind than GPUs
    kind, count = asked[1], int(asked[2] or 1)
    return any(kind in (None, had) and int(number or 1) >= count for had, number in GPUS.findall(gpus))
