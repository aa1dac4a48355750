"""The chat templates of models, as TRL ships them: what follows a call is what they write, or they are refused."""

from pathlib import Path

import pytest
import trl

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Dataset
from rloo_pipeline.data.tool_template import ToolTemplate, answer_messages, call_message
from rloo_pipeline.demo.character_model import character_tokenizer
from rloo_pipeline.errors import UserError

FOLDER = Path(trl.__file__).parent / "chat_templates"
ENDS = {
    **{name: ["<|im_end|>"] for name in ("qwen2_5", "qwen3", "qwen3_5_think", "qwen3_instruct_2507")},
    "llama3_1": ["<|eot_id|>", "<|eom_id|>"],
    "glm4moe": ["<|user|>", "<|observation|>", "<|endoftext|>"],
    "gptoss": ["<|call|>", "<|return|>"],
}
"""End tokens of a family, by the name of its template."""
SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string", "description": "what"}}},
    },
}


def template(name: str) -> ToolTemplate:
    ends = ENDS.get(name, ["<|im_end|>"])
    tokenizer = character_tokenizer(4096, ends, "".join(map(chr, range(32, 127))))
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text()
    policy = Policy(FOLDER / name)
    vars(policy).update(tokenizer=tokenizer, stop_ids=tokenizer.convert_tokens_to_ids(ends))
    return ToolTemplate(policy, Dataset.model_construct(chat_template_kwargs={}))


@pytest.mark.parametrize("name", ENDS)
def test_what_follows_a_call_is_what_the_template_writes(name) -> None:
    one = template(name)
    one.check([SCHEMA])
    follows = one.continuation(["calculator"], ["42"])
    for content in ("<think>\nlong thought\n</think>\n\n", "<think>\na\n</think>\n\nI compute."):
        called = call_message([("calculator", {"expression": "6*7"})], content)
        question = [{"role": "user", "content": "What is six times seven?"}]
        whole = one.ids([*question, called, *answer_messages(["calculator"], ["42"])], True)
        assert whole[-len(follows) :] == follows
        assert whole[-len(follows) - 1] in one.stop_ids
    assert "6*7" not in one.tokenizer.decode(follows)
    assert "42" in one.tokenizer.decode(follows)


def test_two_calls_at_a_time_where_the_template_has_them() -> None:
    assert template("qwen3").several_calls
    assert not template("llama3_1").several_calls, "its template raises"


@pytest.mark.parametrize(("name", "reason"), [("phi3", "leaves out the list of tools"), ("gemma3", "failed on")])
def test_a_template_without_tools_is_refused(name, reason) -> None:
    with pytest.raises(UserError, match=reason):
        template(name).check([SCHEMA])
