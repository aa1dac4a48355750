"""`make gpu`: the runner goes on whatever a row does, and each row calls a function that takes its options."""

import inspect
import json
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import pytest
import two_rounds
import yaml
from helpers import ROOT

from rloo_pipeline.before_run import memory
from rloo_pipeline.before_run.cards import CARDS

ROWS_OF_THE_TEST = """
import os, signal, subprocess, sys, time
from rows import RowError, NotHereError

def passes(folder, number): return {"answer": number}
def fails(folder): raise RowError("the sentence", {"so far": 1})
def raises(folder): raise ValueError("first line\\nsecond line")
def is_not_here(folder): raise NotHereError("no such card")
def dies(folder): os.kill(os.getpid(), signal.SIGKILL)
def hangs(folder): time.sleep(600)
def leaves(folder):
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    return {}
def leaves_an_engine(folder):
    program = "import setproctitle, time; setproctitle.setproctitle('VLLM::Engine'); print(flush=True); time.sleep(600)"
    engine = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, stdout=subprocess.PIPE)
    engine.stdout.readline()
    return {}
"""


@pytest.fixture(scope="module")
def acceptance():
    """The modules of tools/gpu, by their own names."""
    path, modules = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(ROOT / "tools" / "gpu"))
    yield import_module("acceptance")
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(ROOT / "tools") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def outcome_of(acceptance, tmp_path, monkeypatch):
    """What the runner says of a function of ROWS_OF_THE_TEST."""
    (tmp_path / "rows_of_the_test.py").write_text(ROWS_OF_THE_TEST)
    monkeypatch.syspath_prepend(tmp_path)

    def run(name: str, minutes: float = 1.0, left: float = 9.0, **options) -> Mapping:
        row = acceptance.Row(name, "", f"rows_of_the_test:{name}", minutes, options, needs=())
        return acceptance.run(row, tmp_path / name, rehearse=False, until_end=left)

    return run


def test_each_end_of_a_row_is_an_outcome_with_its_reason(outcome_of, acceptance, monkeypatch) -> None:
    monkeypatch.setattr(acceptance, "END", 0.5)
    passed = outcome_of("passes", number=42)
    assert (passed["outcome"], passed["figures"]) == ("passed", {"answer": 42})
    assert passed["seconds"] > 0
    for name, outcome, why in (
        ("fails", "failed", "the sentence"),
        ("raises", "failed", "ValueError: first line"),
        ("is_not_here", "not run", "no such card"),
        ("dies", "failed", "its process ended by SIGKILL"),
        ("leaves", "failed", "processes went on after it: sleep 600"),
        ("leaves_an_engine", "failed", "processes went on after it: "),
    ):
        result = outcome_of(name)
        assert (result["outcome"], result["why"][: len(why)]) == (outcome, why)
    assert outcome_of("fails")["figures"] == {"so far": 1}
    assert outcome_of("hangs", minutes=0.02)["why"] == "took longer than 0.02 minutes"
    cut = outcome_of("hangs", left=0.02)
    assert (cut["outcome"], cut["why"]) == ("not run", "the time was up")


