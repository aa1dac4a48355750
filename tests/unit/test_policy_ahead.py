"""A sampler takes a policy before a stage asks for it, while the folder is still on its way to its place, and begins
with what it will be asked for.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rloo_pipeline import kept, runtime
from rloo_pipeline.generation import groups
from rloo_pipeline.generation.completions import Decoding, Request
from rloo_pipeline.generation.sampler import Sampler
from rloo_pipeline.workers import server

KEY = ("engine", 0, "{}")
GREEDY = Decoding(0.0, 1.0, 0, None, 4)


@pytest.fixture
def beside(tmp_path) -> Path:
    folder = tmp_path / ".00001.tmp"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def done(beside, monkeypatch) -> list[str]:
    """What a kept sampler does, which has three steps to do; a policy is renamed as soon as it begins to take it."""
    found: list[str] = []

    def swap(folder: Path, longest: int) -> None:
        assert longest == 0, "a policy to come asks for no context"
        beside.rename(beside.with_name("00001"))
        found.append("took " + (folder / "config.json").read_text())

    def line_up(requests: list[Request], decoding: Decoding) -> None:
        assert decoding == GREEDY
        found.append(f"lined up {len(requests)}")
        sampler.under_way = requests

    def go_on() -> bool:
        found.append("step")
        return found.count("step") < 3

    monkeypatch.setattr(kept, "_on", True)
    sampler = SimpleNamespace(swap=swap, line_up=line_up, go_on=go_on, under_way=None, asleep=False)
    kept.keep("sampler", KEY, sampler)
    yield found
    kept.take("sampler", KEY)
    kept.take("expected", None)
    while kept.go_on():
        pass
    kept.catch_up()


def test_it_is_read_under_whatever_name(beside, done) -> None:
    assert groups.take_ahead(beside)
    assert done == ["took {}", "step"]
    assert kept.look("sampler"), "and the sampler is still there for its stage"


def test_one_that_is_gone_of_another_kind_or_an_adapter_is_left(beside, done) -> None:
    assert not groups.take_ahead(beside / "gone")
    (beside / "config.json").write_text("{ }")
    assert not groups.take_ahead(beside)
    (beside / "config.json").write_text("{}")
    (beside / "adapter_config.json").write_text("{}")
    assert not groups.take_ahead(beside)
    assert done == []
    assert not kept.go_on(), "and nothing begins"


def test_what_is_expected_is_lined_up_when_there_is_time_or_with_the_policy_at_the_latest(beside, done) -> None:
    _, sampler = kept.look("sampler")
    groups.expect(lambda: [Request([1], 1)], GREEDY)
    kept.catch_up()
    assert done == ["lined up 1"]
    sampler.under_way = None  # it was sampled
    groups.expect(lambda: [Request([1], 1), Request([2], 2)], GREEDY)
    assert groups.take_ahead(beside)
    assert done == ["lined up 1", "lined up 2", "took {}", "step"]


def test_what_an_evaluation_has_replaced_is_lined_up_again_and_after_its_policy_no_more(beside, done) -> None:
    _, sampler = kept.look("sampler")
    groups.expect(lambda: [Request([1], 1)], GREEDY)
    kept.catch_up()
    sampler.under_way = None
    assert groups.take_ahead(beside)
    assert done == ["lined up 1", "lined up 1", "took {}", "step"]
    sampler.under_way = None
    beside.with_name("00001").rename(beside)
    assert groups.take_ahead(beside)
    assert done[4:] == ["took {}", "step"]


def test_it_begins_at_once_and_goes_on_by_steps_until_a_stage_asks(beside, done) -> None:
    assert groups.take_ahead(beside)
    assert done == ["took {}", "step"]
    assert kept.go_on()
    assert not kept.go_on(), "the last step says so"
    assert not kept.go_on(), "and nothing is left"
    assert done.count("step") == 3


def test_a_worker_looks_between_two_steps_whether_somebody_asks(monkeypatch) -> None:
    left, asked = [True, True, True, False], []
    monkeypatch.setattr(kept, "go_on", lambda: left.pop(0))

    def select(*arguments: object) -> tuple[list[object], ...]:
        asked.append(len(left))
        return ([arguments[0]] if len(left) == 2 else []), [], []

    monkeypatch.setattr(server.select, "select", select)
    assert server._wait(object())
    assert (asked, left) == ([4, 3, 2], [True, False])


@pytest.mark.parametrize("error", [OSError("half of it"), kept.Unfit("a cache in use")])
def test_an_engine_that_failed_at_it_is_not_used_again(beside, monkeypatch, error) -> None:
    def fail(*_: object) -> bool:
        raise error

    monkeypatch.setattr(groups, "take_ahead", fail)
    assert not server._do_ahead({"policy": str(beside)}, [])
    monkeypatch.setattr(server.select, "select", lambda *_: ([], [], []))
    monkeypatch.setattr(kept, "go_on", fail)
    assert not server._wait(object())


def test_without_a_sampler_nothing_is_taken(beside) -> None:
    assert not groups.take_ahead(beside)


def test_the_cost_of_what_was_done_ahead_is_the_stage_s(monkeypatch) -> None:
    """Its time begins with the work ahead of it, and all that the worker did since the stage before is its own."""
    clock = SimpleNamespace(cpu=10.0)
    monkeypatch.setattr(runtime, "_cpu", lambda: clock.cpu)
    monkeypatch.setattr(runtime.time, "time", lambda: 1000.0)
    for name in ("_began", "_ahead", "_cpu_after"):
        monkeypatch.setattr(runtime, name, None)
    monkeypatch.setattr(runtime, "_cpu_before", 0.0)
    runtime.begin(900.0)
    assert (runtime._began, runtime._cpu_before) == (900.0, 10.0)
    runtime.end()
    clock.cpu = 14.0
    runtime.begin_ahead()
    runtime.begin(1003.0)
    assert (runtime._began, runtime._cpu_before) == (1000.0, 10.0)
    runtime.begin(1007.0)
    assert runtime._began == 1007.0, "and only that one's"


def test_requests_that_name_an_adapter_do_not_outlive_it(tmp_path, monkeypatch) -> None:
    """vLLM takes a request's adapter from the request, whatever the engine has got since."""
    aborted, lined_up = [], []
    engine = SimpleNamespace(abort_request=lambda names, internal: aborted.extend(names), remove_lora=lambda _: None)
    llm = SimpleNamespace(llm_engine=engine, reset_prefix_cache=lambda: True)
    llm.enqueue = lambda *_, lora_request, **__: [lined_up.append(lora_request) or str(len(lined_up))]
    sampler = object.__new__(Sampler)
    held = {"lora": "old", "digest": "old", "under_way": None, "asleep": False}
    vars(sampler).update(llm=llm, settings={}, max_model_len=64, stop_ids=[], **held)
    monkeypatch.setattr(sampler, "_load", lambda *_: setattr(sampler, "lora", "new"))
    whole = SimpleNamespace(check=lambda _: None, digest=str, base_of=lambda folder: folder)
    monkeypatch.setattr("rloo_pipeline.generation.sampler.policy", whole)
    sampler.line_up([Request([1], 1)], GREEDY)
    sampler.swap(tmp_path, 0)
    assert (lined_up, aborted, sampler.under_way) == (["old"], ["1"], None)
    sampler.line_up([Request([1], 1)], GREEDY)
    assert lined_up == ["old", "new"]
