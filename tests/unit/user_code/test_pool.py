"""Episodes run in processes of their own: whatever the code of one does, its calls get answers and others go on."""

import json
import os
import resource
import signal
import subprocess
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import psutil
import pytest
from guess_number import GAME
from helpers import has_ended, wait_until
from rooms import ROOM, answers, begun, finished, play

from rloo_pipeline.errors import UserError
from rloo_pipeline.user_code import fork_server_process, pool
from rloo_pipeline.user_code.episode import ANSWER_CHARACTERS
from rloo_pipeline.user_code.episode_process import Answer
from rloo_pipeline.user_code.fork_server_process import ForkServerProcess
from rloo_pipeline.user_code.messages import LENGTH
from rloo_pipeline.user_code.pool import EnvironmentPool


@pytest.fixture(scope="module")
def shared_pool(environment_file):
    """A pool that tests share, since they leave its state unchanged; `hung` episodes take at most 3 seconds."""
    with EnvironmentPool(f"{environment_file}:Room", [f"{environment_file}:double"], 3, 3.0) as pool:
        yield pool


def test_an_episode_has_its_own_state_and_its_reward(shared_pool) -> None:
    assert [answer.texts for answer in begun(shared_pool, 1, 2)] == [("a room ['prompt']",)] * 2
    shared_pool.call(1, [("enter", {"name": "Ann"}), ("enter", {"name": "Bob"}), ("double", {"number": 4})])
    shared_pool.call(2, [("enter", {})])
    one, two = answers(shared_pool, 2)
    assert one.texts == ("Ann is number 1", "Bob is number 2", "8")
    assert two.texts == (" is number 1",)
    one, two = finished(shared_pool, 1, 2)
    assert (one.reward, two.reward) == (1.0, 0.5)
    state = json.loads(one.state or "")
    assert (state["entered"], "client" in state, "_hidden" in state) == (2, False, False)
    assert shared_pool.waiting == 0
    assert shared_pool.ready(0) == []


def test_errors_are_answers_as_in_trl(shared_pool) -> None:
    begun(shared_pool, 1)
    calls = [("nothing", {}), ("enter", {"who": "Ann"}), ("double", {"number": None}), ("enter", ["Ann"])]
    shared_pool.call(1, calls)
    [answer] = answers(shared_pool)
    assert answer.errors == (True,) * 4
    assert answer.texts[0] == str({"error": "Tool nothing not found."})
    assert "unexpected keyword argument 'who'" in answer.texts[1]
    shared_pool.call(1, [("act", {"code": "raise ValueError('Game over.')"}), ("enter", {"name": "Ann"})])
    [answer] = answers(shared_pool)
    assert answer.texts == (str({"error": "Game over."}), "Ann is number 1")
    assert answer.errors == (True, False)
    shared_pool.call(1, [("act", {"code": "raise asyncio.CancelledError('closed')"})])
    assert answers(shared_pool)[0].texts == (str({"error": "closed"}),)
    finished(shared_pool, 1)


def test_async_tools_of_a_turn_run_together_and_are_answered_in_order(shared_pool) -> None:
    begun(shared_pool, 1)
    shared_pool.call(1, [("wait", {"seconds": 1.0}), ("double", {"number": 1}), ("wait", {"seconds": 1.5})])
    [answer] = answers(shared_pool)
    assert answer.texts == ("waited 1.0", "2", "waited 1.5")
    assert answer.lost is None
    finished(shared_pool, 1)


def test_a_late_async_call_loses_no_other_answer(shared_pool) -> None:
    begun(shared_pool, 1)
    shared_pool.call(1, [("act_async", {"code": "answer = 1"}), ("wait", {"seconds": 1e6}), ("wait", {})])
    [answer] = answers(shared_pool)
    assert answer.texts[0] == "1"
    assert answer.texts[1] == str({"error": "wait took over 3 s"}), "not the first call of the turn"
    assert "missing 1 required positional argument" in answer.texts[2]
    assert answer.errors == (False, True, True)
    finished(shared_pool, 1)


