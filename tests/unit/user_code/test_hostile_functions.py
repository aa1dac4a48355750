"""No reward function stops scoring, changes another row's score or gets its output unpickled, whatever it does."""

import json
import os
import pickle
import time
from functools import partial
from pathlib import Path
from socket import recv_fds
from typing import ClassVar

import pytest
from helpers import score_all

from rloo_pipeline.config import Reward
from rloo_pipeline.errors import UserError
from rloo_pipeline.user_code.messages import (
    LENGTH,
    BadMessageError,
    Done,
    Ready,
    Start,
    decode_report,
    encode_report,
)
from rloo_pipeline.user_code.process import UserCodeProcess
from rloo_pipeline.user_code.reward_call import Signature
from rloo_pipeline.user_code.score_batch import FunctionScores, RewardBatch

SOCKETS = """
import json, os, stat, struct, sys, time
def sockets():
    numbers = []
    for number in range(3, 256):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode): numbers.append(number)
        except OSError: pass
    return numbers
def tell(data):
    for number in sockets(): os.write(number, data)
def cut_files():
    for number in range(3, 256):
        try: os.ftruncate(number, 0)
        except OSError: pass
def frame(*messages):
    data = json.dumps(messages).encode()
    return struct.pack("=Q", len(data)) + data
def mine(completions):
    if "7" in completions:
        {}
    return [float(text) for text in completions]
"""
ROWS = 12
NUMBERS: list[float | None] = [float(row) for row in range(ROWS)]


def scores(tmp_path: Path, body: str, **keys) -> tuple[list[float | None], list[str | None]]:
    """The scores and errors of a function that does something to the row with the completion '7'."""
    rows = [str(row) for row in range(ROWS)]
    batch = RewardBatch(rows, rows, None, {})
    result = called(tmp_path, SOCKETS.format(body), batch, [4] * 3, **{"on_error": "none", "timeout": 2} | keys)
    return result.scores, result.errors


def called(tmp_path: Path, text: str, batch: RewardBatch, samples: list[int], /, **keys) -> FunctionScores:
    """The results of the function `mine` of a file with this text."""
    file = tmp_path / "mine.py"
    file.write_text(text)
    return score_all([Reward.model_validate({"function": f"{file}:mine"} | keys)], batch, samples, 1)[0]


DISTURBED = "wrote to a file descriptor that belongs to the process that calls it"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("tell(struct.pack('=Q', 1000) + b'half'); time.sleep(1e6)", "took over 2 s"),
        ("tell(struct.pack('=Q', 1000) + b'half')", "took over 2 s"),
        ("tell(b'garbage, and more than a length'); time.sleep(1e6)", DISTURBED),
        ("tell(frame(['Done', [[1], [0.0], [[1.0] * 4], {}]])); time.sleep(1e6)", DISTURBED),
        ("tell(frame(['Failed', [99, 0.0, 'x', None, False, '']])); time.sleep(1e6)", DISTURBED),
        ("[os.close(number) for number in sockets()]; time.sleep(1e6)", "closed a file descriptor that belongs"),
        ("os.closerange(3, 256)", "closed a file descriptor that belongs|ended its process"),
        ("cut_files(); time.sleep(1e6)", "took over 2 s"),
    ],
)  # fmt: skip
def test_what_a_function_writes_to_the_workers_socket_costs_only_its_own_row(tmp_path, body, message) -> None:
    values, errors = scores(tmp_path, body)
    assert values == [None if value == 7 else value for value in NUMBERS]
    assert [place for place, error in enumerate(errors) if error] == [7]
    assert any(part in str(errors[7]) for part in message.split("|"))


def test_a_flood_of_messages_does_not_stop_the_deadline(tmp_path) -> None:
    began = time.monotonic()
    values, _ = scores(tmp_path, "while True: tell(struct.pack('=Q', 2) + b'[]')")
    assert values[7] is None
    assert time.monotonic() - began < 300


def test_a_function_that_overwrites_the_record_of_its_call_ends_at_its_deadline(tmp_path) -> None:
    body = """
        import gc, mmap
        for memory in [one for one in gc.get_objects() if isinstance(one, mmap.mmap) and len(one) == 16]:
            struct.pack_into("=qd", memory, 0, 99, float("inf"))
        from rloo_pipeline.user_code.worker import StatusBoard
        for board in [one for one in gc.get_objects() if isinstance(one, StatusBoard)]: board.write(99, 1e300)
        time.sleep(1e6)"""
    began = time.monotonic()
    assert scores(tmp_path, body, batch="group")[0][4:8] == [None] * 4
    assert time.monotonic() - began < 300


@pytest.mark.parametrize("keys", [{}, {"batch": "all"}])
@pytest.mark.parametrize("body", ["os.fork()", "os.fork() or sys.exit()", "if os.fork() == 0: raise ValueError"])
def test_a_function_that_returns_in_a_child_process_too_is_answered_once(tmp_path, body, keys) -> None:
    assert scores(tmp_path, body, **keys) == (NUMBERS, [None] * ROWS)


