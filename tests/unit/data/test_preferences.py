"""Every form of TRL's preference data becomes the conversations that the reward function would score."""

import pytest

from rloo_pipeline.data.preferences import preferences
from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards.model import shown


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED, RIGHT, WRONG = say("user", "2+2"), say("assistant", "4"), say("assistant", "5")
FORMS = {
    "explicit messages": ({"prompt": [ASKED], "chosen": [RIGHT], "rejected": [WRONG]}, [ASKED]),
    "implicit messages": ({"chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]}, [ASKED]),
    "messages after a text": ({"prompt": "2+2", "chosen": [RIGHT], "rejected": [WRONG]}, [ASKED]),
    "texts after messages": ({"prompt": [ASKED], "chosen": "4", "rejected": "5"}, [ASKED]),
    "explicit texts": ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "2+2="),
    "implicit texts": ({"chosen": "2+2=4", "rejected": "2+2=5"}, "2+2="),
}


@pytest.mark.parametrize("form", FORMS)
def test_both_completions_follow_the_prompt(form) -> None:
    row, prompt = FORMS[form]
    [pair] = preferences([row], "pairs.jsonl", None)
    chosen, rejected = (shown(pair.prompt, one, False) for one in (pair.chosen, pair.rejected))
    assert (chosen, rejected) == (("2+2=4", "2+2=5") if isinstance(prompt, str) else ([ASKED, RIGHT], [ASKED, WRONG]))
    assert pair.margin == 0.0


def test_pairs_with_the_same_prompt_have_the_same_key() -> None:
    for form in ("explicit messages", "implicit messages", "explicit texts", "implicit texts"):
        row = FORMS[form][0]
        turned = row | {"chosen": row["rejected"], "rejected": row["chosen"], "margin": 1}
        one, other = preferences([row, turned], "pairs.jsonl", None)
        assert one.key == other.key
        assert other.margin == 1.0
    assert (
        len({next(preferences([FORMS[form][0]], "pairs.jsonl", None)).key for form in FORMS if "messages" in form}) == 1
    )


def test_the_system_prompt_of_the_run_stands_before_messages_without_one() -> None:
    told = say("system", "Add.")
    for form in ("explicit messages", "implicit messages", "messages after a text", "texts after messages"):
        [pair] = preferences([FORMS[form][0]], "pairs.jsonl", "Add.")
        assert shown(pair.prompt, pair.chosen, False) == [told, ASKED, RIGHT]
    [pair] = preferences([{"chosen": [told, ASKED, RIGHT], "rejected": [told, ASKED, WRONG]}], "pairs.jsonl", "No.")
    assert shown(pair.prompt, pair.chosen, False) == [told, ASKED, RIGHT]


REFUSED = {
    "pairs.jsonl: no column 'rejected'": {"chosen": "a"},
    "row 0: chosen and rejected are equal": {"chosen": "a", "rejected": "a"},
    "row 0: one of chosen and rejected is a string": {"chosen": "a", "rejected": [WRONG]},
    "row 0: column 'chosen' holds None": {"chosen": None, "rejected": "a"},
    "row 0: column 'rejected' holds ": {"chosen": [RIGHT], "rejected": [ASKED]},
    "row 0: column 'prompt' holds 3": {"prompt": 3, "chosen": "a", "rejected": "b"},
    "row 0: column 'margin' holds 'much'": {"chosen": "a", "rejected": "b", "margin": "much"},
    "row 0: dataset.system_prompt needs messages": {"chosen": "a", "rejected": "b"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_row_that_is_not_a_preference_is_refused_by_file_and_row(message) -> None:
    with pytest.raises(UserError, match=message):
        list(preferences([REFUSED[message]], "pairs.jsonl", "Be brief." if "system" in message else None))
