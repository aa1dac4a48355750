"""judge_reward against a local server that implements OpenAI's API."""

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from local_server import Request, serving

from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards import judge
from rloo_pipeline.rewards.judge import judge_reward
from rloo_pipeline.user_code import reward_call

QUESTION = [{"role": "user", "content": "Name a prime."}]


def saying(*replies: str | None, finish_reason: str = "stop") -> Any:
    def answer(request: Request, number: int) -> tuple[int, Any]:
        message = {"role": "assistant", "content": replies[number % len(replies)]}
        choice = {"index": 0, "message": message, "finish_reason": finish_reason}
        body = {"id": "1", "object": "chat.completion", "created": 0, "model": "judge", "choices": [choice]}
        return 200, body

    return answer


def ask(address: str, texts: list[str], **options: Any) -> list[float | None]:
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    arguments = {"model": "judge", "timeout": 5.0, "attempts": 1, **options}
    return asyncio.run(judge_reward([QUESTION] * len(texts), completions, address + "/v1", **arguments))


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Right.\nScore: 10", 1.0),
        ("Weak. **Score:** 2.5", 0.25),
        ("Score: 3 would be harsh.\nScore: 7", 0.7),
        ("<think>Score: 9?</think>No.\nscore = 4", 0.4),
        ("<think>Perhaps a Score: 9, or", None),
        ("Score: 4\n<think>or Score: 9", 0.4),
        ("Score: 11", None),
        ("Score: -1", None),
        ("I cannot say.", None),
        ("", None),
        (None, None),
    ],
)
def test_the_last_score_in_the_reply_counts(reply: str | None, score: float | None) -> None:
    notes = reward_call.collect_notes()
    with serving(saying(reply)) as server:
        assert ask(server.address, ["7"]) == [score]
    assert notes == ({} if score is not None else {0: "got a reply of judge without a score from 0 to 10"})


def test_a_reply_that_is_cut_has_no_score() -> None:
    notes = reward_call.collect_notes()
    with serving(saying("Score: 1", finish_reason="length")) as server:
        assert ask(server.address, ["7"]) == [None]
    assert notes == {0: "got a reply of judge without a score from 0 to 10"}


def test_the_judge_gets_only_the_answer_at_temperature_0() -> None:
    with serving(saying("Score: 5")) as server:
        assert ask(server.address, ["<think>hm {x}</think>It is {7}."], extra_body={"top_k": 1}) == [0.5]
        [request] = server.requests
    assert request.path == "/v1/chat/completions"
    assert (request.body["model"], request.body["temperature"], request.body["top_k"]) == ("judge", 0.0, 1)
    [message] = request.body["messages"]
    assert "Name a prime." in message["content"]
    assert "<reply>\nIt is {7}.\n</reply>" in message["content"]
    assert "hm" not in message["content"]


def test_template_pattern_range_and_columns_are_options() -> None:
    options = {"template": "{answer}|{prompt}|{completion}", "pattern": "<(.*?)>", "lowest": -1, "highest": 1}
    with serving(saying("<0>", "<high>")) as server:
        assert ask(server.address, ["<think>a</think>b"], answer=["7"], show_thinking=True, **options) == [0.5]
        assert ask(server.address, ["b"], answer=["7"], **options) == [None]
        assert server.requests[0].body["messages"][0]["content"] == "7|Name a prime.|<think>a</think>b"


def test_two_completions_are_compared_by_a_template_of_their_own() -> None:
    others = [[{"role": "assistant", "content": "<think>so</think>It is 9."}]]
    with serving(saying("Score: 9")) as server:
        assert ask(server.address, ["It is 7."], other_completions=others) == [0.9]
        shown = server.requests[0].body["messages"][0]["content"]
    assert "<first>\nIt is 7.\n</first>" in shown
    assert "<second>\nIt is 9.\n</second>" in shown