def test_an_answer_that_is_not_text_is_an_error(shared_pool) -> None:
    begun(shared_pool, 1)
    image = "answer = [{'type': 'image', 'image': 1}]"
    mute = "answer = type('Mute', (), {'__str__': lambda self: 1 / 0})()"
    shared_pool.call(1, [(tool, {"code": code}) for tool in ("act", "act_async") for code in (image, mute)])
    [answer] = answers(shared_pool)
    shown = str({"error": "an image was returned, and only text can be shown here"})
    assert answer.texts == (shown, str({"error": "division by zero"})) * 2
    assert (answer.errors, answer.lost) == ((True,) * 4, None)
    finished(shared_pool, 1)
    assert str(begun(shared_pool, 2, kind="image")[0].lost).endswith(
        "an image was returned, and only text can be shown here"
    )
    finished(shared_pool, 2)


def test_draws_depend_on_the_seed_alone(shared_pool) -> None:
    begun(shared_pool, 1, 2, seed=7)
    begun(shared_pool, 3, seed=8)
    for episode in (1, 2, 3):
        shared_pool.call(episode, [("act", {"code": "import numpy; answer = numpy.random.random()"})])
    of_numpy = [answer.texts for answer in answers(shared_pool, 3)]
    draws = [json.loads(answer.state or "")["draw"] for answer in finished(shared_pool, 1, 2, 3)]
    for one, same, other in (of_numpy, draws):
        assert one == same != other


def test_a_hung_episode_is_killed_and_delays_no_other(shared_pool) -> None:
    begun(shared_pool, 1, 2)
    shared_pool.call(1, [("enter", {"name": "Ann"}), ("enter", {"name": "Bob", "seconds": 1e6})])
    shared_pool.call(2, [("enter", {"name": "Cid"})])
    [quick] = answers(shared_pool)
    assert (quick.episode, quick.texts) == (2, ("Cid is number 1",))
    [hung] = answers(shared_pool)
    assert hung.texts == ("Ann is number 1", str({"error": "enter took over 3 s"}))
    assert (hung.errors, hung.lost) == ((False, True), "enter took over 3 s")
    shared_pool.call(1, [("enter", {})])
    [after] = answers(shared_pool)
    assert after.texts == (str({"error": "the environment has ended: enter took over 3 s"}),)
    hung, quick = finished(shared_pool, 1, 2)
    assert (hung.reward, hung.lost, quick.reward) == (None, "enter took over 3 s", 0.5)


def test_an_episode_that_reads_nothing_is_killed_at_its_deadline_however_long_its_request_is(shared_pool) -> None:
    begun(shared_pool, 1, 2)
    shared_pool.call(1, [("act", {"code": "answer = os.getpid()"})])
    os.kill(int(answers(shared_pool)[0].texts[0]), signal.SIGSTOP)
    shared_pool.finish(1, [{"role": "assistant", "content": "x" * 1_000_000}])
    shared_pool.call(2, [("enter", {"name": "Ann"})])
    assert answers(shared_pool)[0].texts == ("Ann is number 1",)
    assert answers(shared_pool)[0].lost == "get_reward took over 3 s"
    finished(shared_pool, 2)


def test_an_environment_may_ignore_that_its_child_processes_end(tmp_path) -> None:
    file = tmp_path / "deaf.py"
    file.write_text(f"{ROOM.replace('import neighbour', '')}\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n")
    with EnvironmentPool(f"{file}:Room", [], 1, 60) as pool:
        for episode in range(2):
            begun(pool, episode, kind="silent")
            pool.call(episode, [("act", {"code": "answer = str(signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN)"})])
            assert answers(pool)[0].texts == ("True",)
            assert finished(pool, episode)[0].lost is None


def test_what_an_episode_leaves_behind_is_not_kept_as_a_zombie(environment_file) -> None:
    with EnvironmentPool(f"{environment_file}:Room", [], 1, 60) as pool:
        for episode in range(3):
            begun(pool, episode)
            own_session = "self.left = subprocess.Popen(['sleep', '0'], start_new_session=True)\n"
            own_session += "import os; os.waitid(os.P_PID, self.left.pid, os.WEXITED | os.WNOWAIT)"
            code = f"subprocess.Popen(['sleep', '1e6'])\n{own_session}"
            pool.call(episode, [("act", {"code": code})])
            answers(pool)
            finished(pool, episode)
        begun(pool, 3)
        server = psutil.Process(pool._fork_server.process.pid)
        assert [child.name() for child in server.children(recursive=True) if child.name() == "sleep"] == []


LEAVER = '''
import os, threading

class Leaver:
    def reset(self, **row):
        pass

    def leave(self):
        """Leave."""
        threading.Timer(0.1, os._exit, (3,)).start()

    def get_reward(self):
        self.leave()
'''


