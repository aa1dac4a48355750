"""`rloo` itself: users' commands come before stages, and a wrong argument is one sentence with a suggestion."""

import errno
import importlib
import inspect
import logging
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from torch.distributed import DistStoreError

from rloo_pipeline import __main__ as entry
from rloo_pipeline.cli import main
from rloo_pipeline.errors import UserError, explain
from rloo_pipeline.snakemake_ext import controller
from rloo_pipeline.workers import client


def outcome(argv: list[str], capsys) -> tuple[int, str, str]:
    """Exit status, output and error output of `rloo`."""
    with pytest.raises(SystemExit) as end:
        main.main(argv)
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["rolout"], "rloo: error: no command 'rolout'; did you mean 'rollout'?"),
        (["pla"], "did you mean 'plan'?"),
        (
            ["plan", "--cluster-gup", "x"],
            "rloo plan: error: unknown argument '--cluster-gup'; did you mean '--cluster-gpu'?",
        ),
        (["plan", "a", "b"], "rloo plan: error: unknown argument 'b'"),
        (["rollout", "--round", "one"], "argument --round: invalid int value: 'one'"),
        (["watch", "RUN", "--every", "0"], "rloo watch: error: argument --every: 0 is not above 0"),
        (["submit", "--time=60", "--stop-before=-5"], "argument --stop-before: -5 is not above 0"),
        (["diagnose"], "rloo diagnose: error: the following arguments are required: RUN"),
        ([], "rloo: error: the following arguments are required: COMMAND"),
    ],
)
def test_a_wrong_argument_gives_a_one_line_error(argv, message, capsys) -> None:
    code, out, err = outcome(argv, capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize(
    ("words", "file", "changes"),
    [
        ("my.yaml rounds=2 run=x", "my.yaml", ["rounds=2", "run=x"]),
        ("rounds=2", "config/config.yaml", ["rounds=2"]),
        ("lr=1.yaml --gpus 4 rounds=2 --config seed=1", "lr=1.yaml", ["seed=1", "rounds=2"]),
        ("x.yaml --config seed=1 --config rounds=2", "x.yaml", ["seed=1", "rounds=2"]),
    ],
)
def test_keys_are_changed_without_an_option_too_as_by_rloo_run(words, file, changes) -> None:
    arguments = main.parser().parse(["plan", *words.split()])
    assert (str(arguments.configuration), arguments.config) == (file, changes)


@pytest.mark.parametrize(
    ("code", "helps"),
    [
        (errno.EROFS, "run again once it can be written"),
        (errno.EACCES, "change its permissions"),
        (errno.EPERM, "change its permissions"),
    ],
)
def test_a_place_where_nothing_may_be_written_gives_a_one_line_error(code, helps) -> None:
    error = OSError(code, "What the system says", "there/config.yaml")
    assert explain(error) == f"there/config.yaml: What the system says; {helps}, or use another folder"


def test_a_limit_of_file_sizes_gives_a_one_line_error() -> None:
    error = OSError(errno.EFBIG, "File too large", "there/model.safetensors")
    assert explain(error).startswith(
        "there/model.safetensors: over the limit on file sizes; raise it (`ulimit -f unlimited`)"
    )
    of_safetensors = RuntimeError("Error while serializing: I/O error: File too large (os error 27)")
    assert explain(of_safetensors).startswith("a file: over the limit on file sizes")


def test_a_limit_on_open_files_gives_a_one_line_error_whoever_meets_it() -> None:
    for error in (
        OSError(errno.EMFILE, "Too many open files", "a.log"),
        RuntimeError("gloo: rv != -1. Too many open files"),
    ):
        assert explain(error) == "over the limit on open files; raise it (`ulimit -n 4096`)"


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS])
def test_a_folder_for_temporary_files_without_locks_gives_a_one_line_error(code) -> None:
    assert explain(DistStoreError(os.strerror(code))) == (
        f"TMPDIR is on a file system without locks ({os.strerror(code)}); set it to a folder on a disk of the node"
    )


@pytest.mark.parametrize("command", [("rloo_pipeline", "--help"), ("snakemake", "--version")])
def test_a_python_that_drops_docstrings_is_refused_in_one_sentence(command, tmp_path) -> None:
    """The tools of a model would have no description. Snakemake imports our plugins."""
    environment = {**os.environ, "PYTHONOPTIMIZE": "2"}
    ended = subprocess.run(
        [sys.executable, "-m", *command], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.stderr == "rloo: PYTHONOPTIMIZE=2 removes docstrings, which describe tools to the model; unset it\n"


def test_a_package_that_the_light_controller_lacks_gives_a_one_line_error() -> None:
    missing = ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")
    assert explain(missing).startswith("pyarrow is not installed here; use the environment of `make setup`")
    of_transformers = ModuleNotFoundError("Could not import module 'Qwen3ForCausalLM'. Are this object's requirements")
    assert explain(of_transformers).startswith("unexpected ModuleNotFoundError: Could not import module 'Qwen3For")
    with pytest.raises(UserError, match="pyarrow is not installed here"), controller._file_errors_explained():
        raise missing


def test_a_read_only_results_folder_gives_a_one_line_error() -> None:
    denied = OSError(errno.EROFS, "Read-only file system", "results/mine")
    sentence = r"^results/mine: Read-only file system; run again once it can be written"
    with pytest.raises(UserError, match=sentence), controller._file_errors_explained():
        raise denied
    stale = OSError(errno.ESTALE, "Stale file handle", "results/mine")
    failed = r"^results/mine: the file system failed"
    with pytest.raises(UserError, match=failed), controller._file_errors_explained():
        raise stale
    with pytest.raises(FileNotFoundError), controller._file_errors_explained():
        raise FileNotFoundError(errno.ENOENT, "No such file", "x")
    of_network = RuntimeError("NCCL error: Call to ibv_reg_mr_iova2 failed with error Input/output error")
    assert explain(of_network).startswith("unexpected RuntimeError: NCCL error")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("word", ["--help", "status"])
def test_a_reader_of_the_output_that_has_ended_is_no_error(word, unbuffered, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "rloo_pipeline", word]
    outcome = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, cwd=tmp_path, check=False)
    os.close(write)
    assert (outcome.returncode, outcome.stderr) == (128 + signal.SIGPIPE, b"")


