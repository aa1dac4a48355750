"""Environments in the sandbox or in an image: what they can do there, and that every call gets an answer."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rooms import ROOM, answers, begun, finished, play

from rloo_pipeline.errors import UserError
from rloo_pipeline.user_code.confinement import Confinement
from rloo_pipeline.user_code.episode_process import Answer
from rloo_pipeline.user_code.fork_server_process import MOST_BYTES, ForkServerProcess
from rloo_pipeline.user_code.pool import EnvironmentPool
from rloo_pipeline.user_code.sandbox import sandbox

SHOW = """
def attempt(do):
    try:
        return str(do() or "done")
    except BaseException as error:
        return type(error).__name__
answer = attempt({})
"""


pytestmark = pytest.mark.usefixtures("machine_sandbox")


@contextmanager
def pool_of(environment_file: Path, workers: int = 3, timeout: float = 20.0, **where) -> Iterator[EnvironmentPool]:
    confinement = Confinement(**{"sandbox": True, **where})
    with EnvironmentPool(f"{environment_file}:Room", [], workers, timeout, confinement) as pool:
        yield pool


@pytest.fixture(scope="module")
def shared_pool(environment_file) -> Iterator[EnvironmentPool]:
    """A pool in the sandbox that tests share, since they leave its state unchanged."""
    with pool_of(environment_file) as pool:
        yield pool


def acted(pool: EnvironmentPool, code: str) -> str:
    """The result of code in an episode of its own."""
    begun(pool, 1)
    pool.call(1, [("act", {"code": code})])
    [answer] = answers(pool)
    finished(pool, 1)
    return answer.texts[0]


def attempt(pool: EnvironmentPool, expression: str) -> str:
    return acted(pool, SHOW.format(f"lambda: {expression}"))


def test_an_episode_is_that_of_the_same_code_without_a_sandbox(shared_pool, environment_file) -> None:
    def played(pool: EnvironmentPool) -> list[Answer]:
        played = begun(pool, 5)
        pool.call(5, [("act", {"code": "answer = self.draw"}), ("wait", {"seconds": 0.01})])
        return [*played, *answers(pool), *finished(pool, 5)]

    with pool_of(environment_file, sandbox=False) as pool:
        assert played(shared_pool) == played(pool)
        assert shared_pool.schemas({}) == pool.schemas({})


def test_it_has_no_network(shared_pool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        assert attempt(shared_pool, f"socket.create_connection(('127.0.0.1', {port}), 2)") == "PermissionError"
        assert attempt(shared_pool, "socket.getaddrinfo('example.com', 80)") == "gaierror"
        with pytest.raises(TimeoutError):
            server.accept()


def test_it_has_the_files_of_its_code_alone(shared_pool, environment_file) -> None:
    for path in ("/etc/passwd", Path.home() / ".profile", environment_file.parent / "secret.py", __file__):
        assert attempt(shared_pool, f"open({str(path)!r}).read()") == "FileNotFoundError"
    assert attempt(shared_pool, f"open({str(environment_file)!r}).read(1)").isspace()
    assert (
        attempt(shared_pool, "sorted(os.listdir(os.path.dirname(neighbour.__file__)))") == "['mine.py', 'neighbour.py']"
    )


def test_it_writes_to_its_own_tmp_alone(shared_pool, environment_file, machine_sandbox) -> None:
    for path in (environment_file, environment_file.parent / "new", "/new", "/dev/new", Path(sys.prefix) / "new"):
        assert attempt(shared_pool, f"open({str(path)!r}, 'w')") in ("OSError", "PermissionError", "FileNotFoundError")
    assert environment_file.read_text() == ROOM
    if machine_sandbox.sized:
        assert attempt(shared_pool, "open('/tmp/own', 'w').write('x')") == "1"
        assert not Path("/tmp/own").exists()


def test_it_has_no_variable_of_this_process(environment_file, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hush-hush")
    with pool_of(environment_file) as pool:
        assert "hush" not in attempt(pool, "dict(os.environ)")


def test_paths_that_are_named_can_be_read_and_imported(environment_file, tmp_path) -> None:
    (tmp_path / "words.py").write_text("WORDS = ['crane']\n")
    tmp_path.chmod(0o755)
    with pool_of(environment_file, read_only=(str(tmp_path),)) as pool:
        assert attempt(pool, "__import__('words').WORDS[0]") == "crane"
    with (
        pytest.raises(UserError, match=r"^rollout.environment_read_only: there is no /no/words; correct the path$"),
        pool_of(environment_file, read_only=("/no/words",)),
    ):
        pass


def test_paths_that_its_user_cannot_read_are_a_sentence(environment_file, tmp_path, machine_sandbox) -> None:
    if os.getuid() or machine_sandbox.kind != "bubblewrap":
        pytest.skip("root's processes become another user in bubblewrap alone")
    tmp_path.chmod(0o700)
    message = rf"^rollout.environment_read_only: the sandbox cannot read {tmp_path}; make it readable for all"
    with pool_of(environment_file, read_only=(str(tmp_path),)) as pool, pytest.raises(UserError, match=message):
        pool.check()


def test_memory_is_limited_and_the_error_is_an_answer(environment_file) -> None:
    with pool_of(environment_file, memory_mb=1024) as pool:
        assert attempt(pool, "len(bytearray(600 << 20))") == str(600 << 20)
        assert attempt(pool, "bytearray(1100 << 20)") == "MemoryError"


def test_a_tool_that_starts_processes_without_end_stops_no_other_episode(environment_file) -> None:
    fork_bomb = """