@pytest.mark.parametrize("finishes", [True, False])
def test_a_process_that_exits_right_after_its_answer_leaves_its_place_to_another(
    tmp_path, monkeypatch, finishes
) -> None:
    (tmp_path / "leaver.py").write_text(LEAVER)
    with EnvironmentPool(f"{tmp_path}/leaver.py:Leaver", [], 1, 60) as pool:
        begun(pool, 1)
        while len(pool._fork_server.running) > 1:  # the process that described the tools
            pool._step(1)
        monkeypatch.setattr(pool._fork_server, "check", once_it_is_told(pool._fork_server))
        if not finishes:
            pool.call(1, [("leave", {})])
            answers(pool)
        [end] = finished(pool, 1)
        assert end.lost is None if finishes else str(end.lost).endswith("exit code 3 between calls")
        pool.reset(2, {"prompt": "x"}, 0)
        assert pool.ready(120)


def once_it_is_told(server: ForkServerProcess) -> Callable[[], None]:
    """`check` of a fork server, which waits for a message at its first call."""
    waits, check = iter([60.0]), server.check

    def later(*end: float) -> None:
        wait([server.file], next(waits, 0.0))
        check(*end)

    return later


@pytest.mark.parametrize(
    ("code", "lost"),
    [
        ("os.closerange(3, 256)", "closed"),
        (
            "for n in range(3, 256):\n try: os.write(n, b'x' * 64)\n except OSError: pass",
            "wrote to",
        ),
    ],
    ids=["closes", "writes"],
)
def test_code_that_breaks_the_connection_while_it_is_imported_is_a_sentence(tmp_path, code, lost) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"import os, time\n{code}\ntime.sleep(1e6)\n")
    message = f"^rollout.environment or rollout.tools, when imported, {lost} a file descriptor that was not their own"
    with EnvironmentPool(f"{file}:Room", [], 1, 60) as pool, pytest.raises(UserError, match=message):
        pool.check()


@pytest.mark.parametrize(
    ("code", "ends"),
    [("os._exit(3)", "ended its process with exit code 3"), ("os.kill(os.getpid(), 9)", r"died of SIGKILL \(out of")],
)
def test_a_death_while_code_is_imported_is_a_sentence(tmp_path, code, ends) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"import os\n{code}\n")
    message = f"^the process that imports rollout.environment and rollout.tools {ends}"
    with EnvironmentPool(f"{file}:Room", [], 1, 60) as pool, pytest.raises(UserError, match=message):
        pool.check()


