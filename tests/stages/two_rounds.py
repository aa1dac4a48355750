"""Two rounds of a model of each kind: rollout, reference, update; rollout, reference, a LoRA adapter, rollout with it.

`make kinds` does it for all kinds and writes their table in docs/generated/kinds.md.
"""

from pathlib import Path
from typing import Any, NamedTuple

import forks
import model_folders
import one_model
from one_model import Distance, Rollout, Rows

from rloo_pipeline.config import Dtype, Lora
from rloo_pipeline.rollout.requests import Request, SamplingConfig

HOW = SamplingConfig(1.0, 1.0, 0, None, 40)
"""Longer than the windows."""
REQUESTS = [Request([4 + (place * 7) % 12 for place in range(40)], seed, HOW) for seed in range(4)]
ATTENTION = ("q_proj", "v_proj", "o_proj")


class Kind(NamedTuple):
    """Properties of a kind of model."""

    name: str
    form: str = "packed"
    """Form of batch in training."""
    dtype: Dtype = "float32"
    warm: bool = True
    """Whether the engine takes other weights; otherwise it refuses them and says so."""
    lora: tuple[str, ...] = ATTENTION
    """Modules of the adapter; empty where vLLM serves none."""
    rate: float = 1e-3
    """Learning rate of the update of all weights."""


KINDS = {
    "mistral": Kind("window"),
    "gemma2": Kind("windows, soft caps"),
    "gpt_oss": Kind("windows, sinks, experts", warm=False),
    "qwen3_moe": Kind("experts"),
    "deepseek_v3": Kind("latent attention, experts", lora=("o_proj",), rate=3e-5),
    "falcon_h1": Kind("Mamba 2 beside attention", form="padded"),
    "granitemoehybrid": Kind("Mamba 2 or attention, experts", form="padded"),
    "qwen3_next": Kind("DeltaNet or attention, experts", form="padded", dtype="bfloat16"),
    "stablelm": Kind("attention that cannot be packed", form="padded", lora=()),
}
"""By type of model in transformers; the configurations are in tests/model_folders.py."""


def of(kind: str) -> Kind:
    """The properties of a kind on this machine: on a GPU vLLM has no LoRA and no latent attention in float32, and every
    engine takes other weights.
    """
    return KINDS[kind]._replace(dtype="bfloat16", warm=True) if forks.HAS_GPU else KINDS[kind]


class Outcome(NamedTuple):
    """The results of the two rounds."""

    gains: list[float]
    """How much likelier each update makes its completions, nats: of all weights, then of the adapter."""
    same: bool
    """Whether a new engine samples what another engine of the same policy did."""
    warm: bool
    refusal: str
    """Message of a refused swap, or an empty string."""
    distances: list[Distance]
    """Of policy 0, of policy 1, and of the adapter."""
    rounding: float
    """What the number format alone changes in the trainer's log-probs of policy 0, mean, nats; 0 for float32."""
    greedy: float
    """Share of the tokens of an evaluation without randomness that plain transformers too take for the likeliest."""


def sequences(_: Path, rows: Rows) -> Any:
    """Completions of the requests, for the trainer."""
    from rloo_pipeline.training.packing import Sequences

    return Sequences([request.prompt_ids for request in REQUESTS], [ids for ids, _ in rows])


def compared(pairs: list[tuple[Path, Rows]], greedy: Rows, dtype: Dtype) -> tuple[list[Distance], float, float]:
    """Distances of the policies, what the number format changes, and the share of the greedy tokens of the second one
    that are the likeliest in plain transformers.
    """
    distances = [one_model.distance(folder, sequences, rows, dtype) for folder, rows in pairs]
    rounding = one_model.rounding(*pairs[0], sequences, dtype) if dtype != "float32" else 0.0
    return distances, rounding, likeliest(pairs[1][0], greedy[0][0], dtype)


def likeliest(folder: Path, ids: list[int], dtype: Dtype) -> float:
    """The share of the tokens after the prompt that plain transformers would take without randomness."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    prompt = REQUESTS[0].prompt_ids
    with torch.no_grad():
        best = model(torch.tensor([prompt + ids]), use_cache=False).logits[0, len(prompt) - 1 : -1].argmax(-1)
    return float((best == torch.tensor(ids)).float().mean())


def run(kind: str, folder: Path) -> Outcome:
    """Two rounds of a model of a kind; files are written to `folder`."""
    facts = of(kind)
    sampled = Rollout(REQUESTS, model_folders.CONTEXT, facts.dtype)
    without_randomness = HOW._replace(temperature=0.0)
    greedy = sampled._replace(requests=[request._replace(sampling=without_randomness) for request in REQUESTS])
    zero, one, adapter = model_folders.build(folder / "0", 1, kind), folder / "1", folder / "adapter"
    ((rows,), _) = forks.call(one_model.rollout, [(zero, sampled)])
    changes = {"dtype": facts.dtype, "rate": facts.rate, "gradient_checkpointing": True}
    gains = [forks.call(one_model.update, zero, sequences, rows, one, changes)]
    again, refusal = forks.call(one_model.rollout, [(zero, sampled), (one, sampled), (one, greedy)])
    warm = len(again) > 1
    rows_of_one, evaluated = again[1:] if warm else forks.call(one_model.rollout, [(one, sampled), (one, greedy)])[0]
    pairs = [(zero, rows), (one, rows_of_one)]
    if facts.lora:
        lora = {"dtype": facts.dtype, "rate": 1e-2, "lora": Lora(r=4, lora_alpha=8, target_modules=list(facts.lora))}
        gains.append(forks.call(one_model.update, one, sequences, rows_of_one, adapter, lora))
        pairs.append((adapter, forks.call(one_model.rollout, [(adapter, sampled)])[0][0]))
    return Outcome(gains, again[0] == rows, warm, refusal, *forks.call(compared, pairs, evaluated, facts.dtype))