def test_a_prompt_with_images_is_shown_as_its_text_with_a_marker_for_each() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "Which colour?"}]
    system = {"role": "system", "content": "Be brief."}
    with serving(saying("Score: 5")) as server:
        for prompt in ([{"role": "user", "content": parts}], [system, {"role": "user", "content": parts}]):
            asyncio.run(judge_reward([prompt], ["red"], server.address + "/v1", "judge", template="{prompt}"))
        shown = [request.body["messages"][0]["content"] for request in server.requests]
    assert shown == ["[image]Which colour?", "system: Be brief.\n\nuser: [image]Which colour?"]


def test_each_row_gets_the_score_of_its_own_reply() -> None:
    def last_digit(request: Request, number: int) -> tuple[int, Any]:
        text = request.body["messages"][0]["content"].partition("<reply>\n")[2][0]
        return saying(f"Score: {text}")(request, number)

    with serving(last_digit) as server:
        assert ask(server.address, list("0123456789")) == [n / 10 for n in range(10)]


def test_a_call_has_at_most_so_many_requests_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "REQUESTS", 2)
    finished, third, early = threading.Semaphore(0), threading.Event(), list[int]()

    def slowly(request: Request, number: int) -> tuple[int, Any]:
        if number < 2:
            third.wait(1)  # without a limit, it comes by then
        else:
            third.set()
            if not finished.acquire(blocking=False):
                early.append(number)
        finished.release()
        return saying("Score: 5")(request, number)

    with serving(slowly) as server:
        assert ask(server.address, list("0123")) == [0.5] * 4
    assert early == []


def test_a_busy_server_is_retried_and_a_refusal_raises_an_error_without_the_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret-key")
    monkeypatch.setenv("OPENAI_API_KEY", "of-another-server")

    def busy_first(request: Request, number: int) -> tuple[int, Any]:
        return saying("Score: 1")(request, number) if number else (503, {"error": "busy"})

    def refuse(request: Request, number: int) -> tuple[int, Any]:
        return 401, {"error": {"message": f"bad {request.headers['authorization']}"}}

    with serving(busy_first) as server:
        assert ask(server.address, ["7"], attempts=2) == [0.1]
        assert server.requests[0].headers["authorization"] == "Bearer none"
    with serving(refuse) as server:
        with pytest.raises(UserError, match=r"refused with status 401 .*\[secret\].*api_key_env") as caught:
            ask(server.address, ["7"], api_key_env="JUDGE_KEY")
        assert server.requests[0].headers["authorization"] == "Bearer s3cret-key"
    assert "s3cret-key" not in str(caught.value) + caplog.text
    with pytest.raises(UserError, match="failed 1 times, last with APIConnectionError"):
        ask(server.address, ["7"])


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_completion_gets_0_if_the_server_refuses_only_it_of_its_prompt(status: int) -> None:
    def refuse_long(request: Request, number: int) -> tuple[int, Any]:
        too_long = len(request.body["messages"][0]["content"]) > 1000
        return (status, {"error": {"message": "too long"}}) if too_long else saying("Score: 5")(request, number)

    notes = reward_call.collect_notes()
    with serving(refuse_long) as server:
        assert ask(server.address, ["7", "7" * 1000, "8"]) == [0.5, 0.0, 0.5]
        assert ask(server.address, ["7" * 1000]) == [None]
        assert ask(server.address, ["7", "7" * 1000], other_completions=["8", "8"]) == [0.5, None], "of two, who knows"
    assert [*notes] == [1, 0]
    assert re.fullmatch(rf"was refused by http://\S+ with status {status} \(.*too long.*\)", notes[1])


@pytest.mark.parametrize(("spaces", "fits"), [(0, True), (1 << 20, False)])
def test_an_answer_that_is_too_large_for_the_memory_is_an_error(monkeypatch, spaces, fits) -> None:
    monkeypatch.setattr(judge, "LARGEST_ANSWER", 1 << 20)

    def packed(request: Request, number: int) -> tuple[int, Any]:
        status, body = saying("Score: 5")(request, number)
        return status, json.dumps(body).encode() + b" " * spaces

    with serving(packed) as server:
        if fits:
            assert ask(server.address, ["7"]) == [0.5]
            return
        message = r"^judge_reward: 127.0.0.1 sent an answer of more than 1 MiB; check base_url$"
        with pytest.raises(UserError, match=message):
            ask(server.address, ["7"], attempts=2)


