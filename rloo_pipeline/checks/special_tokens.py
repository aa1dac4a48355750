"""Checks that tokenizer, generation config and chat template agree on the ends of prompts and completions."""

from rloo_pipeline.checks.evidence import TokenFacts
from rloo_pipeline.checks.registry import CheckResult, check


@check(bad="below", warn=1)
def round_trip(tokens: TokenFacts) -> CheckResult:
    """Share of prompts whose ids stay the same when decoded and encoded again."""
    share = 1 - tokens.changed / tokens.prompts
    return CheckResult(
        share,
        f"{share:.1%} of {tokens.prompts} prompts",
        "Prompts keep their ids when decoded and encoded again.",
        "Decoding and encoding changes the ids of some prompts; rewards may see a different text than the model.",
    )


@check(bad="above", fail=0)
def double_bos(tokens: TokenFacts) -> CheckResult:
    """Number of prompts that begin with two BOS tokens."""
    return CheckResult(
        float(tokens.double_bos),
        f"{tokens.double_bos} of {tokens.prompts} prompts",
        "No prompt begins with two BOS tokens.",
        "Template and tokenizer both put a BOS before the prompt; remove it from the chat template.",
    )


@check(bad="below", warn=1)
def generation_prompt(tokens: TokenFacts) -> CheckResult | None:
    """Share of chats whose ids end with the text that the template puts before an answer."""
    if not tokens.chats:
        return None
    share = tokens.opened / tokens.chats
    return CheckResult(
        share,
        f"{share:.1%} of {tokens.chats} chats, {tokens.generation_prompt!r}",
        "Each chat ends where the assistant's answer begins.",
        "The chat template ignores add_generation_prompt, so the model must open its own turn; correct the template.",
    )


@check(bad="above", warn=0)
def stop_ids(tokens: TokenFacts) -> CheckResult:
    """Number of disagreements between tokenizer, generation config and template on how a completion ends."""
    conflicts = [f"generation_config.json ends at {text!r}, which is ordinary text" for text in tokens.ordinary]
    if tokens.configured is not None and tokens.eos is not None and tokens.eos not in tokens.configured:
        conflicts.append(f"generation_config.json ends at {list(tokens.configured)}, the tokenizer at {tokens.eos}")
    if tokens.turn_end is not None and tokens.turn_end[0] not in tokens.stops:
        conflicts.append(f"the template ends an answer with {tokens.turn_end[1]!r}, where the sampler does not stop")
    return CheckResult(
        float(len(conflicts)),
        f"stops at {list(tokens.stops)}" + (f", template at {tokens.turn_end[0]}" if tokens.turn_end else ""),
        "Tokenizer, generation config and template agree on how an answer ends.",
        f"Name one end token in tokenizer_config.json and generation_config.json: {'; '.join(conflicts)}.",
    )


@check(bad="above", warn=0)
def pad_token(tokens: TokenFacts) -> CheckResult:
    """1 if PAD is also an end token or EOS is used as PAD: safe here, because masks come from lengths, not from ids."""
    pad, eos = tokens.pad, tokens.eos
    state = "The tokenizer has no PAD token, and EOS is used for it" if pad is None else "PAD is also an end token"
    return CheckResult(
        float(pad is None or pad in tokens.stops),
        f"no pad, so eos {eos} is used for it" if pad is None else f"pad {pad}, eos {eos}",
        "Padding is not an end token.",
        f"{state}: safe here, because nothing is padded, so the end token stays in the loss and counts as an end; give "
        "the tokenizer its own PAD token for other tools.",
    )


@check(bad="above", warn=0)
def chat_template(tokens: TokenFacts) -> CheckResult | None:
    """Number of silent faults of the chat template, such as a role of the data that it leaves out."""
    faults = tokens.template
    if not tokens.chats:
        return None
    return CheckResult(
        float(len(faults)),
        f"{len(faults)} {'fault' if len(faults) == 1 else 'faults'}",
        "The chat template shows all messages of the data and reads its variables.",
        f"Look at the chat template: {'; '.join(faults)}.",
    )
