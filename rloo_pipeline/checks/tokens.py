"""Tokenizer, generation config and chat template agree on where a prompt and a completion begin and end."""

from __future__ import annotations

from rloo_pipeline.checks.evidence import Evidence
from rloo_pipeline.checks.registry import Measure, check


@check("round_trip", bad="below")
def round_trip(seen: Evidence) -> Measure:
    """Share of the prompts whose ids stay the same as text and back."""
    facts = seen.tokens
    share = 1 - facts.changed / facts.prompts
    return Measure(
        share,
        f"{share:.1%} of {facts.prompts} prompts",
        "Prompts are the same as ids, as text, and as ids again.",
        "The tokenizer does not give back what it was given; rewards may see another text than the model.",
    )


@check("double_bos", bad="above")
def double_bos(seen: Evidence) -> Measure:
    """Prompts that begin with two BOS tokens."""
    return Measure(
        float(seen.tokens.double_bos),
        f"{seen.tokens.double_bos} of {seen.tokens.prompts} prompts",
        "No prompt begins with two BOS tokens.",
        "Template and tokenizer both put a BOS before the prompt; take it out of the chat template.",
    )


@check("generation_prompt", bad="below")
def generation_prompt(seen: Evidence) -> Measure | None:
    """Share of the chats whose ids end in what the template puts before an answer."""
    facts = seen.tokens
    if not facts.chats:
        return None
    share = facts.opened / facts.chats
    return Measure(
        share,
        f"{share:.1%} of {facts.chats} chats, {facts.generation_prompt!r}",
        "Each chat ends where the assistant's answer begins.",
        "The chat template ignores add_generation_prompt, so the model must open its own turn; mend the template.",
    )


@check("stop_ids", bad="above")
def stop_ids(seen: Evidence) -> Measure:
    """How many of the three disagree on how a completion ends."""
    facts, said = seen.tokens, list[str]()
    if facts.configured is not None and facts.eos is not None and facts.eos not in facts.configured:
        said.append(f"generation_config.json ends at {list(facts.configured)}, the tokenizer at {facts.eos}")
    if facts.turn_end is not None and facts.turn_end[0] not in facts.stops:
        said.append(f"the template ends an answer with {facts.turn_end[1]!r}, where the sampler does not stop")
    return Measure(
        float(len(said)),
        f"stops at {list(facts.stops)}" + (f", template at {facts.turn_end[0]}" if facts.turn_end else ""),
        "Tokenizer, generation config and template agree on how an answer ends.",
        f"Name one end token in tokenizer_config.json and generation_config.json: {'; '.join(said)}.",
    )


@check("pad_token", bad="above")
def pad_token(seen: Evidence) -> Measure:
    """1 where PAD is an end token too, or EOS stands for it: safe here, since masks come from lengths and not from
    ids.
    """
    pad, eos = seen.tokens.pad, seen.tokens.eos
    what = "The tokenizer has no PAD token, and EOS stands for it" if pad is None else "PAD is also an end token"
    return Measure(
        float(pad is None or pad in seen.tokens.stops),
        f"no pad, so eos {eos} stands for it" if pad is None else f"pad {pad}, eos {eos}",
        "Padding is not an end token.",
        f"{what}: safe here, where nothing is padded, so the end token stays in the loss and counts as an end; give "
        "the tokenizer a PAD of its own for other tools.",
    )