@pytest.mark.parametrize("body", [b"<html>", {"hello": 1}, [1], 1, {"choices": [{}]}, {"choices": [1]}])
def test_an_answer_that_is_not_a_chat_completion_is_an_error(body: Any) -> None:
    message = r"did not answer with a chat completion .*check base_url"
    with serving(lambda r, n: (200, body)) as server, pytest.raises(UserError, match=message):
        ask(server.address, ["7"])


def test_a_reply_without_a_choice_has_no_score() -> None:
    with serving(lambda r, n: (200, {"choices": []})) as server:
        assert ask(server.address, ["7"]) == [None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "{anwser}", "answer": ["7"]}, "names 'anwser', which is not a column; did you mean 'answer'"),
        ({"template": "{"}, "template is malformed"),
        ({"template": "{}"}, "template"),
        ({"pattern": "("}, "not a regular expression"),
        ({"pattern": "score"}, "must have one group"),
        ({"lowest": 1, "highest": 1}, "must be below"),
        ({"attempts": 0}, "must be at least 1"),
        ({"api_key_env": "NOT_SET_ANYWHERE"}, r"NOT_SET_ANYWHERE \(api_key_env\) is not set"),
    ],
)
def test_invalid_options_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ask("http://127.0.0.1:9", ["7"], **options)


@pytest.mark.parametrize("key", ["s3cret\nkey", "s3cret”"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("JUDGE_KEY", key)
    with pytest.raises(UserError, match=r"JUDGE_KEY \(api_key_env\) has characters that no header") as caught:
        ask("http://127.0.0.1:9", ["7"], api_key_env="JUDGE_KEY")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ftp://127.0.0.1", "http://me:s3cret@127.0.0.1:9", "http://[::1"])
def test_an_address_that_cannot_be_used_is_refused_and_not_shown(address: str) -> None:
    with pytest.raises(UserError, match="base_url must be an http:// or https:// address") as caught:
        ask(address, ["7"])
    assert "s3cret" not in str(caught.value)


DEEP = b'{"choices": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"


def test_json_that_is_nested_too_deeply_is_an_error() -> None:
    wrong = pytest.raises(UserError, match="did not answer with a chat completion")
    with serving(lambda r, n: (200, DEEP)) as server, wrong:
        ask(server.address, ["7"])


@contextmanager
def answering(answer: bytes, drip: bytes = b"") -> Iterator[str]:
    """A server that sends the same bytes to everybody, then `drip` again and again; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):  # the test has ended
                while True:
                    threading.Thread(target=serve_connection, args=[listener.accept()[0]], daemon=True).start()

        def serve_connection(connection: socket.socket) -> None:
            with connection, suppress(OSError):  # the client has closed the connection
                connection.recv(1 << 16)
                connection.sendall(answer)
                while drip:
                    connection.sendall(drip)
                    time.sleep(0.02)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "])
def test_a_server_that_drips_ends_at_the_timeout(answer: bytes) -> None:
    began = time.monotonic()
    with answering(answer, b" ") as address, pytest.raises(UserError, match=r"failed 1 times.*within 0\.5 s"):
        ask(address, ["7"], timeout=0.5)
    assert time.monotonic() - began < 300, "and not when the answer would end"


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_completions_are_sent_to_no_other_host(status: int) -> None:
    with serving(saying("Score: 10")) as other:
        redirect = (
            f"HTTP/1.1 {status} Moved\r\nLocation: {other.address}/v1/chat/completions\r\nContent-Length: 0\r\n\r\n"
        )
        refused = pytest.raises(UserError, match=f"refused with status {status}")
        with answering(redirect.encode()) as address, refused:
            ask(address, ["secret"])
        assert other.requests == []