def test_an_import_without_end_is_a_sentence(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(pool, "IMPORT_SECONDS", 1.0)
    file = tmp_path / "mine.py"
    file.write_text("import time\ntime.sleep(1e6)\n")
    message = "^the schemas of rollout.environment and rollout.tools: their process took over 1 s"
    with EnvironmentPool(f"{file}:Room", [], 1, 60) as made, pytest.raises(UserError, match=message):
        made.check()


@pytest.mark.parametrize("resets", [1, 300], ids=["one request", "more than its socket holds"])
def test_an_episode_that_stops_the_process_that_forks_does_not_stop_the_stage(
    environment_file, monkeypatch, resets
) -> None:
    monkeypatch.setattr(fork_server_process, "END_SECONDS", 1.0)
    with EnvironmentPool(f"{environment_file}:Room", [], resets, 60) as pool:
        begun(pool, 1)
        pool.call(1, [("act", {"code": "os.kill(os.getppid(), signal.SIGSTOP)"})])
        answers(pool)
        if resets == 1:
            finished(pool, 1)
        for number in range(resets):
            pool.reset(2 + number, {"prompt": "x"}, 0)
        with pytest.raises(UserError, match="an episode may have stopped it"):
            pool.ready(60)


def test_a_killed_episode_leaves_no_process(shared_pool, tmp_path) -> None:
    begun(shared_pool, 1)
    file = tmp_path / "pid"
    shell = f"subprocess.run(['sh', '-c', 'echo $$ > {file}; sleep 1e6'])"
    shared_pool.call(1, [("act", {"code": shell})])
    assert answers(shared_pool)[0].lost == "act took over 3 s"
    finished(shared_pool, 1)
    pid = int(file.read_text())
    wait_until(lambda: has_ended(pid))


@pytest.mark.parametrize(
    ("code", "lost"),
    [
        ("os._exit(3)", "act ended its process with exit code 3"),
        ("sys.exit(4)", "act ended its process with exit code 4"),
        ("os.kill(os.getpid(), 11)", "act died of SIGSEGV"),
        ("os.closerange(3, 256); time.sleep(1e6)", "act closed a file descriptor that belongs to the process"),
    ],
)
def test_a_tool_that_ends_its_process_loses_its_episode(shared_pool, code, lost) -> None:
    begun(shared_pool, 1, 2)
    shared_pool.call(1, [("act", {"code": code})])
    [answer] = answers(shared_pool)
    assert str(answer.lost).startswith(lost)
    assert answer.errors == (True,)
    shared_pool.call(2, [("enter", {"name": "Ann"})])
    assert answers(shared_pool)[0].texts == ("Ann is number 1",)
    finished(shared_pool, 1, 2)


def framed(report: bytes) -> bytes:
    return LENGTH.pack(len(report)) + report


@pytest.mark.parametrize(
    "data",
    [
        b"x" * 64,
        framed(b'[["RequestDone", [null, null, null, null, {}]]]'),
        framed(b'[["RequestDone", [null, null, null, null, null]]]'),
    ],
    ids=["no message", "schemas", "no answers"],
)
def test_what_a_tool_writes_into_the_socket_loses_its_episode_alone(shared_pool, data) -> None:
    begun(shared_pool, 1)
    write = f"stat.S_ISSOCK(os.fstat(n).st_mode) and os.write(n, {data!r})"
    code = f"import stat\nfor n in range(3, 256):\n try: {write}\n except OSError: pass\ntime.sleep(1e6)"
    shared_pool.call(1, [("act", {"code": code})])
    assert "wrote to a file descriptor" in str(answers(shared_pool)[0].lost)
    finished(shared_pool, 1)


def test_a_tool_that_forks_is_answered_once(shared_pool) -> None:
    begun(shared_pool, 1)
    shared_pool.call(1, [("act", {"code": "os.fork(); answer = 'both'"}), ("enter", {"name": "Ann"})])
    assert answers(shared_pool)[0].texts == ("both", "Ann is number 1")
    assert finished(shared_pool, 1)[0].reward == 0.5


def test_a_long_answer_is_cut_and_says_so(shared_pool) -> None:
    begun(shared_pool, 1)
    shared_pool.call(1, [("act", {"code": "answer = 'x' * 10_000_000"})])
    [answer] = answers(shared_pool)
    end = f"\n[cut: 10000000 characters, of which {ANSWER_CHARACTERS} are shown]"
    assert answer.texts == ("x" * ANSWER_CHARACTERS + end,)
    assert answer.lost is None
    finished(shared_pool, 1)


def test_what_a_tool_prints_goes_to_stderr(environment_file) -> None:
    code = """ask("act", code="print('printed'); os.system('echo echoed')"); print("own")"""
    outcome = subprocess.run(play(environment_file, code), capture_output=True, text=True, timeout=300, check=True)
    assert outcome.stdout == "own\n"
    assert "printed\n" in outcome.stderr
    assert "echoed\n" in outcome.stderr


def test_a_reset_may_raise_or_return_no_observation(shared_pool) -> None:
    [answer] = begun(shared_pool, 1, kind="raises")
    assert answer.lost == f"reset of '{shared_pool.names['']}' raised OSError: no door (mine.py, line 11)"
    assert finished(shared_pool, 1)[0].lost == answer.lost
    assert begun(shared_pool, 2, kind="silent")[0].texts == ()
    assert finished(shared_pool, 2)[0].reward == 0.0


def test_a_missing_reward_is_none_and_not_0(shared_pool) -> None:
    begun(shared_pool, 1, kind="none")
    assert finished(shared_pool, 1)[0].reward is None


@pytest.mark.parametrize("kind", ["text", "nan"])
def test_a_reward_that_is_no_number_is_an_error(environment_file, kind) -> None:
    with EnvironmentPool(f"{environment_file}:Room", [], 1, 60) as pool:
        begun(pool, 1, kind=kind)
        pool.finish(1)
        with pytest.raises(UserError, match=r"Room\.get_reward returned .*; return a finite number or None"):
            answers(pool)


def test_resets_wait_for_a_process(shared_pool) -> None:
    for episode in range(5):
        shared_pool.reset(episode, {"prompt": "x"}, 0)
    first = answers(shared_pool, 3)
    assert shared_pool.waiting == 2
    assert shared_pool.ready(0) == []
    for answer in first:
        shared_pool.finish(answer.episode)
    rest = answers(shared_pool, 5)
    assert sorted(answer.request for answer in rest) == ["finish"] * 3 + ["reset"] * 2
    finished(shared_pool, *(answer.episode for answer in rest if answer.request == "reset"))


def test_more_episodes_than_the_usual_limit_of_open_files_can_be_open(environment_file) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len([*Path("/proc/self/fd").iterdir()]) + 20, hard))
    try:
        with EnvironmentPool(f"{environment_file}:Room", [], 40, 60) as pool:
            begun(pool, *range(40))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_tools_alone_have_a_process_for_each_call(environment_file) -> None:
    with EnvironmentPool(None, [f"{environment_file}:{name}" for name in ("double", "hang", "draw")], 2, 3.0) as pool:
        for episode in (1, 2, 3):
            pool.reset(episode, {"prompt": "x"}, 7)
        assert answers(pool, 3) == [Answer(episode, "reset") for episode in (1, 2, 3)]
        pool.call(1, [("double", {"number": 4}), ("hang", {"seconds": 1e6})])
        pool.call(2, [("draw", {})])
        pool.call(3, [("draw", {})])
        hung, *draws = answers(pool, 3)
        assert hung.texts == ("8", str({"error": "hang took over 3 s"}))
        assert hung.lost is None
        assert draws[0].texts == draws[1].texts
        pool.call(1, [("double", {"number": 5})])
        pool.call(2, [("draw", {})])
        one, two = answers(pool, 2)
        assert one.texts == ("10",)
        assert two.texts != draws[0].texts
        assert finished(pool, 1)[0] == Answer(1, "finish")
        assert [schema["function"]["name"] for schema in pool.schemas({})] == ["double", "hang", "draw"]
        assert not pool.gives_reward({})


