"""Families of models: log-probs and gradients are those of plain transformers, or the model is refused."""

import pytest
import torch
from cases import OFTEN, PACKED, RIGHT, config, write
from transformers import AutoModelForCausalLM

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.errors import UserError
from rloo_pipeline.training import model_support, policy_model, self_check
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.packing import Sequences

DRAW = torch.Generator().manual_seed(3)
PROMPTS = [7, 7, 7, 40, 1]
COMPLETIONS = [20, 3, 150, 25, 2]
TEMPERATURE = 0.8
EXACT, EXPERTS = torch.float64, torch.float32
"""Number formats of the comparison. The kernel of experts takes no float64."""
TOLERANCE = 1e-5


def ids(count: int) -> list[int]:
    return torch.randint(3, 97, (count,), generator=DRAW).tolist()


SHARED = ids(7)
SEQUENCES = Sequences(
    [SHARED if length == 7 else ids(length) for length in PROMPTS], [ids(length) for length in COMPLETIONS]
)


def loss_of(places, logps, mask, entropy):
    """Of log-probs, of which no two count alike."""
    weights = torch.stack([torch.linspace(-1, 2, mask.shape[1]).add(place).sin() for place in places])
    return (logps * mask * weights).sum()


def format_of(kind: str) -> torch.dtype:
    return EXPERTS if hasattr(config(kind, RIGHT[kind]), "num_experts_per_tok") else EXACT


def one_by_one(folder, dtype: torch.dtype) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probs of each completion, and gradients, in transformers' own layers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    all_logps = []
    longest = max(COMPLETIONS)
    for place, (prompt, completion) in enumerate(zip(*SEQUENCES[:2], strict=True)):
        logits = model(torch.tensor([prompt + completion]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        logps = (logits / TEMPERATURE).log_softmax(-1).gather(-1, torch.tensor(completion)[:, None]).squeeze(-1)
        padded = torch.nn.functional.pad(logps, (0, longest - len(logps)))[None]
        loss_of([place], padded, padded != 0, None).backward()
        all_logps.append(logps.detach())
    return all_logps, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "kind", [kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.long) for kind in RIGHT]
)
def test_log_probs_and_gradients_are_those_of_each_sequence_alone(kind, tmp_path) -> None:
    expected, slopes = one_by_one(write(tmp_path, kind, RIGHT[kind]), format_of(kind))
    model = policy_model.load(Policy(tmp_path), "float32").to(format_of(kind)).train()
    module = TokenLogProbs(model, TEMPERATURE)
    assert module.form.name == ("packed" if kind in PACKED else "padded"), model.self_check.why
    longest, pad = max(COMPLETIONS), torch.nn.functional.pad
    for rows in module.form.micro_batches(SEQUENCES, range(len(PROMPTS)), 400):
        pack = SEQUENCES.pick(rows)
        with torch.no_grad():
            actual = module(pack).logps.split(pack.completion_lengths.tolist())
        assert (
            max(float((logps - expected[row]).abs().max()) for row, logps in zip(rows, actual, strict=True)) < TOLERANCE
        )

        def padded(places, logps, mask, entropy, rows=rows):
            wider = (0, longest - logps.shape[1])
            return loss_of([rows[place] for place in places], pad(logps, wider), pad(mask, wider), None)

        module(pack, padded).backward()
    largest = max(float(slope.norm()) for slope in slopes.values())
    for name, parameter in model.named_parameters():
        difference = float((parameter.grad - slopes[name]).norm())
        assert difference < TOLERANCE * max(float(slopes[name].norm()), 0.1 * largest), name


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_an_encoder_is_refused_by_its_configuration_and_by_the_self_check(kind, tmp_path, monkeypatch) -> None:
    facts = config(kind, {})
    with pytest.raises(UserError, match=f"{kind} is an encoder"):
        model_support.check_model(facts.to_dict(), 100)
    monkeypatch.setattr(model_support, "check_model", lambda *_, **__: None)
    monkeypatch.setattr(self_check, "_results", {})
    facts.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"{kind}: it does not attend causally"):
        self_check.load_or_run(Policy(tmp_path))
