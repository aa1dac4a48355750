"""A model of each kind through rollout, update, LoRA and rollout again: sampler and trainer hold the same model."""

from pathlib import Path
from typing import Any

import forks
import kinds
import pytest

from rloo_pipeline.config import Lora
from rloo_pipeline.rollout.requests import Request, SamplingConfig

pytestmark = pytest.mark.slow

FORMS = {"falcon_h1": "padded"}
"""Kinds, and the form of batch in which they train."""
ADAPTED: set[str] = set()
"""Kinds that a LoRA adapter is trained on as well."""
REQUESTS = [Request([4 + (place * 7) % 12 for place in range(40)], seed) for seed in range(4)]
HOW = SamplingConfig(1.0, 1.0, 0, None, 40)
"""Longer than the windows."""
CLOSE = 1e-3

Rows = list[tuple[list[int], list[float]]]


def rollout(folders: list[Path]) -> list[Rows]:
    """Completions of each policy; the first starts the engine, and the others are swapped in. A swap that is refused
    ends the list.
    """
    from rloo_pipeline.errors import IncompatibleEngine
    from rloo_pipeline.rollout.sampler import EngineSettings, Sampler

    sampler = Sampler(folders[0], EngineSettings("float32", False, 0.5, 1, 1), kinds.CONTEXT, 0)
    rows: list[Rows] = []
    for folder in folders:
        try:
            sampler.swap(folder, kinds.CONTEXT)
        except IncompatibleEngine:
            break
        rows.append([(completion.ids, completion.logps) for completion in sampler.sample(REQUESTS, HOW, "completions")])
    sampler.leave_gpu()
    return rows


def logps_of(folder: Path, rows: Rows) -> tuple[str, float]:
    """The form of batch of the reference pass, and its largest difference from the sampler, nats."""
    from rloo_pipeline.training import forward_only
    from rloo_pipeline.training.logprobs import TokenLogProbs
    from rloo_pipeline.training.packing import Sequences

    module = TokenLogProbs(forward_only.load(folder, "float32", False), 1.0)
    sequences = Sequences([request.prompt_ids for request in REQUESTS], [ids for ids, _ in rows])
    values = forward_only.score(module, sequences, 150, "reference").logps
    largest = max(
        abs(a - b) for (_, ours), theirs in zip(rows, values, strict=True) for a, b in zip(ours, theirs, strict=True)
    )
    return module.form.name, largest


def update(folder: Path, rows: Rows, target: Path, lora: Lora | None) -> float:
    """Makes the completions likelier; returns how much likelier."""
    from rloo_pipeline.training.engine import Engine
    from rloo_pipeline.training.learning_rate import LearningRate
    from rloo_pipeline.training.packing import Sequences
    from rloo_pipeline.training.settings import TrainerSettings

    rate = LearningRate(1e-2, "constant", 0, 0, 0.0)
    settings = TrainerSettings("float32", False, 1.0, rate, (0.9, 0.99), 1e-8, 0.0, 1.0, 0, lora is None, lora)
    engine = Engine(folder, settings, 0)
    sequences = Sequences([request.prompt_ids for request in REQUESTS], [ids for ids, _ in rows])
    before = engine.logps(sequences, 150, lambda _: None)
    for _ in range(2):
        engine.step(sequences, range(4), 150, lambda _, logps, mask, __: -(logps * mask).sum() / 160, lambda _: None)
    after = engine.logps(sequences, 150, lambda _: None)
    engine.save_policy(target)
    engine.close()
    return float((after - before).sum())


def through_everything(kind: str, folder: Path) -> dict[str, Any]:
    """Two policies of a kind and, for some, an adapter."""
    first, second = kinds.build(folder / "1", 1, kind), folder / "2"
    (rows,) = forks.call(rollout, [first])
    gain = forks.call(update, first, rows, second, None)
    again = forks.call(rollout, [first, second])
    swapped = len(again) == 2
    again = again if swapped else [*again, *forks.call(rollout, [second])]
    outcome = {"gain": gain, "same": again[0] == rows, "swapped": swapped}
    pairs = [(first, rows), (second, again[1])]
    if kind in ADAPTED:
        lora = Lora(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj"])
        outcome["gain of an adapter"] = forks.call(update, first, rows, folder / "adapter", lora)
        pairs.append((folder / "adapter", *forks.call(rollout, [folder / "adapter"])))
    return {**outcome, "trainer": [forks.call(logps_of, *pair) for pair in pairs]}


@pytest.mark.parametrize("kind", FORMS)
def test_sampler_and_trainer_are_one_model_before_and_after_an_update(kind, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = through_everything(kind, tmp_path)
    assert outcome["same"], "a new engine samples the same, and so does one that is swapped to its own policy"
    assert outcome["swapped"]
    assert outcome["gain"] > 0
    assert outcome.get("gain of an adapter", 1) > 0
    for form, apart in outcome["trainer"]:
        assert form == FORMS[kind]
        assert apart < CLOSE