def test_a_column_says_which_environment(environment_file) -> None:
    with EnvironmentPool({"room": f"{environment_file}:Room", "game": GAME}, [], 2, 60) as pool:
        pool.reset(1, {"environment": "game", "number": 5, "highest": 10}, 0)
        pool.reset(2, {"environment": "room", "prompt": "two"}, 0)
        assert [answer.texts for answer in answers(pool, 2)] == [
            ("Guess a number from 1 to 10.",),
            ("a room ['prompt']",),
        ]
        with pytest.raises(
            UserError, match=r"'chess' in the column 'environment', and rollout.environment has game, r"
        ):
            pool.reset(3, {"environment": "chess"}, 0)


FUNCTIONS = """
class Graph:
    def reset(self, function="", **row):
        self.function = function
        return f"{function} {sorted(row)}"

    def plot(self, function: str, arguments: str) -> str:
        \"\"\"Plot.

        Args:
            function: what
            arguments: of it
        \"\"\"
        return f"{self.function} {function} {arguments}"
"""


def test_no_name_of_a_parameter_or_of_a_column_is_reserved_but_that_of_the_environment_itself(tmp_path) -> None:
    file = tmp_path / "graph.py"
    file.write_text(FUNCTIONS)
    with EnvironmentPool(f"{file}:Graph", [], 1, 60) as pool:
        assert begun(pool, 1, function="x", arguments="y", named="z")[0].texts == (
            "x ['arguments', 'named', 'prompt']",
        )
        pool.call(1, [("plot", {"function": "f", "arguments": "g"})])
        [answer] = answers(pool)
        assert (answer.texts, answer.errors) == (("x f g",), (False,))
        finished(pool, 1)
        pool.reset(2, {"self": "x"}, 0)
        assert str(answers(pool)[0].lost).endswith("Graph.reset() got multiple values for argument 'self'")


@pytest.mark.parametrize("sandbox", [False, True])
def test_processes_end_with_a_pool_that_is_killed(environment_file, request, sandbox) -> None:
    if sandbox:
        request.getfixturevalue("machine_sandbox")
    command = play(environment_file, """print(flush=True); ask("enter", seconds=1e6)""", sandbox)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        process.stdout.readline()
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) >= 2, "a process from which episodes are forked, and an episode"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    wait_until(lambda: all(has_ended(one.pid) for one in started))
