"""Every causal language model that transformers know: taken and right, or refused."""

from typing import Any, NamedTuple

import torch
from cases import spread
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rloo_pipeline.errors import UserError
from rloo_pipeline.training import dropout, model_support, self_check
from rloo_pipeline.training.kernels import attention, layers
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.packing import Sequences
from rloo_pipeline.training.self_check import small

KINDS = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LENGTHS = [(11, 19), (11, 2), (11, 60), (3, 1), (140, 30)]
CLOSE = 1e-3


class Outcome(NamedTuple):
    """What became of a model."""

    verdict: str
    """`right`, `refused by config.json`, `refused by the self-check`, `wrong`, `crashed`, or `no configuration` where
    transformers make none without more words.
    """
    why: str = ""


def try_out(kind: str) -> Outcome:
    """What becomes of a model of this type, as its configuration is by default."""
    try:
        config = CONFIG_MAPPING[kind]()
        facts = config.to_dict()
    except Exception as error:
        return Outcome("no configuration", str(error))
    try:
        model_support.check_model(facts)
    except UserError as error:
        return Outcome("refused by config.json", str(error))
    except Exception as error:
        return Outcome("crashed", repr(error))
    try:
        self_check.run(config, trust_remote_code=False)
    except UserError as error:
        return Outcome("refused by the self-check", str(error))
    except Exception as error:
        return Outcome("crashed", repr(error))
    return _beyond(config)


def _beyond(config: Any) -> Outcome:
    """Of a model that was taken: whether it is right too where windows are as short as they can be, by other weights,
    and other sequences than the self-check's; transformers attend eagerly there too.
    """
    for narrow in (True, False):
        copy = small.shrink(config, narrow, window=True)
        try:
            return _of_copy(copy)
        except UserError as error:
            return Outcome("right", f"as far as its window goes: {error}")
        except Exception:
            if not narrow:
                raise
    raise AssertionError


def _of_copy(copy: Any) -> Outcome:
    plain = small.build(copy, False, "eager").eval()
    torch.manual_seed(7)
    spread(plain)
    ours = small.build(copy, False, attention.NAME)
    ours.load_state_dict(plain.state_dict())
    dropout.remove(ours)
    draw = torch.Generator().manual_seed(2)
    vocabulary = copy.get_text_config().vocab_size

    def ids(count: int) -> list[int]:
        return torch.randint(3, vocabulary, (count,), generator=draw).tolist()

    shared = ids(11)
    sequences = Sequences([shared if a == 11 else ids(a) for a, _ in LENGTHS], [ids(b) for _, b in LENGTHS])
    with torch.no_grad():
        found = TokenLogProbs(ours.train(), 0.9)(sequences.pick(range(len(LENGTHS))))
        wanted = torch.cat([_alone(plain, *pair) for pair in zip(*sequences, strict=True)])
    largest = float((found - wanted).abs().max())
    return Outcome("right" if largest < CLOSE else "wrong", f"{largest:.1e} nats")


def _alone(plain: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    with layers.disabled():
        logits = plain(torch.tensor([prompt + completion]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits.float() / 0.9).log_softmax(-1).gather(-1, torch.tensor(completion)[:, None]).squeeze(-1)
