"""Finds silent faults of a chat template by rendering prompts with and without a message, variable or text.

`rloo check` and the checks of policy 0 run it on some prompts of the data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline.config import Config
from rloo_pipeline.data.prompting import DATE, guard, render
from rloo_pipeline.errors import UserError
from rloo_pipeline.user_code.completion_text import THINK_START

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORD = "word258"
"""Placeholder for the text of a message."""
RENDERED = 64
"""Maximum number of prompts that are compared with each other."""
OPTIONS = {"think_format_reward": "opened", "shows_work": "opened", "math_reward": "after_thinking"}
"""Option that each reward function needs if the template opens the thinking."""


def header_of(answered: str, prompt: str) -> str:
    """The text that a template puts between a prompt and the answer WORD, without white space around it."""
    return answered.removeprefix(prompt).partition(WORD)[0].strip() if answered.startswith(prompt) else ""


class TemplateFinding(NamedTuple):
    """One sentence about a chat template."""

    message: str
    problem: bool = True
    """True if the user should change something."""


class TemplateLint:
    """Renders prompts of one configuration in its model's chat template."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> None:
        """`ends` are the tokens at which the sampler stops."""
        self.config, self.tokenizer, self.ends = config, tokenizer, ends

    def findings(self, prompts: Sequence[Any]) -> Iterator[TemplateFinding]:
        """Yields the faults of the template.

        Args:
            prompts: prompts of the data, as messages or strings.
        """
        chats = [prompt for prompt in prompts if not isinstance(prompt, str)]
        if not chats:
            dataset = self.config.dataset
            if prompts and self.tokenizer.chat_template and dataset.split_special_tokens is None:
                advice = f"if it needs that, set dataset.user_prompt: '{{{dataset.prompt_column}}}'"
                message = f"prompts are strings, so the model reads them without its chat template; {advice}"
                yield TemplateFinding(message, problem=False)
            return
        dropped = [*self._dropped_roles(chats)]
        yield from dropped
        yield from self._unread_variables(chats[0])
        yield from self._generation_prompt(chats[0])
        variables = self.config.dataset.chat_template_kwargs | {"strftime_now": lambda _: WORD}
        if WORD in (self._render(chats[0], variables) or ""):
            date = f"{DATE:%d %B %Y}, in every run"
            yield TemplateFinding(f"the chat template writes the date; here it is {date}", problem=False)
        if not dropped:
            yield from self._equal(chats[:RENDERED])
        yield from self._spelled(chats)
        if answered := sum(chat[-1]["role"] == "assistant" for chat in chats):
            yield TemplateFinding(
                f"{answered} of {len(chats)} prompts end with an assistant message, which the model reads before "
                "it answers; if it is the solution, drop it from the prompt"
            )

    def _dropped_roles(self, chats: Sequence[Any]) -> Iterator[TemplateFinding]:
        """Finds roles whose text the template leaves out."""
        places: dict[str, tuple[Any, int]] = {}
        for chat in chats:
            for place, message in enumerate(chat):
                places.setdefault(str(message["role"]), (chat, place))
        for role, (chat, place) in places.items():
            content = chat[place].get("content")
            word: Any = WORD if isinstance(content, str) else [{"type": "text", "text": WORD}]
            text = self._render([*chat[:place], {**chat[place], "content": word}, *chat[place + 1 :]])
            if content and text is not None and WORD not in text:
                own = role == "system" and self.config.dataset.system_prompt is not None
                yield TemplateFinding(
                    "dataset.system_prompt has no effect, since the chat template leaves out system messages; write "
                    "its text in dataset.user_prompt, or correct the template"
                    if own
                    else f"the chat template leaves out messages of the role '{role}', which the data has; rename the "
                    "role, or correct the template"
                )

    def _unread_variables(self, chat: Any) -> Iterator[TemplateFinding]:
        """Finds variables that the template neither mentions nor depends on."""
        variables = self.config.dataset.chat_template_kwargs
        source = json.dumps(self.tokenizer.chat_template)
        for name in variables:
            without = {key: value for key, value in variables.items() if key != name}
            if not re.search(rf"\b{re.escape(name)}\b", source) and self._render(chat) == self._render(chat, without):
                yield TemplateFinding(
                    f"dataset.chat_template_kwargs sets '{name}', a variable that the chat template does not read; "
                    "correct its name, or leave it out"
                )

    def _generation_prompt(self, chat: Any) -> Iterator[TemplateFinding]:
        """Checks whether the generation prompt ends the answer that it opens, or opens the thinking."""
        closed, opened = self._render(chat, answer=False) or "", self._render(chat) or ""
        opening = opened.removeprefix(closed).rstrip() if opened.startswith(closed) else opened.rstrip()
        ids = self.tokenizer(opening, add_special_tokens=False)["input_ids"] if opening else []
        if len(ids) > 1 and ids[-1] in self.ends:  # a lone role token may end turns too (Phi-3)
            token = self.tokenizer.convert_ids_to_tokens(ids[-1])
            yield TemplateFinding(
                f"the generation prompt {opening!r:.80} ends the answer that it opens with the end token {token!r}; "
                "correct the chat template"
            )
        if opening.endswith(THINK_START):
            yield from self._opened_thinking()
        answered = self._render([*chat, {"role": "assistant", "content": WORD}], answer=False) or ""
        if not opening and (header := header_of(answered, closed)):
            yield TemplateFinding(
                f"the chat template ignores add_generation_prompt, so a completion would have to begin with "
                f"{header!r:.80} itself; correct the template"
            )

    def _opened_thinking(self) -> Iterator[TemplateFinding]:
        """Names the reward options to set if completions begin inside the thinking."""
        begin = f"the generation prompt opens {THINK_START}, so completions begin inside it"
        asked = [
            f"{option}: true for {reward.column}"
            for reward in self.config.rewards
            if (option := OPTIONS.get(reward.function.rpartition(":")[2])) and not reward.options.get(option)
        ]
        if asked:
            yield TemplateFinding(f"{begin}; set the option {' and '.join(asked)}")
        else:
            yield TemplateFinding(f"{begin}, but rewards do not see the tag", problem=False)

    def _equal(self, chats: Sequence[Any]) -> Iterator[TemplateFinding]:
        """Checks whether different prompts are rendered as the same text."""
        different = {json.dumps(chat, default=str) for chat in chats}
        if len(different) > 1 and len({self._render(chat) for chat in chats}) == 1:
            yield TemplateFinding(
                f"all of {len(different)} different prompts come out of the chat template as the same text; correct "
                "the template"
            )

    def _spelled(self, chats: Sequence[Any]) -> Iterator[TemplateFinding]:
        """Finds prompts whose text spells special tokens."""
        texts = guard(self.config.dataset, self.tokenizer)
        spelled = [token for token in map(texts.spelled, chats) if token is not None]
        if spelled:
            split = self.config.dataset.split_special_tokens is not False
            yield TemplateFinding(
                f"{len(spelled)} of {len(chats)} prompts spell special tokens, such as {spelled[0]!r}, which "
                + (
                    "are encoded as plain text; if they are meant, set dataset.split_special_tokens: false"
                    if split
                    else "act as such, since dataset.split_special_tokens is false"
                ),
                problem=split or any(texts.special[token] in self.ends for token in spelled),
            )

    def _render(self, messages: Any, variables: dict[str, Any] | None = None, answer: bool = True) -> str | None:
        """The text of messages; None if the template refuses them."""
        dataset = self.config.dataset
        if variables is not None:
            dataset = dataset.model_copy(update={"chat_template_kwargs": variables})
        try:
            return render(messages, dataset, self.tokenizer, "a prompt", answer)
        except UserError:
            return None
