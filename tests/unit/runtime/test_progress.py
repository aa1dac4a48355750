"""Work that takes long says what it is."""

import threading
from types import SimpleNamespace

from rloo_pipeline.runtime import progress


def test_work_that_takes_long_is_named_and_short_work_is_not(monkeypatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_OF_SILENCE", 0.01)
    lines: list[str] = []
    spoken = threading.Event()

    def tell(line: str) -> None:
        lines.append(line)
        spoken.set()

    with progress.announcing("starting vLLM", tell):
        assert spoken.wait(60)
    assert lines[0] == "starting vLLM: 0 s so far"
    monkeypatch.setattr(progress, "SECONDS_OF_SILENCE", 3600.0)
    spoken.clear()
    with progress.announcing("importing vLLM", tell):
        pass
    assert not spoken.is_set()


def test_the_time_left_does_not_count_the_start_of_what_makes_the_items(monkeypatch, caplog) -> None:
    times = iter((0.0, 17.0, 18.0, 37.0))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(times)))
    counter = progress.Counter("templating", 101, None)
    with caplog.at_level("INFO", "rloo"):
        for _ in range(3):
            counter.advance()
    assert caplog.messages == ["templating: 1 of 101", "templating: 3 of 101, about 980 s left"]
