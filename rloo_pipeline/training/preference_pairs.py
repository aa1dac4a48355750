"""Preferences as token ids for the trainer: a chosen and a rejected conversation, which share their beginning.

The reward of a conversation is read at its last token. A pack leaves out the last token of a completion, which predicts
nothing, and has one value for each predicted token. So each conversation gets one extra token, which its last token
predicts and which is the only one that counts as sampled.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.data.preferences import Preference, common
from rloo_pipeline.data.prompting import check_embedded
from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards.model import ids_of, shown
from rloo_pipeline.runtime.progress import say, track
from rloo_pipeline.seeds import derive, permutation
from rloo_pipeline.training.packing import Sequences


class Pairs(NamedTuple):
    """Pairs of conversations."""

    sequences: Sequences
    """The chosen conversation of pair i in row 2i, the rejected one in row 2i + 1."""
    margins: list[float]
    keys: list[str]
    """One per pair, equal for pairs with the same prompt."""
    lengths: list[int]
    """Tokens of each conversation, by row."""


def tokenized(pairs: Sequence[Preference], model: Policy, max_length: int, label: str) -> Pairs:
    """Tokenizes pairs as `rewards.model` does when it scores; drops those with a conversation over the limit.

    Args:
        pairs: preferences.
        model: the model whose tokenizer is used.
        max_length: maximum number of tokens of a conversation.
        label: name of the pairs, for messages.

    Raises:
        UserError: a conversation cannot be tokenized, a pair has equal tokens, or no pair is within the limit.
    """
    tokenizer, pad = model.tokenizer, pad_of(model)
    prompts, completions, margins, keys, lengths = list[list[int]](), list[list[int]](), [], [], list[int]()
    for pair in track(pairs, f"tokenizing {label}", len(pairs)):
        chosen, rejected = (_ids(pair, completion, model) for completion in (pair.chosen, pair.rejected))
        for ids in (chosen, rejected):
            check_embedded(ids, tokenizer, pair.where)
            while ids and ids[-1] == pad:  # transformers reads the reward before trailing padding
                ids.pop()
        if not chosen or not rejected or chosen == rejected:
            why = "are equal as the model reads them" if chosen == rejected else "do not both have tokens"
            raise UserError(f"{pair.where}: chosen and rejected {why}; drop the row")
        if max(len(chosen), len(rejected)) > max_length:
            continue
        split = max(1, common(chosen, rejected))
        for ids in (chosen, rejected):
            prompts.append(ids[:split])
            completions.append([*ids[split:], ids[-1]])
            lengths.append(len(ids))
        margins.append(pair.margin)
        keys.append(pair.key)
    dropped = len(pairs) - len(margins)
    if dropped:
        say(f"{label}: dropped {dropped} of {len(pairs)} pairs, which exceed reward_model.max_length ({max_length})")
    if not margins:
        raise UserError(
            f"{label}: none of {len(pairs)} pairs is within reward_model.max_length ({max_length} tokens); raise it"
        )
    masks = [[False] * (len(completion) - 1) + [True] for completion in completions]
    return Pairs(Sequences(prompts, completions, masks), margins, keys, lengths)


def _ids(pair: Preference, completion: Any, model: Policy) -> list[int]:
    """Token ids of one of a pair's conversations."""
    try:
        return ids_of(model.tokenizer, shown(pair.prompt, completion, False), str(model), {})
    except UserError as error:
        raise UserError(f"{pair.where}: {error}") from error


def pad_of(model: Policy) -> int | None:
    """The padding token of a model, as `rewards.model` finds it."""
    pad: int | None = model.transformers_config.get_text_config().pad_token_id
    return model.tokenizer.pad_token_id if pad is None else pad


def split_held_out(
    pairs: Sequence[Preference], held_out: Sequence[Preference] | None, seed: int, path: str
) -> tuple[list[Preference], list[Preference]]:
    """Splits pairs into some to train on and held-out ones, which have no prompt in common.

    Args:
        pairs: preferences from `reward_model.train`.
        held_out: preferences from `reward_model.eval`; None holds out the pairs of a tenth of the prompts.
        seed: seed of the random choice.
        path: file of `pairs`, for messages.

    Raises:
        UserError: nothing is left to train on, or to hold out.
    """
    if held_out is None:
        if any(isinstance(pair.chosen, str) and not pair.prompt for pair in pairs):
            raise UserError(
                f"{path}: rows are strings without a column prompt, so nothing says where their answers begin, and "
                "held-out pairs could have prompts of trained ones; add the column, use messages, or set "
                "reward_model.eval"
            )
        keys = list(dict.fromkeys(pair.key for pair in pairs))
        drawn = {keys[place] for place in permutation(len(keys), derive(seed, "held out"))[: len(keys) // 10]}
        held_out = [pair for pair in pairs if pair.key in drawn]
        if not held_out:
            raise UserError(
                f"{path}: {len(keys)} prompts are too few to hold a tenth of them out; add rows, or set "
                "reward_model.eval"
            )
    apart = {pair.key for pair in held_out}
    kept = [pair for pair in pairs if pair.key not in apart]
    if not kept:
        raise UserError(f"{path}: all pairs have prompts of reward_model.eval, so none is left to train on; add others")
    return kept, list(held_out)
