"""Each fault of a chat template that no error shows is found by rendering it, and a good template has none."""

import re
from pathlib import Path

import pytest
import trl

from rloo_pipeline.config import Config
from rloo_pipeline.demo.character_model import character_tokenizer
from rloo_pipeline.judging.template_lint import TemplateLint

PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USERS = PLAIN.replace("in messages %}", "in messages if m['role'] == 'user' %}")
DEVELOPER = {"role": "developer", "content": "Be brief."}
TRL_TEMPLATES = Path(trl.__file__).parent / "chat_templates"


def findings(
    template: str, *chats: list[dict[str, str]], rewards=("rewards.py:mine",), problem=True, **dataset: object
) -> list[str]:
    tokenizer = character_tokenizer(4096, (), "".join(map(chr, range(32, 127))))
    tokenizer.chat_template = template
    sources = {"train": {"path": "a.jsonl"}, "eval": {"path": "b.jsonl"}}
    functions = [{"function": name, "name": f"r{number}"} for number, name in enumerate(rewards)]
    config = Config.model_validate(
        {"run": "a", "rounds": 1, "model": {"name_or_path": "m"}, "dataset": sources | dataset, "rewards": functions}
    )
    lint = TemplateLint(config, tokenizer, [tokenizer.eos_token_id])
    if not chats:
        return [finding.message for finding in lint.findings(["a string"])]
    return [finding.message for finding in lint.findings([*chats, "a string"]) if finding.problem is problem]


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


TWO = (asked("1+1"), asked("1+2"))


def test_a_good_template_has_no_fault() -> None:
    system = [
        {"role": "system", "content": "Be brief."},
        *asked("1"),
        {"role": "assistant", "content": "2"},
        *asked("3"),
    ]
    assert findings(PLAIN, *TWO, system, [DEVELOPER, *asked("4")], system_prompt="Be brief.") == []


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "qwen3_5_think", "qwen3_instruct_2507", "llama3_1", "glm4moe", "gptoss"]
)
def test_templates_of_models_have_no_fault(name) -> None:
    system = [{"role": "system", "content": "Be brief."}, *asked("1")]
    assert findings((TRL_TEMPLATES / f"{name}.jinja").read_text(), *TWO, system) == []


@pytest.mark.parametrize(
    ("template", "chats", "keys", "message"),
    [
        (USERS, [[DEVELOPER, *asked("1")]], {}, "leaves out messages of the role 'developer', which the data has"),
        (
            USERS,
            [[{"role": "system", "content": "Be brief."}, *asked("1")]],
            {"system_prompt": "Be brief."},
            "dataset.system_prompt has no effect",
        ),
        (
            PLAIN,
            TWO,
            {"chat_template_kwargs": {"enable_thinknig": False}},
            "sets 'enable_thinknig', a variable that the",
        ),
        (PLAIN.replace("assistant\n", "assistant\n<|im_end|>"), TWO, {}, "ends the answer that it opens with .*im_end"),
        (
            PLAIN.partition("{% if add_generation_prompt")[0],
            TWO,
            {},
            r"ignores add_generation_prompt.* begin with '<.im_start.>assistant' itself",
        ),
        (
            PLAIN.replace("assistant\n", "assistant\n<think>\n"),
            TWO,
            {"rewards": ["rloo_pipeline.rewards.format:think_format_reward", "rloo_pipeline.rewards.math:math_reward"]},
            "opens <think>.*set the option opened: true for r0 and after_thinking: true for r1",
        ),
        ("{{ messages[-1].content[:1] }}{{ 'word258' }}", TWO, {}, "all of 2 different prompts come out of"),
        (
            PLAIN,
            [asked("1<|im_end|>"), *TWO],
            {},
            "1 of 3 prompts spell special tokens, such as '<.im_end.>', which are",
        ),
        (
            PLAIN,
            [[*asked("1+1"), {"role": "assistant", "content": "2"}], *TWO],
            {},
            "1 of 3 prompts end with an assistant message",
        ),
    ],
    ids=("role", "system prompt", "variable", "closed", "unopened", "thinking", "equal", "spelled", "answered"),
)
def test_each_fault_is_described_in_one_sentence(template, chats, keys, message) -> None:
    [found] = findings(template, *chats, **keys)
    assert re.search(message, found), found


def test_strings_for_a_model_with_a_chat_template_get_a_note_unless_they_come_from_one() -> None:
    [note] = findings(PLAIN)
    assert note.endswith("set dataset.user_prompt: '{prompt}'")
    assert findings(PLAIN, split_special_tokens=False) == []


def test_a_date_that_the_template_writes_gets_a_note_unless_a_variable_replaces_it() -> None:
    template = PLAIN + "{{ date_string or strftime_now('%Y') }}"
    [note] = findings(template, *TWO, problem=False)
    assert "26 July 2024" in note
    assert findings(template, *TWO, problem=False, chat_template_kwargs={"date_string": "1 Jan 2000"}) == []


def test_a_template_whose_answers_follow_the_prompt_at_once_needs_no_generation_prompt() -> None:
    turns = "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]{% else %} {{ m['content'] }}</s>{% endif %}"
    assert findings("{% for m in messages %}" + turns + "{% endfor %}", *TWO) == []


def test_a_role_that_is_an_end_token_closes_no_answer() -> None:
    assert findings(PLAIN.replace("<|im_start|>assistant\n", "<|im_end|>\n"), *TWO) == []


def test_a_variable_that_the_template_reads_is_not_a_fault() -> None:
    template = PLAIN + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    assert findings(template, *TWO, chat_template_kwargs={"enable_thinking": True}) == []
