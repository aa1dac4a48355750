"""Facts about tokenizer, generation config and chat template, measured on some prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.checks.evidence import TokenFacts
from rloo_pipeline.config import Config, Dataset
from rloo_pipeline.data.prompting import render
from rloo_pipeline.judging.template_lint import WORD, TemplateLint, header_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER = "an answer"
CHECKED = "the checks of the chat template"


def token_facts(config: Config, policy: Policy, rows: Sequence[dict[str, Any]]) -> TokenFacts:
    """Measures the facts about a policy.

    Args:
        config: the stage's configuration, for the chat template's arguments.
        policy: the policy.
        rows: prompts, with `prompt` and `prompt_ids`.
    """
    tokenizer = policy.tokenizer
    chats = [row for row in rows if not isinstance(row["prompt"], str)]
    opening = [_opening(tokenizer, config.dataset, row["prompt"]) for row in chats]
    bos, pad, eos = tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id
    lint = TemplateLint(config, tokenizer, policy.stop_ids).findings([row["prompt"] for row in rows])
    return TokenFacts(
        prompts=len(rows),
        changed=sum(_round_trip(tokenizer, row["prompt_ids"]) != list(row["prompt_ids"]) for row in rows),
        double_bos=sum(bos is not None and list(row["prompt_ids"][:2]) == [bos, bos] for row in rows),
        chats=len(chats),
        opened=sum(
            str(tokenizer.decode(row["prompt_ids"], clean_up_tokenization_spaces=False)).endswith(text)
            if text
            else not _header(tokenizer, config.dataset, row["prompt"])
            for row, text in zip(chats, opening, strict=True)
        ),
        generation_prompt=opening[0] if opening else "",
        pad=pad if isinstance(pad, int) and _has_pad(tokenizer) else None,
        eos=eos if isinstance(eos, int) else None,
        stops=tuple(policy.stop_ids),
        configured=policy.generation_ends,
        turn_end=_turn_end(tokenizer, config.dataset, chats[0]["prompt"]) if chats else None,
        template=tuple(finding.message for finding in lint if finding.problem),
        ordinary=tuple(str(tokenizer.decode([id_])) for id_ in policy.stop_ids if id_ not in _special(tokenizer)),
    )


def _round_trip(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[int]:
    """Decodes ids and encodes the text again."""
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _opening(tokenizer: PreTrainedTokenizerBase, dataset: Dataset, messages: Any) -> str:
    """The text that the template puts before an answer; may be empty."""
    closed, opened = (render(messages, dataset, tokenizer, CHECKED, value) for value in (False, True))
    return opened[len(closed) :] if opened.startswith(closed) else ""


def _header(tokenizer: PreTrainedTokenizerBase, dataset: Dataset, messages: Any) -> str:
    """The text that the template puts between messages and the answer that follows them; empty in Mistral's."""
    answered = [*messages, {"role": "assistant", "content": WORD}]
    return header_of(*(render(chat, dataset, tokenizer, CHECKED, False) for chat in (answered, messages)))


def _turn_end(tokenizer: PreTrainedTokenizerBase, dataset: Dataset, messages: Any) -> tuple[int, str] | None:
    """The first special token that the template puts after an answer."""
    whole = render([*messages, {"role": "assistant", "content": ANSWER}], dataset, tokenizer, CHECKED, False)
    after = whole.rpartition(ANSWER)[2]
    special = _special(tokenizer)
    ids = tokenizer(after, add_special_tokens=False)["input_ids"] if after else []
    first = next((token for token in ids if token in special), None)
    return None if first is None else (first, str(tokenizer.convert_ids_to_tokens(first)))


def _special(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """All tokens that are special or were added; mistral-common has none that were added."""
    return {*tokenizer.all_special_ids, *getattr(tokenizer, "get_added_vocab", dict)().values()}


def _has_pad(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if a tokenizer came with its own PAD token, rather than EOS from `Policy.tokenizer`."""
    return tokenizer.pad_token_id != tokenizer.eos_token_id or tokenizer.init_kwargs.get("pad_token") is not None
