"""Commands as forks or as new processes, and the GPU that tests have in turns."""

import os
import shutil
import signal
import subprocess
import sys

import forks
import psutil
import pytest
from filelock import FileLock, Timeout
from helpers import Project, has_ended, wait_until

KILLED = """
import os, signal, time
import forks
server = forks._started()
other = os.fork()  # as a test may: it keeps the pipe to the server open
if not other:
    time.sleep(300)
print(server.pid, other, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_tests_that_are_killed_leave_no_process_behind_that_forks() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, env=environment)
    server, other = map(int, killed.stdout.readline().split())
    try:
        wait_until(lambda: has_ended(server), seconds=60)
    finally:
        os.kill(other, signal.SIGKILL)
        if not has_ended(server):
            os.kill(server, signal.SIGKILL)
    killed.communicate()


def test_a_new_process_does_what_a_fork_does(monkeypatch, tmp_path) -> None:
    outcomes = []
    for use_forks in (True, False):
        monkeypatch.setattr(forks, "use_forks", use_forks and not forks.HAS_GPU)
        monkeypatch.setenv("SEEN", "by the command")
        (tmp_path / "mine.py").write_text("import os, sys; print(os.environ['SEEN'], *sys.argv[1:]); sys.exit('no')")
        commands = [("rloo_pipeline", ["plan", "nowhere.yaml"]), ("mine", ["a b", "c"]), (tmp_path / "mine.py", [])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(forks.ROOT), str(tmp_path)])}
        ran = forks.run_together([forks.Command(*command, environment, tmp_path) for command in commands])
        outcomes.append([(one.returncode, one.stdout, one.stderr) for one in ran])
    assert outcomes[0] == outcomes[1]
    assert [code for code, *_ in outcomes[0]] == [1, 1, 1]
    assert [output for _, output, _ in outcomes[0]] == ["", "by the command a b c\n", "by the command\n"]


def test_a_command_in_a_copy_of_the_sources_runs_the_code_of_the_copy(tmp_path) -> None:
    project = Project(tmp_path / "project")
    file = project.folder / "rloo_pipeline" / "runtime" / "installation.py"
    code = "from rloo_pipeline.runtime import installation; print(installation.root(), installation.__file__)"
    (project.folder / "mine.py").write_text(code)

    def printed() -> str:
        return forks.run("mine", [], project.environment, project.folder).stdout

    assert printed() == f"{project.folder} {file}\n"
    file.write_text(file.read_text() + "\nprint('edited')")
    assert printed() == f"edited\n{project.folder} {file}\n"


def test_a_started_command_is_known_by_its_words_and_can_be_killed(monkeypatch, tmp_path) -> None:
    (tmp_path / "mine.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for use_forks in (True, False):
        monkeypatch.setattr(forks, "use_forks", use_forks and not forks.HAS_GPU)
        log = tmp_path / f"log of {use_forks}"
        started = forks.start(forks.Command("mine", ["a", "b"], environment, tmp_path), log)
        wait_until(lambda log=log: log.read_text().endswith("\n"), seconds=60)
        process = psutil.Process(int(log.read_text()))
        assert forks.words_of(process) == ["a", "b"]
        assert started.poll() is None
        started.kill()
        assert started.wait() == started.poll() == -signal.SIGKILL
        assert forks.words_of(process) == []


def test_a_function_can_be_called_without_a_fork(monkeypatch) -> None:
    monkeypatch.setattr(forks, "use_forks", False)
    assert forks.call(abs, -3) == 3


def test_a_test_with_an_engine_has_the_gpu_to_itself_and_others_see_none(monkeypatch, tmp_path) -> None:
    lock = tmp_path / "gpu"
    monkeypatch.setattr(forks, "HAS_GPU", True)
    monkeypatch.setattr(forks, "GPUS", "1")
    monkeypatch.setattr(forks, "_in_turns", FileLock(lock))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with forks.turn(engine=False):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        FileLock(lock).acquire(timeout=0).lock.release()
    with forks.turn(engine=True):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
        with pytest.raises(Timeout):
            FileLock(lock).acquire(timeout=0)


@pytest.mark.parametrize(("count", "visible"), [(1, "1"), (2, "")])
def test_ranks_that_cannot_have_a_gpu_each_have_none(monkeypatch, count, visible) -> None:
    started = []
    monkeypatch.setattr(forks, "HAS_GPU", True)
    monkeypatch.setattr(forks, "run_together", started.extend)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    forks.run_ranks("module", [], count)
    assert [command.environment["CUDA_VISIBLE_DEVICES"] for command in started] == [visible] * count


def test_a_test_that_holds_vllm_runs_with_its_fixtures_in_a_pytest_of_its_own(tmp_path) -> None:
    shutil.copy(forks.ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(
        "import os, pytest\n"
        "@pytest.fixture(scope='module')\ndef where(): return os.environ.get('RLOO_OWN_PYTEST')\n"
        "def test_here(where): assert where is None\n"
        "@pytest.mark.holds_vllm\ndef test_there(where): assert where == 'a sentence'\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--no-forks", "-p", "no:cacheprovider"]
    options = ["-c", str(forks.ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "test_it.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("RLOO_OWN_PYTEST", None)
    outcome = subprocess.run(
        [*command, *options], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert "1 failed, 1 passed" in outcome.stdout, outcome.stdout + outcome.stderr
    assert "assert '1' == 'a sentence'" in outcome.stdout, "it was set there, and the failure is reported here"