def test_a_machine_that_lacks_something_does_not_start_the_row(acceptance, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(acceptance.machine.devices, "gpu_facts", lambda _: ["NVIDIA H200"])
    monkeypatch.setattr(acceptance.machine, "_version", lambda _: None)
    assert "the packages for GPUs are not installed" in acceptance.machine.missing("gpu"), "all would run on the CPU"
    monkeypatch.setattr(acceptance.machine, "_version", lambda _: "0.32.0")
    assert acceptance.machine.missing("gpu") is None
    for names, here in ((["0"], False), (["MIG-a"], True)):
        monkeypatch.setattr(acceptance.machine.devices, "visible_gpus", lambda names=names: names)
        assert (acceptance.machine.missing("slice") is None) is here
    row = acceptance.Row("two", "", "rows_of_the_test:fails", 1, needs=("2 gpus",))
    assert acceptance.run(row, tmp_path / "two", False) == {
        "outcome": "not run",
        "why": "needs two GPUs, and there is one",
    }


def test_an_image_from_other_packages_is_not_the_image_of_a_row(acceptance, tmp_path, monkeypatch) -> None:
    machine = acceptance.machine
    for name in ("requirements/cuda.txt", "containers/rloo-cuda.def"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("before\n")
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    image = tmp_path / machine.containers._image_name("cuda", tmp_path)
    image.parent.mkdir()
    image.touch()
    assert machine.missing("image") is None
    (tmp_path / "requirements/cuda.txt").write_text("after\n")
    assert machine.missing("image").startswith("no image for GPUs from the present packages")


def test_rows_that_passed_are_not_run_again_and_those_that_failed_come_last(acceptance) -> None:
    first, second, third, *rest = [row.name for row in acceptance.ROWS]
    rows = {
        first: {"outcome": "passed", "source": "now"},
        second: {"outcome": "failed", "source": "now"},
        third: {"outcome": "passed", "source": "earlier"},
    }
    record = {"source": "now", "rows": rows}
    assert [row.name for row in acceptance._todo(record, [])] == [third, *rest, second]
    assert [row.name for row in acceptance._todo(record, [first])] == [first]


def test_each_row_calls_a_function_that_takes_its_options(acceptance) -> None:
    names = [row.name for row in acceptance.ROWS]
    assert len(set(names)) == len(names)
    for row in acceptance.ROWS:
        module, _, name = row.function.partition(":")
        signature = inspect.signature(getattr(import_module(module), name))
        rehearsed = row.rehearse if isinstance(row.rehearse, Mapping) else {}
        for options in (row.options, {**row.options, **rehearsed}):
            signature.bind(Path(), **options)
            json.dumps(options)
        for need in row.needs:
            acceptance.machine.missing(need)


def test_every_kind_of_model_has_a_row(acceptance) -> None:
    kinds = {row.options["kind"] for row in acceptance.ROWS if row.function == "kind_rows:kind"}
    assert kinds == set(two_rounds.KINDS)


COMMANDS = Path(__file__).with_name("gpu_commands.txt")


def test_each_row_starts_the_stored_command_on_a_gpu(acceptance, tmp_path, monkeypatch) -> None:
    """ARGV and environment; to store others, delete the file and run this test."""
    machine, whole, whole_runs = acceptance.machine, import_module("whole"), import_module("whole_runs")
    started: list[str] = []

    def start(arguments, folder=ROOT, **variables):
        words = [*(f"{name}={value}" for name, value in variables.items()), *map(str, arguments)]
        started.append(f"cd {folder}; " + " ".join(words))
        raise machine.RowError("stop")

    monkeypatch.setattr(machine, "command", start)
    monkeypatch.setattr(whole, "run_measured", lambda command, folder, variables: start(command, folder, **variables))
    monkeypatch.setattr(whole_runs, "_kill", lambda *_: None)
    monkeypatch.setattr(whole_runs.tempfile, "mkdtemp", lambda **_: "TEMPORARY")
    monkeypatch.setattr(import_module("task"), "words_qwen3", lambda *_, **__: None)
    monkeypatch.setattr("rloo_pipeline.runtime.devices.training_bytes", lambda: 80e9)
    lines = []
    for row in acceptance.ROWS:
        module, _, name = row.function.partition(":")
        if (
            module in ("attention_rows", "kernel_rows", "kind_rows", "memory_rows")
            or row.name == "mini-kept-reward-model"
        ):
            continue  # they start nothing, or only after a model is made
        folder = tmp_path / row.name
        folder.mkdir()
        with pytest.raises(machine.RowError, match="stop"):
            getattr(import_module(module), name)(folder, **row.options)
        line = f"{row.name}: {started.pop()}"
        for path, word in ((folder, "ROW"), (sys.executable, "PYTHON"), (ROOT, "ROOT")):
            line = line.replace(str(path), word)
        lines.append(line.replace("\n", "; "))
    if not COMMANDS.exists():
        COMMANDS.write_text("\n".join(lines) + "\n")
    assert lines == COMMANDS.read_text().splitlines()


OUT_OF_MEMORY = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "gpu.py", line 380, in <module>
[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 28.37 GiB.
[rank0]:[W1126 05:06:12.547 ProcessGroupNCCL.cpp:1624] Warning: destroy_process_group() was not called
"""


def test_the_error_of_a_rank_is_told_and_not_what_nccl_says_after_it(acceptance) -> None:
    of_bench, of_row = import_module("gpu").cause, acceptance.machine.sentence
    for told in (of_bench(OUT_OF_MEMORY, 1), of_row(OUT_OF_MEMORY, 1)):
        assert told.endswith("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 28.37 GiB.")
    assert of_bench("FlashAttention 3 is off: not installed\n", 1) == "FlashAttention 3 is off: not installed"
    assert of_bench("", -9) == "ended with -9"


def test_deepspeed_has_a_side_only_in_rows_of_models_that_it_can_train_on_one_card(acceptance) -> None:
    step_rows = import_module("step_rows")
    checked = set()
    for row in acceptance.ROWS:
        if row.function.startswith("step_rows:") and "deepspeed" in row.options.get("sides", ("deepspeed",)):
            size = row.options["size"]
            config, dims = step_rows.config_of(size), step_rows.dims_of(size)
            terms = memory.RunMemory(config, dims, "cuda").update(memory.MicroBatch(8192, 8192, several=True))
            assert memory.total(terms) < CARDS["h200"].gigabytes * 1e9, (row.name, terms)
            checked.add(size)
    assert checked == {"0.5B", "1.5B"}


def test_trl_runs_where_the_rewards_of_the_round_are(acceptance, tmp_path, monkeypatch) -> None:
    machine, rows, whole = acceptance.machine, import_module("round_rows"), import_module("whole")

    def start(_: object, folder: Path) -> None:
        raise machine.RowError(str(folder))

    monkeypatch.setattr(machine, "command", start)
    monkeypatch.setattr(rows, "parts", lambda *_: {})
    for name, value in (("start", None), ("rounds", None), ("seconds", [1.0])):
        monkeypatch.setattr(whole.Project, name, lambda *_, value=value: value)
    with pytest.raises(machine.RowError) as stopped:
        rows.against_trl(tmp_path)
    for reward in yaml.safe_load(rows.CONFIGURATION.read_text())["rewards"]:
        assert Path(str(stopped.value), reward["function"].partition(":")[0]).exists()
