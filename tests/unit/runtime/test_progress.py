"""Work that takes long says what it is."""

import threading

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
