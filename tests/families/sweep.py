"""Tries every causal language model of transformers: it is trained correctly, or it is refused."""

from typing import Any, NamedTuple

import cases
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rloo_pipeline.errors import UserError
from rloo_pipeline.training import model_support, plain_model, self_check
from rloo_pipeline.training.batch_forms import FORMS, Packed
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.packing import Sequences
from rloo_pipeline.training.self_check import small

KINDS = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LENGTHS = [(11, 19), (11, 2), (11, 60), (3, 1), (140, 30)]
CLOSE = 1e-3
small.MAX_WEIGHTS = 2**26  # types that stay larger have sizes that most types have


class Outcome(NamedTuple):
    """The result for a model."""

    verdict: str
    """`right`, `refused by config.json`, `refused by the self-check`, `wrong`, `crashed`, or `no configuration` where
    transformers make none without more words.
    """
    why: str = ""
    form: str = ""
    """The form of batch of a model that is right."""
    slow: str = ""
    """Why it is not a faster form."""


def try_out(kind: str) -> Outcome:
    """What becomes of a model of this type: as its configuration is by default and, where that is no model of a kind
    that is right, in sizes that most types have.
    """
    outcomes = list[Outcome]()
    configurations = [CONFIG_MAPPING[kind], lambda: _usual_sizes(kind)]
    if kind in cases.RIGHT:  # whose configuration there has every kind of layer
        configurations.reverse()
    for configure in configurations:
        try:
            config = configure()
            facts = config.to_dict()
        except Exception as error:
            outcomes.append(Outcome("no configuration", repr(error)))
            continue
        outcomes.append(of_configuration(config, facts))
        if outcomes[-1].verdict in {"right", "wrong", "crashed", "refused by config.json"}:
            return outcomes[-1]
    return outcomes[-1] if outcomes[0].verdict == "no configuration" else outcomes[0]


def _usual_sizes(kind: str) -> Any:
    return cases.config(kind, {**cases.EXPERTS, **cases.RIGHT.get(kind, {}), **cases.OTHERS.get(kind, {})})


def of_configuration(config: Any, facts: dict[str, Any]) -> Outcome:
    """What becomes of a model of this configuration; `facts` are what its config.json would hold."""
    try:
        model_support.check_model(facts)
    except UserError as error:
        return Outcome("refused by config.json", str(error))
    except Exception as error:
        return Outcome("crashed", repr(error))
    try:
        checked = self_check.run(config, trust_remote_code=False)
    except UserError as error:
        return Outcome("refused by the self-check", str(error))
    except Exception as error:
        return Outcome("crashed", repr(error))
    return _beyond(config, FORMS[checked.form])._replace(form=checked.form, slow=checked.why)


def _beyond(config: Any, form: Packed) -> Outcome:
    """Of a model that was taken: whether it is right too where windows are as short as they can be, by other weights,
    and other sequences than the self-check's; transformers attend eagerly there too.
    """
    for shrink in small.Shrink:
        copy = small.shrink(config, shrink)
        try:
            return _of_copy(copy, form)
        except UserError as error:
            return Outcome("right", f"as far as its rotary embedding goes: {error}")
        except Exception:
            if shrink is small.Shrink.LAYERS:
                raise
    raise AssertionError


def _of_copy(copy: Any, form: Packed) -> Outcome:
    plain = small.build(copy, False, "eager").eval()
    torch.manual_seed(7)
    cases.spread(plain)
    draw = torch.Generator().manual_seed(2)
    vocabulary = copy.get_text_config().vocab_size

    def ids(count: int) -> list[int]:
        return torch.randint(3, vocabulary, (count,), generator=draw).tolist()

    shared = ids(11)
    sequences = Sequences([shared if a == 11 else ids(a) for a, _ in LENGTHS], [ids(b) for _, b in LENGTHS])
    ours = small.build(copy, False, form.attention)
    ours.load_state_dict(plain.state_dict())
    plain_model.remove_dropout(ours)
    largest = _apart(plain, ours.train(), form, sequences)
    if largest >= CLOSE:  # rounding vanishes where there are more digits, and a mistake does not
        largest = _apart(plain.double(), ours.double(), form, sequences)
    return Outcome("right" if largest < CLOSE else "wrong", f"{largest:.1e} nats")


@torch.no_grad()
def _apart(plain: Any, ours: Any, form: Packed, sequences: Sequences) -> float:
    """Largest difference between the log-probs of a form of batch and those of each sequence alone, nats."""
    module = TokenLogProbs(ours, 0.9)
    module.form = form
    logps_by_row = [torch.zeros(0)] * len(LENGTHS)
    for rows in form.micro_batches(sequences, range(len(LENGTHS)), 10**9):
        pack = sequences.pick(rows)
        for row, logps in zip(rows, module(pack).logps.split(pack.completion_lengths.tolist()), strict=True):
            logps_by_row[row] = logps
    expected = torch.cat([_alone(plain, *pair) for pair in zip(*sequences[:2], strict=True)])
    return float((torch.cat(logps_by_row) - expected).abs().max())


def _alone(plain: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    logits = plain(torch.tensor([prompt + completion]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    logps = (logits / 0.9).log_softmax(-1)
    return logps.gather(-1, torch.tensor(completion)[:, None]).squeeze(-1)
