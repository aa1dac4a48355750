"""remote_reward against a local server: what it sends, when it retries, what it never shows."""

import asyncio
import logging
import threading
from typing import Any

import pytest
from local_server import Request, serving

from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards.remote import remote_reward
from rloo_pipeline.user_code import http_service, reward_call

SECRET = "s3cret-t0ken"


def lengths(request: Request, number: int) -> tuple[int, Any]:
    return 200, {"rewards": [len(text) for text in request.body["completions"]]}


def ask(url: str, texts: list[str], **options: Any) -> list[float | None]:
    return asyncio.run(remote_reward(["p"] * len(texts), texts, url, **{"backoff": 0.01, "timeout": 60.0, **options}))


TEXTS = ["a" * n for n in range(50)]


def test_scores_are_in_row_order_and_columns_are_sent() -> None:
    with serving(lengths) as server:
        columns = {"columns": ["answer"], "answer": [str(n) for n in range(50)], "other": [0] * 50}
        assert ask(server.address + "/score", TEXTS, batch_size=7, **columns) == [float(n) for n in range(50)]
        assert {request.path for request in server.requests} == {"/score"}
        assert all(set(request.body) == {"prompts", "completions", "answer"} for request in server.requests)
        assert sum(len(request.body["answer"]) for request in server.requests) == 50
        assert max(len(request.body["prompts"]) for request in server.requests) == 7


def test_messages_arrive_as_messages() -> None:
    conversation = [[{"role": "user", "content": "1+1"}]], [[{"role": "assistant", "content": "2"}]]
    with serving(lambda request, number: (200, [0.5])) as server:
        assert asyncio.run(remote_reward(*conversation, server.address)) == [0.5]
        assert server.requests[0].body == {"prompts": conversation[0], "completions": conversation[1]}


def test_concurrent_calls_share_one_limit_of_requests() -> None:
    async def three_calls(url: str) -> None:
        calls = [remote_reward(["p"] * 9, TEXTS[:9], url, batch_size=1, concurrency=4) for _ in range(3)]
        await asyncio.gather(*calls)

    two = threading.Barrier(2)

    def first_two_wait_for_each_other(request: Request, number: int) -> tuple[int, Any]:
        if number < 2:
            two.wait(timeout=300)
        return lengths(request, number)

    with serving(first_two_wait_for_each_other) as server:
        asyncio.run(three_calls(server.address))
        assert len(server.requests) == 27
        assert 2 <= server.most_under_way <= 4


@pytest.mark.parametrize(
    ("body", "message"),
    [(b"[1]" + b" " * http_service.MOST_BYTES, "more than 4 MiB"), (b"[" + b"9" * 400 + b"]", "returned 9999")],
)
def test_an_answer_that_is_too_long_or_a_score_that_is_too_large_is_an_error(body: bytes, message: str) -> None:
    with serving(lambda request, number: (200, body)) as server, pytest.raises(UserError, match=message):
        ask(server.address, ["abc"])


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_transient_failure_is_retried(status: int) -> None:
    with serving(lambda r, number: lengths(r, number) if number == 2 else (status, b"busy")) as server:
        assert ask(server.address, ["abc"]) == [3.0]
        assert len(server.requests) == 3


def test_a_timeout_is_retried() -> None:
    over = threading.Event()

    def first_is_slow(request: Request, number: int) -> tuple[int, Any]:
        if number == 0:
            over.wait(timeout=300)
        return lengths(request, number)

    with serving(first_is_slow) as server:
        assert ask(server.address, ["abc"], timeout=3.0) == [3.0]
        assert len(server.requests) == 2
        over.set()


def test_a_permanent_failure_is_an_error() -> None:
    with serving(lambda r, n: (500, b"")) as server:
        with pytest.raises(UserError, match=r"127.0.0.1:\d+ failed 3 times, last with status 500; check"):
            ask(server.address, ["abc"], attempts=3)
        assert len(server.requests) == 3
        address = server.address
    with pytest.raises(UserError, match="failed 2 times, last with ConnectError"):
        ask(address, ["abc"], attempts=2)
    over = threading.Event()
    with serving(lambda r, n: over.wait(timeout=300) and lengths(r, n)) as server:
        with pytest.raises(UserError, match=r"last with (no answer within 0.1 s|ReadTimeout)"):
            ask(server.address, ["abc"], attempts=1, timeout=0.1)
        over.set()


