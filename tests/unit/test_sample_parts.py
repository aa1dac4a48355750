"""Completions are handed on in parts while others are sampled: whole groups, in the order of the table, each once."""

import random
from types import SimpleNamespace

import pytest

from rloo_pipeline.generation import completions, groups
from rloo_pipeline.generation.completions import Completion, Decoding, Request
from rloo_pipeline.generation.sampler import Sampler

GREEDY = Decoding(0.0, 1.0, 0, None, 8)
ROWS = [{"prompt_id": f"0-{number}", "prompt_ids": [number]} for number in range(6)]


class Engine:
    """Finishes what it has in any order, some at a time."""

    def __init__(self, count: int, order: int) -> None:
        self.left = [str(100 + place) for place in range(count)]
        self.names = [f"{name}-0a1b" for name in self.left]
        self.chance = random.Random(order)
        self.chance.shuffle(self.left)

    def step(self) -> list[SimpleNamespace]:
        ends = [self.left.pop() for _ in range(min(self.chance.randrange(4), len(self.left)))]
        return [SimpleNamespace(request_id=name, finished=True) for name in ends]

    def get_tokenizer(self) -> None:
        """It has none."""


def sampler(engine: Engine) -> Sampler:
    made = object.__new__(Sampler)
    llm = SimpleNamespace(llm_engine=engine)
    vars(made).update(llm=llm, under_way=None, seconds=0.0)

    def line_up(requests: list[Request], decoding: Decoding) -> completions.UnderWay:
        made.under_way = completions.UnderWay(requests, decoding, [SimpleNamespace()] * len(requests), engine.names)
        return made.under_way

    made.line_up = line_up
    return made


@pytest.mark.parametrize("order", range(5))
@pytest.mark.parametrize("parts", [1, 3, 4, 100])
def test_parts_are_whole_groups_in_order_and_together_all(monkeypatch, order, parts) -> None:
    monkeypatch.setattr(
        completions, "completion_of", lambda _, __, output: Completion([int(output.request_id)], "", [0.0], "stop")
    )
    made = sampler(Engine(24, order))
    found = list(groups.sample_parts(made, ROWS, 4, GREEDY, 7, ("round", 1), parts))
    rows = [row for part in found for row in part]
    assert [row["completion_ids"] for row in rows] == [[100 + place] for place in range(24)]
    assert [(row["prompt_id"], row["sample"]) for row in rows] == [(f"0-{n}", k) for n in range(6) for k in range(4)]
    assert [row["seed"] for row in rows] == [
        request.seed for request in groups.requests_of(ROWS, 4, 7, ("round", 1))
    ], "each under its own request"
    assert all(part and len(part) % 4 == 0 for part in found)
    assert len(found) <= parts
    assert len(found) == 1 or parts > 1
    assert made.under_way is None


def test_the_first_part_is_there_while_others_are_sampled(monkeypatch) -> None:
    monkeypatch.setattr(completions, "completion_of", lambda *_: Completion([1], "", [0.0], "stop"))
    engine = Engine(24, 0)
    engine.left.sort(reverse=True)
    parts = groups.sample_parts(sampler(engine), ROWS, 4, GREEDY, 7, ("round", 1), 3)
    assert len(next(parts)) in (8, 12)
    assert engine.left
    assert sum(map(len, parts)) in (12, 16)
    assert not engine.left
