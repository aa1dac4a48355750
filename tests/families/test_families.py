"""Families of models: log-probs and gradients are those of plain transformers, or the model is refused."""

import pytest
import torch
from cases import RIGHT, WRONG, config, write
from transformers import AutoModelForCausalLM

from rloo_pipeline.errors import UserError
from rloo_pipeline.training import model_support, policy_model, self_check
from rloo_pipeline.training.kernels import layers
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
    """Log-probs of each completion, and gradients, in transformers' own layers and SDPA."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    found = []
    longest = max(COMPLETIONS)
    with layers.disabled():
        for place, (prompt, completion) in enumerate(zip(*SEQUENCES, strict=True)):
            logits = model(torch.tensor([prompt + completion]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            logps = (logits / TEMPERATURE).log_softmax(-1).gather(-1, torch.tensor(completion)[:, None]).squeeze(-1)
            padded = torch.nn.functional.pad(logps, (0, longest - len(logps)))[None]
            loss_of([place], padded, padded != 0, None).backward()
            found.append(logps.detach())
    return found, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", RIGHT)
def test_packed_log_probs_and_gradients_are_those_of_each_sequence_alone(kind, tmp_path) -> None:
    wanted, slopes = one_by_one(write(tmp_path, kind, RIGHT[kind]), format_of(kind))
    model = policy_model.load(tmp_path, "float32", False).to(format_of(kind)).train()
    module = TokenLogProbs(model, TEMPERATURE)
    assert module.split is not None, "the vocabulary is gone through in pieces"
    pack = SEQUENCES.pick(range(len(PROMPTS)))
    with torch.no_grad():
        found = module(pack).split(COMPLETIONS)
    assert max(float((one - other).abs().max()) for one, other in zip(found, wanted, strict=True)) < TOLERANCE
    longest = max(COMPLETIONS)

    def padded(places, logps, mask, entropy):
        wider = (0, longest - logps.shape[1])
        pad = torch.nn.functional.pad
        return loss_of(places, pad(logps, wider), pad(mask, wider), None)

    module(pack, padded).backward()
    largest = max(float(slope.norm()) for slope in slopes.values())
    for name, parameter in model.named_parameters():
        apart = float((parameter.grad - slopes[name]).norm())
        assert apart < TOLERANCE * max(float(slopes[name].norm()), 0.1 * largest), name


@pytest.mark.parametrize("kind", WRONG)
def test_what_packing_does_not_cover_is_refused_by_its_configuration(kind) -> None:
    facts = config(kind, WRONG[kind]).to_dict()
    with pytest.raises(UserError, match=f"{kind}.* packed training covers full causal attention only"):
        model_support.check_model(facts, 100)


@pytest.mark.parametrize("kind", WRONG)
def test_and_by_the_self_check_where_its_configuration_told_nothing(kind, monkeypatch, tmp_path) -> None:
    """As of a model that nobody has heard of."""
    monkeypatch.setattr(model_support, "check_model", lambda *_: None)
    monkeypatch.setattr(model_support, "length_limit", lambda _: None)
    monkeypatch.setattr(self_check, "_results", {})
    config(kind, WRONG[kind]).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=kind):
        self_check.load_or_run(tmp_path, False)