def test_another_pipe_that_breaks_is_a_one_line_error(monkeypatch, capsys) -> None:
    def break_(_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(main, "parser", lambda: Mock(parse=lambda _: Mock(log=None, command=break_)))
    code, _, err = outcome(["status"], capsys)
    assert (code, err.count("\n")) == (1, 1)
    assert "Broken pipe" in err


def test_a_log_that_cannot_be_written_is_one_line(tmp_path) -> None:
    command = [
        sys.executable,
        "-m",
        "rloo_pipeline",
        "gate",
        "--round=1",
        "--output",
        tmp_path / "x",
        "--log=/sys/x/log",
    ]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 1
    assert re.fullmatch(
        r"rloo gate: error: /sys/x: .*; change its permissions, or use another folder\n", outcome.stderr
    )


def test_a_full_working_folder_gives_a_one_line_error_without_tracebacks_of_snakemakes_log(monkeypatch, capfd) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", True)
    with controller._file_errors_explained():
        pass
    full = Mock(write=Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    logging.StreamHandler(full).emit(logging.makeLogRecord({"msg": "Error in rule update"}))  # later in the run
    assert full.write.called
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(logging, "raiseExceptions", True)
    sentence = f"^no space left while writing {Path.cwd()}: free some disk"
    with pytest.raises(UserError, match=sentence), controller._file_errors_explained():
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not logging.raiseExceptions


def test_ctrl_c_while_a_worker_runs_the_stage_prints_no_traceback(monkeypatch) -> None:
    monkeypatch.setattr(client, "run_stage", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit) as end:
        entry.main()
    assert (end.value.code, end.value.__suppress_context__) == (130, True)


def test_commands_of_users_come_before_stages(capsys) -> None:
    code, out, _ = outcome(["--help"], capsys)
    assert code == 0
    listed = re.findall(r"^  ([a-z-]+) ", out, re.MULTILINE)
    groups = {heading: [command.name for command in commands] for heading, commands in main.GROUPS.items()}
    assert listed == [name for names in groups.values() for name in names]
    stages = groups.pop(main.STAGES)
    users = [name for names in groups.values() for name in names]
    assert {"check", "plan", "doctor", "watch", "compare", "submit", "images"} <= set(users)
    assert {"stage-assets", "prompts", "rollout", "update", "worker"} <= set(stages)
    assert out.index(main.STAGES) > out.index("  track ")
    assert sorted(listed) == sorted(main.parser().commands.choices), "each command is listed once"


def test_help_names_a_default_once_and_only_if_there_is_one() -> None:
    for parser in main.parser().commands.choices.values():
        text = " ".join(parser.format_help().split())
        assert not re.search(r"\(default: (None|False|\[\])\)|default[^()]*\) \(default", text), text


def test_help_needs_no_torch_and_no_tracker() -> None:
    heavy = ("torch", "transformers", "datasets", "pyarrow", "numpy", "vllm", "wandb", "mlflow")
    code = "import sys; from rloo_pipeline.cli import main as cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\n"
    code += f"sys.exit(bool({{*{heavy}}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def called_by_name() -> list[tuple[str, int, list[str]]]:
    """Functions that are called with the options of a command: reference, arguments before these, names."""
    calls = []
    for command in [command for commands in main.GROUPS.values() for command in commands]:
        if isinstance(command.run, partial):
            reference, options = command.run.args
            calls.append((reference, 0, [option.name for option in options]))
        elif "taken" in (stage := inspect.getclosurevars(command.run).nonlocals):
            reference = f"rloo_pipeline.stages.{stage['function']}:{stage['function']}"
            calls.append((reference, 1, [option.name for option in stage["taken"]]))
    return calls


def test_functions_that_are_called_with_the_options_of_a_command_take_them() -> None:
    calls = called_by_name()
    assert len(calls) > 10
    for reference, before, names in calls:
        module, _, name = reference.partition(":")
        signature = inspect.signature(getattr(importlib.import_module(module), name))
        signature.bind(*[None] * before, **dict.fromkeys(names))


@pytest.mark.parametrize("package", ["cli", "workers"])
def test_ctrl_c_during_imports_prints_nothing(package) -> None:
    """Even if a library that `cli` imports catches KeyboardInterrupt, as pydantic does."""
    code = """
import os, signal, sys
from rloo_pipeline import __main__
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts with &
class Interrupted:
    def find_spec(self, name, *_):
        if name == f"rloo_pipeline.{sys.argv[1]}":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                raise ValueError("of the library") if sys.argv[1] == "cli" else KeyboardInterrupt from None
sys.meta_path.insert(0, Interrupted())
__main__.main()
"""
    outcome = subprocess.run([sys.executable, "-c", code, package], capture_output=True, text=True, check=False)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (130, "", "")