def test_a_refusal_is_not_retried() -> None:
    with serving(lambda r, n: (403, b"no such user")) as server:
        with pytest.raises(UserError, match=r"refused with status 403 \(no such user\)"):
            ask(server.address, ["abc"])
        assert len(server.requests) == 1


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_completion_that_alone_of_its_prompt_is_refused_gets_0(status: int) -> None:
    def refuse_long(request: Request, number: int) -> tuple[int, Any]:
        return lengths(request, number) if max(map(len, request.body["completions"])) < 9 else (status, b"too long")

    notes = reward_call.collect_notes()
    with serving(refuse_long) as server:
        texts = ["a", "bb", "c" * 9, "dddd", "e"]
        assert ask(server.address, texts, batch_size=4) == [1.0, 2.0, 0.0, 4.0, 1.0]
        assert notes == {2: f"was refused by {server.address} with status {status} (too long)"}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"rewards": [1.0]}, "answered 1 scores for 2 completions"),
        ({"reward": [1.0, 2.0]}, r"answered \{'reward': \[1.0, 2.0\]\} for 2"),
        ([1.0, "high"], "returned 'high' for a completion;"),
        (b"[1.0, NaN]", "returned nan for a completion;"),
        (b"[1.0, Infinity]", "returned inf for a completion;"),
        (b"<html>", r"did not answer with JSON \(<html>\)"),
        (3, "answered 3 for 2 completions"),
    ],
)
def test_an_invalid_answer_is_an_error(answer: Any, message: str) -> None:
    with serving(lambda r, n: (200, answer)) as server, pytest.raises(UserError, match=message):
        ask(server.address, ["a", "b"])


def test_null_is_none() -> None:
    with serving(lambda r, n: (200, {"scores": [None, 1, True]})) as server:
        assert ask(server.address, ["a", "b", "c"]) == [None, 1.0, 1.0]


def test_the_secret_is_sent_to_the_server_and_never_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("MY_TOKEN", SECRET + "\n")

    def echo(request: Request, number: int) -> tuple[int, Any]:
        return (401 if request.path == "/401" else 200), str(request.headers).encode()

    with serving(echo) as server:
        for path in ("/401", "/200"):
            with pytest.raises(UserError) as caught:
                ask(server.address + path, ["a"], auth_env="MY_TOKEN")
            assert SECRET not in str(caught.value) + caplog.text
            assert "[secret]" in str(caught.value)
        with pytest.raises(UserError):
            ask(server.address, ["a"], auth_env="MY_TOKEN", auth_header="X-Key", auth_scheme="")
        assert [request.headers.get("authorization") for request in server.requests] == [f"Bearer {SECRET}"] * 2 + [
            None
        ]
        assert server.requests[2].headers["x-key"] == SECRET


@pytest.mark.parametrize("value", ["", "two\nlines", "schlüssel"])
def test_an_invalid_secret_is_an_error_that_does_not_show_it(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MY_TOKEN", value)
    with pytest.raises(UserError, match=r"MY_TOKEN \(auth_env\)") as caught:
        ask("http://127.0.0.1:9", ["a"], auth_env="MY_TOKEN")
    assert not value or value not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://x/y", "must begin with http"),
        ("host:80", "must begin with"),
        ("http://me:hush@host/x", "remove it"),
        ("http://me:hush@host:x/", "no valid host and port"),
        ("http://[::1/x", "no valid host and port"),
    ],
)
def test_an_invalid_url_is_an_error(url: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        ask(url, ["a"])
    assert "hush" not in str(caught.value)


def test_a_missing_column_is_an_error() -> None:
    with pytest.raises(UserError, match=r"no column 'anwser'.*did you mean 'answer'"):
        ask("http://127.0.0.1:9", ["a"], columns=["anwser"], answer=["1"])
