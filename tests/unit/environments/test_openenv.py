"""Environments of OpenEnv, with its real server in a Python of its own."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import psutil
import pytest
from helpers import has_ended, wait_until
from other_pythons import python_of
from rooms import answers, begun, finished

from rloo_pipeline.environments import openenv_server
from rloo_pipeline.errors import UserError
from rloo_pipeline.user_code.pool import EnvironmentPool

COMMAND = f"{{}} -m uvicorn openenv_apps:app --app-dir '{Path(__file__).parent}' --log-level warning"


def answering(url: str) -> bool:
    try:
        with urlopen(f"{url}/health") as response:
            return bool(response.status == 200)
    except URLError:
        return False


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that runs already."""
    command = COMMAND.format(python_of("openenv"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = subprocess.Popen(
            f"exec {command} --fd {listener.fileno()}", shell=True, pass_fds=[listener.fileno()], env={}
        )
    wait_until(lambda: answering(address), 120)
    yield address
    server.kill()
    server.wait()


@pytest.fixture(scope="module")
def pool(url) -> Iterator[EnvironmentPool]:
    with EnvironmentPool({"game": f"openenv:{url}", "tools": f"openenv:{url}/calculating"}, [], 2, 60.0) as made:
        yield made


def called(pool: EnvironmentPool, episode: int, name: str, **arguments) -> str:
    pool.call(episode, [(name, arguments)])
    return answers(pool)[0].texts[0]


def test_an_action_is_a_tool_and_the_reward_is_the_sum_of_the_rewards_of_the_steps(pool) -> None:
    [schema] = pool.schemas({"environment": "game"})
    assert schema["function"]["name"] == "step"
    assert schema["function"]["parameters"]["properties"].keys() == {"number"}
    assert schema["function"]["parameters"]["required"] == ["number"]
    assert pool.gives_reward({"environment": "game"})
    one, other = begun(pool, 1, 2, seed=7, environment="game", highest=8)
    assert one.texts == other.texts == ("Guess a number from 1 to 8.",), "a column reached the environment's reset"
    assert "Input should be a valid integer" in called(pool, 1, "step", number="x")
    assert "no such number" in called(pool, 1, "step", number=-1)
    hints = [called(pool, 1, "step", number=number) for number in range(1, 9)]
    right = hints.index("right") + 1
    assert hints[:right] == ["higher"] * (right - 1) + ["right"]
    assert hints[right:] == ["{'error': 'the episode has ended'}"] * (8 - right)
    assert called(pool, 2, "step", number=right) == "right", "the same seed for both, and a session for each"
    first, second = finished(pool, 1, 2)
    assert (first.reward, second.reward) == (1 - (right - 1) / 8, 1.0)
    assert json.loads(second.state or "") == {"done": True, "observation": {"hint": "right"}, "steps": 1}


def test_the_tools_of_an_mcp_environment_are_those_of_the_model(pool) -> None:
    [schema] = pool.schemas({"environment": "tools"})
    assert schema["function"]["name"] == "calculator"
    assert schema["function"]["description"] == "Computes a product."
    assert begun(pool, 1, environment="tools")[0].texts == ("",)
    assert called(pool, 1, "calculator", expression="6*7") == "42"
    assert called(pool, 1, "calculator", expression="6").startswith("{'error':")
    assert called(pool, 1, "calculator", wrong=1).startswith("{'error':")
    assert finished(pool, 1)[0].reward == 0.0


def test_more_episodes_than_sessions_are_refused(url, monkeypatch) -> None:
    made = openenv_server.environment(url)
    monkeypatch.setattr(openenv_server, "CAPACITY_SECONDS", 0.1)
    episodes = [made() for _ in range(3)]
    episodes[0].reset(prompt="x")
    episodes[1].reset(prompt="x")
    with pytest.raises(UserError, match=r"has no session left .* \(OpenEnv's max_concurrent_envs\)"):
        episodes[2].reset(prompt="x")
    for episode in episodes[:2]:
        episode._socket.close()


def test_a_server_other_than_openenvs_gives_a_one_line_error(tmp_path) -> None:
    def refusal(argument: str) -> str:
        with pytest.raises(UserError) as error:
            openenv_server.environment(argument)
        return str(error.value)

    (tmp_path / "schema").write_text('{"action": 3}')
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)) as other:
        threading.Thread(target=other.serve_forever).start()
        assert "does not answer like an OpenEnv server (3)" in refusal(f"http://127.0.0.1:{other.server_port}/")
        other.shutdown()
    assert "cannot be read (<urlopen error" in refusal(f"http://127.0.0.1:{other.server_port}")
    assert "write {port} where the command takes the server's port" in refusal("uvicorn app:app")
    assert "none cannot be started (No such file or directory)" in refusal(f"{tmp_path}/none --port {{port}}")
    assert "ended with exit code 4" in refusal(f"{sys.executable} -c 'import sys; sys.exit(4)' {{port}}")


def test_two_processes_choose_different_ports_for_their_servers(monkeypatch) -> None:
    """The second is offered the port that the first has chosen, and whose server does not listen yet."""
    taken = openenv_server._free_port()

    class Offered(socket.socket):
        offers = iter([taken])

        def getsockname(self) -> Any:
            return "127.0.0.1", next(self.offers, None) or super().getsockname()[1]

    monkeypatch.setattr(openenv_server.socket, "socket", Offered)
    assert openenv_server._free_port() != taken


def servers(process: int) -> list[psutil.Process]:
    """Servers that commands started below a process."""
    below = psutil.Process(process).children(recursive=True)
    lines = [(child, Path(f"/proc/{child.pid}/cmdline")) for child in below]
    words = {b"openenv_apps:app", b"--port"}
    return [child for child, line in lines if line.exists() and words <= {*line.read_bytes().split(b"\0")}]


def test_the_server_of_a_command_ends_with_the_pool() -> None:
    command = f"openenv:{COMMAND.format(python_of('openenv'))} --port {{port}}"
    with EnvironmentPool(command, [], 1, 60.0) as pool:
        begun(pool, 1)
        assert called(pool, 1, "step", number=1000) == "lower"
        [server] = servers(os.getpid())
        assert "PYTHONPATH" not in server.environ(), "it sees its own packages alone"
    assert has_ended(server.pid)


@pytest.mark.long
def test_the_server_of_a_command_ends_when_its_job_is_killed() -> None:
    command = f"openenv:{COMMAND.format(python_of('openenv'))} --port {{port}}"
    code = (
        "import sys, time; from rloo_pipeline.user_code.pool import EnvironmentPool\n"
        "with EnvironmentPool(sys.argv[1], [], 1, 60.0) as pool:\n"
        "    pool.check(); print('ready', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, command], stdout=subprocess.PIPE) as job:
        assert job.stdout
        assert job.stdout.readline() == b"ready\n"
        [server] = servers(job.pid)
        job.kill()
    wait_until(lambda: has_ended(server.pid))


def test_a_server_that_dies_ends_the_stage(pool) -> None:
    begun(pool, 1, environment="game")
    with pytest.raises(UserError, match=r"lost the connection to the server at http://\S+:\d+ .*; run the stage again"):
        called(pool, 1, "step", number=666)