def test_an_async_function_that_returns_in_a_child_process_too_is_answered_once(tmp_path) -> None:
    text = "import os\nasync def mine(completions):\n    os.fork()\n    return [1.0] * len(completions)"
    assert called(tmp_path, text, RewardBatch(["a"] * 4, ["a"] * 4, None, {}), [2, 2]).scores == [1.0] * 4


def test_a_change_of_an_option_is_not_seen_by_the_next_call(tmp_path) -> None:
    text = (
        "def mine(completions, seen, named):\n    seen += completions\n    named.update(dict.fromkeys(completions))\n"
        "    return [float(len(seen) + len(named))] * len(completions)"
    )
    rows = [str(row) for row in range(40)]
    batch, options = RewardBatch(rows, rows, None, {}), {"seen": [], "named": {}}
    assert called(tmp_path, text, batch, [4] * 10, options=options).scores == [8.0] * 40


@pytest.mark.parametrize(("calls", "keys"), [([4] * 10, {}), ([1] * 40, {}), ([4] * 10, {"batch": "all"})])
def test_a_change_of_a_rows_arguments_is_not_seen_by_other_rows(tmp_path, calls, keys) -> None:
    text = (
        "def mine(prompts, completions, about):\n    scores = []\n    for prompt, info in zip(prompts, about):\n"
        "        scores.append(float(len(prompt[0]['content']) + len(info['tags'])))\n"
        "        prompt[0]['content'] += ' more'\n        info['tags'].append('seen')\n    return scores"
    )
    prompt, about = [{"role": "user", "content": "a"}], {"tags": ["b"]}
    batch = RewardBatch([prompt] * 40, ["x"] * 40, None, {"about": [about] * 40})
    assert called(tmp_path, text, batch, calls, **keys).scores == [2.0] * 40


@pytest.mark.parametrize("returned", ["b'12'", "bytearray(2)", "memoryview(b'12')", "'12'"])
def test_bytes_are_no_list_of_scores(tmp_path, returned) -> None:
    text = f"def mine(completions):\n    return {returned}"
    with pytest.raises(UserError, match=r"returned \w+, not a list with one number or None per completion"):
        called(tmp_path, text, RewardBatch(["a"] * 2, ["a"] * 2, None, {}), [2])


def test_nothing_from_a_worker_is_unpickled(tmp_path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "ran"),)

    with pytest.raises(BadMessageError):
        decode_report(pickle.dumps(Evil()))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "report", [b"", b"[", b"{}", b"1", b'[["Done"]]', b'[["Done", [[1], [0.0], [[NaN]], {}]]]',
               b'[["Done", [[1], [0.0], [[1e999]], {}]]]', b'[["Done", [[1], [0.0], [["nan"]], {}]]]',
               b'[["Done", [[1], [0.0], [["1 apple"]], {}]]]', b'[["Ready", [1]]]', b"[" * 100_000, b"\xff",
               b'[["Start", ["f", {}, 1]]]', b'[["Unknown", []]]'],
)  # fmt: skip
def test_what_is_no_report_is_refused(report) -> None:
    with pytest.raises(BadMessageError):
        decode_report(report)


def test_a_request_cannot_be_changed_or_enlarged_by_its_receiver() -> None:
    process = UserCodeProcess()
    process.ask(Start("mine.py:mine", {}, 1))
    _, [file], _, _ = recv_fds(process.other_end, 1, 1)
    for change in (partial(os.pwrite, file, b"x", 0), partial(os.ftruncate, file, 0), partial(os.ftruncate, file, 999)):
        with pytest.raises(PermissionError):
            change()
    os.close(file)
    process.close()
    process.other_end.close()


def test_reports_keep_every_bit() -> None:
    values = [0.1, 1e-320, -0.0, 2.0**60, None]
    report = [Done([1], [0.5], [values], {3: 'why \ud800 "\n'}), Ready(Signature(("a", "b"), ("a",), False, True))]
    assert json.dumps(decode_report(encode_report(report))) == json.dumps(report)
    assert decode_report(encode_report(report)) == report


def test_messages_arrive_whole_in_whatever_pieces_they_are_sent() -> None:
    class RunningProcess(UserCodeProcess):
        kinds: ClassVar = {"Done": Done}
        limit = 100

        def exit_code(self) -> None: ...

    process, arrived = RunningProcess(), list[Done]()
    sent = [Done([number], [0.5], [[1.0]], {}) for number in range(3)]
    for byte in b"".join(LENGTH.pack(len(report)) + report for report in (encode_report([done]) for done in sent)):
        process.other_end.send(bytes([byte]))
        arrived += process.messages()
    assert (arrived, process.fault) == (sent, None)
    process.other_end.send(LENGTH.pack(101))
    assert (process.messages(), process.fault) == ([], DISTURBED)
    process.close()
    process.other_end.close()
