"""The output of a stage."""

import socket
import subprocess
import sys


def test_when_a_stage_in_a_worker_has_ended_nobody_has_its_terminal_open(tmp_path) -> None:
    """Otherwise srun waits a minute for the end of a step's output."""
    code = (
        "import os; from pathlib import Path; from rloo_pipeline.runtime import output, progress\n"
        "read, write = os.pipe()\n"
        "with output.standard_output_to(write):\n"
        "    output.route_output(Path('stage.log')); progress.say('a line')\n"
        "print(os.read(read, 100), os.read(read, 100))"
    )
    outcome = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert outcome.stdout == "b'a line\\n' b''\n", outcome.stderr


def test_a_rank_of_a_stage_whose_terminal_is_a_socket_writes_its_progress_to_the_log() -> None:
    """A service of systemd has one, and so have programs that Node.js starts."""
    code = (
        "import os, sys\n"
        "os.environ |= {'RANK': '0', 'RLOO_TERMINAL': f'/proc/self/fd/{sys.argv[1]}'}\n"
        "from rloo_pipeline.runtime import output, progress\n"
        "output.route_output(None); progress.say('a line')"
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        argv, terminal = [sys.executable, "-c", code], theirs.fileno()
        outcome = subprocess.run(
            [*argv, str(terminal)], pass_fds=[terminal], capture_output=True, text=True, timeout=60, check=False
        )
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stderr.endswith("INFO rloo: a line\n")
    assert outcome.stderr.count("a line") == 1


def test_a_stage_and_its_first_rank_do_not_overwrite_each_others_lines_in_a_file(tmp_path) -> None:
    """As after `snakemake > file 2>&1`. The rank opens the stage's terminal anew, with a position of its own."""
    code = (
        "import os; from pathlib import Path; from rloo_pipeline.runtime import output, progress\n"
        "output.route_output(Path('stage.log')); progress.say('the stage')\n"
        "rank = output._opened(Path(f'/proc/self/fd/{progress.console.file.fileno()}'))\n"
        "rank.write('the rank\\n'); progress.say('the stage'); rank.write('the rank\\n')"
    )
    with (tmp_path / "terminal").open("w") as terminal:
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stderr=terminal, timeout=60, check=True)
    assert (tmp_path / "terminal").read_text().splitlines() == ["the stage", "the rank"] * 2


def test_the_error_of_a_rank_is_shown_by_its_launcher_alone(tmp_path) -> None:
    """It may only be that the other ranks are gone, and the launcher knows why."""
    code = (
        "import os\nos.environ |= {'RANK': '0', 'RLOO_TERMINAL': 'terminal', 'RLOO_FAILED': 'failed'}\n"
        "from rloo_pipeline.runtime import output, progress\n"
        "output.route_output(None); progress.say('a line'); progress.fail('lost a rank')"
    )
    outcome = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (tmp_path / "terminal").read_text() == "a line\n"
    assert outcome.stderr.endswith("ERROR rloo: lost a rank\n")


def test_a_command_does_not_pass_on_advice_to_install_what_fetches_code_from_the_hub() -> None:
    code = (
        "import logging\nfrom rloo_pipeline.runtime import environment\nenvironment.prepare(None)\n"
        "logging.getLogger('bitsandbytes.backends.cpu.ops').warning('please `pip install kernels`')"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (outcome.returncode, outcome.stderr) == (0, "")


def test_a_line_of_an_experiment_begins_with_its_run_but_an_error_does_not(tmp_path) -> None:
    """Snakemake's process shows an error once, by its text."""
    for log, name in (
        ("results/sums/plain/0/logs/update/1.log", "sums/plain/0: "),
        ("results/sums/logs/update.log", ""),
    ):
        code = (
            "from pathlib import Path; from rloo_pipeline.runtime import output, progress\n"
            f"output.route_output(Path('{log}')); progress.say('a line'); progress.fail('rloo update: error: why')"
        )
        outcome = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert outcome.stderr == f"{name}a line\nrloo update: error: why\n"


def test_the_first_of_several_ranks_names_the_run_of_an_experiment_as_its_stage_does(tmp_path) -> None:
    rank = "from rloo_pipeline.runtime import output, progress; output.route_output(None); progress.say('a line')"
    for log, line in (
        ("results/sums/plain/0/logs/1.log", "sums/plain/0: a line"),
        ("results/sums/logs/1.log", "a line"),
    ):
        code = (
            "import sys; from pathlib import Path; from rloo_pipeline.runtime import output, ranks\n"
            f"ranks.torchrun_command = lambda *_: ['env', 'RANK=0', sys.executable, '-c', {rank!r}]\n"
            f"output.route_output(Path('{log}')); ranks.torchrun(2, [])"
        )
        with (tmp_path / "terminal").open("w") as terminal:
            subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stderr=terminal, timeout=60, check=True)
        assert (tmp_path / "terminal").read_text() == f"{line}\n"