while True:
    try:
        if not os.fork():
            try:
                os.setsid()
            finally:
                time.sleep(60)
    except OSError:
        time.sleep(0.1)
"""
    with pool_of(environment_file, timeout=3.0) as pool:
        begun(pool, 1, 2)
        pool.call(1, [("act", {"code": fork_bomb})])
        [late] = answers(pool)
        assert late.texts == (str({"error": "act took over 3 s"}),)
        start = """
while True:
    try:
        os.fork() or os._exit(0)
        break
    except BlockingIOError:  # until the processes of the other have ended
        time.sleep(0.05)
"""
        pool.call(2, [("act", {"code": start})])
        assert answers(pool)[0].texts == ("",)
        assert begun(pool, 3)[0].texts == ("a room ['prompt']",)


def test_an_episode_cannot_open_the_memory_of_another_nor_leave_its_group(shared_pool) -> None:
    assert attempt(shared_pool, "open(f'/proc/{os.getppid()}/mem', 'rb').read(1)") in (
        "FileNotFoundError",
        "PermissionError",
    )
    assert attempt(shared_pool, "os.pidfd_open(os.getppid()) and 'opened'") == "opened"
    getfd = "(lambda libc: libc.syscall(438, os.pidfd_open(os.getppid()), 3, 0))(__import__('ctypes').CDLL(None))"
    assert attempt(shared_pool, getfd) == "-1"
    assert (
        attempt(shared_pool, "subprocess.run([sys.executable, '-c', ''], start_new_session=True)") == "PermissionError"
    )
    assert attempt(shared_pool, "subprocess.run([sys.executable, '-c', ''], process_group=0)") == "PermissionError"


@pytest.mark.parametrize("victims", ["os.getppid()", "-1"])
def test_a_tool_that_kills_what_it_can_is_a_sentence(environment_file, victims) -> None:
    with pool_of(environment_file) as pool:
        begun(pool, 1)
        pool.call(1, [("act", {"code": f"os.kill({victims}, signal.SIGKILL); time.sleep(1e6)"})])
        with pytest.raises(UserError, match=r"^the process from which environments are forked died of SIGKILL"):
            answers(pool)


def test_what_it_prints_is_copied_to_stderr_without_control_characters_and_up_to_a_limit(environment_file) -> None:
    code = f"""ask("act", code="print('printed' + chr(27) + '[2J' + 'x' * {2 * MOST_BYTES})"); print("own")"""
    command = play(environment_file, code, sandbox=True)
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert outcome.stdout == "own\n"
    assert outcome.stderr.startswith("printed")
    assert "\x1b" not in outcome.stderr
    assert len(outcome.stderr) <= MOST_BYTES


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "open('/etc/passwd')",
            r"failed with FileNotFoundError: .*passwd' \(broken.py, line 1\); it can use the packages",
        ),
        (
            "import no_such_package",
            r"ModuleNotFoundError: .*; it can use the packages of Python, its own code, and the",
        ),
        ("bytes(1 << 40)", r"importing .*broken.py failed with MemoryError"),
        ("import os; os._exit(3)", r"^the process that imports .* ended its process with exit code 3; import them in"),
        ("import os; os.abort()", r"^the process that imports .* died of SIGABRT"),
        ("print('no room', flush=True); import os; os._exit(4)", r"exit code 4, and printed at the end: no room; "),
    ],
)
def test_code_that_cannot_be_imported_there_is_a_sentence(tmp_path, code, message) -> None:
    file = tmp_path / "broken.py"
    file.write_text(f"{code}\nclass Room:\n    def reset(self, **row): pass\n")
    with pool_of(file) as pool, pytest.raises(UserError, match=message):
        pool.check()


@pytest.mark.parametrize("installed", [True, False])
def test_a_package_can_be_imported_where_it_is_installed_and_where_it_is_not(tmp_path, monkeypatch, installed) -> None:
    folder, name = tmp_path / ("site-packages" if installed else "src"), f"rooms_{installed}"
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text("")
    (folder / name / "one.py").write_text(ROOM.replace("import neighbour", f"from {name} import neighbour"))
    (folder / name / "neighbour.py").write_text('NAME = "a room"\n')
    (folder / "other.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))
    with EnvironmentPool(f"{name}.one:Room", [], 1, 60, Confinement(sandbox=True)) as pool:
        assert begun(pool, 1)[0].texts == ("a room ['prompt']",)
        finished(pool, 1)
        assert (attempt(pool, "__import__('other').__name__") == "other") is installed


def test_no_sandbox_is_a_sentence(environment_file, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sandbox, "search", sandbox.search.__wrapped__)  # without the cache
    with pytest.raises(UserError, match=r"^rollout.environment_sandbox: no sandbox works here \(bubblewrap is not i"):
        ForkServerProcess({"": f"{environment_file}:Room"}, [], Confinement(sandbox=True), 1)


def test_environments_see_the_gpus_that_are_theirs(environment_file, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # those of the engine
    for gpus, visible in (((), ""), (("2", "3"), "2,3")):
        with pool_of(environment_file, sandbox=False, gpus=gpus) as pool:
            assert attempt(pool, "repr(os.environ['CUDA_VISIBLE_DEVICES'])") == repr(visible)


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Path:
    """An Apptainer image, as a folder, with the system's Python and nothing else."""
    python = Path("/usr/bin/python3").resolve()
    if shutil.which("apptainer") is None or not python.exists() or python.name < "python3.11":
        pytest.skip("needs Apptainer, and a Python of the system from 3.11 on")
    folder = tmp_path_factory.mktemp("image")
    library = Path(f"/usr/lib/{python.name}")
    shutil.copytree(library, folder / library.relative_to("/"), ignore=shutil.ignore_patterns("test*", "__pycache__"))
    binaries = [python, Path("/bin/sh"), *library.glob("lib-dynload/*.so")]
    linked = subprocess.run(["ldd", *binaries], capture_output=True, text=True, check=False).stdout.split()
    for file in {Path("/bin/sh"), *(Path(word) for word in linked if word.startswith("/") and ":" not in word)}:
        copy = folder / file.relative_to("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    (folder / "usr/bin").mkdir(parents=True, exist_ok=True)
    shutil.copy(python, folder / "usr/bin/python3")
    for name in ("etc", "tmp", "var/tmp", "proc", "sys", "dev", "root"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "etc/passwd").write_text(f"someone:x:{os.getuid()}:{os.getgid()}::/root:/bin/sh\n")
    return folder


def test_an_image_needs_no_package(image, environment_file) -> None:
    with (
        pool_of(environment_file, sandbox=False) as outside,
        pool_of(environment_file, sandbox=False, image=str(image)) as inside,
    ):
        assert inside.schemas({}) == outside.schemas({})
        assert begun(inside, 5)[0].texts == ("a room ['prompt']",)
        assert json.loads(finished(inside, 5)[0].state or "")["entered"] == 0
        assert attempt(inside, "__import__('numpy')") == "ModuleNotFoundError"
        assert attempt(inside, f"open({str(environment_file.parent / 'secret.py')!r})") == "FileNotFoundError"
        assert attempt(inside, f"open({str(environment_file)!r}, 'w')") in ("OSError", "PermissionError")


def test_what_an_image_lacks_is_a_sentence(image, tmp_path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import numpy\nclass Room:\n    def reset(self, **row): pass\n")
    message = rf"No module named 'numpy' \(broken.py, line 1\); it can use the packages that {image} has, its own code"
    with pool_of(file, sandbox=False, image=str(image)) as pool, pytest.raises(UserError, match=message):
        pool.check()


def test_a_file_that_is_no_image_is_a_sentence(environment_file, tmp_path) -> None:
    (tmp_path / "none.sif").write_text("none")
    message = r"^the process that imports .*, and printed at the end: .*FATAL"
    with (
        pool_of(environment_file, sandbox=False, image=str(tmp_path / "none.sif")) as pool,
        pytest.raises(UserError, match=message),
    ):
        pool.check()
    message = r"^rollout.environment_image: there is no /no/such.sif; build it, or correct the path$"
    with pytest.raises(UserError, match=message), pool_of(environment_file, sandbox=False, image="/no/such.sif"):
        pass


@pytest.mark.parametrize(
    ("inside", "where"),
    [(True, "in the image of the stages; run without --sdm, or"), (False, "here; load its module, or")],
)
def test_no_apptainer_is_a_sentence(image, environment_file, monkeypatch, tmp_path, inside, where) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if inside:
        monkeypatch.setenv("APPTAINER_CONTAINER", "images/rloo-cpu.sif")
    with (
        pytest.raises(UserError, match=rf"^rollout.environment_image: there is no Apptainer {where}"),
        pool_of(environment_file, sandbox=False, image=str(image)),
    ):
        pass


def test_an_image_of_root_cannot_be_its_sandbox(image, environment_file) -> None:
    if os.getuid():
        pytest.skip("for root")
    with (
        pytest.raises(UserError, match=r"no sandbox works in .*Apptainer cannot limit root's processes"),
        pool_of(environment_file, image=str(image)),
    ):
        pass
