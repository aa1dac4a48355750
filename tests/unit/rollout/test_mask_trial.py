"""Completions are drawn under the masks of `rollout.generation_kwargs`; masks that leave no token are refused."""

from typing import Any

import pytest

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config.generation import GenerationKwargs
from rloo_pipeline.demo.character_model import END
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout import mask_trial
from rloo_pipeline.rollout.requests import SamplingConfig

SUM = {"regex": r"[0-9]+\+[0-9]+"}


def check(model, **keys: Any) -> None:
    sampling = SamplingConfig(1.0, 1.0, 0, None, 16, GenerationKwargs.model_validate(keys).for_vllm)
    mask_trial.check(Policy(model), sampling)


@pytest.mark.parametrize(
    "keys",
    [
        {"stop": ["5"]},
        {"min_tokens": 16},
        {"bad_words": ["12", "5"]},
        {"structured_outputs": SUM},
        {"structured_outputs": {"choice": ["1", "1+2"]}, "min_tokens": 9},
        {"structured_outputs": SUM, "bad_words": ["5"]},
        {"structured_outputs": {"grammar": 'root ::= "1" ("+" [0-9])*'}},
        {"structured_outputs": {"json": {"type": "integer"}}},
    ],
)
def test_masks_that_leave_a_token_everywhere_are_taken(keys, tiny_model) -> None:
    check(tiny_model, **keys)


def test_masks_that_leave_no_token_somewhere_are_refused(tiny_model) -> None:
    ids = Policy(tiny_model).tokenizer.convert_tokens_to_ids
    refused: list[tuple[str, dict[str, Any]]] = [
        ("4-", {"structured_outputs": {"choice": ["4-x"]}}),
        ("", {"structured_outputs": SUM, "allowed_token_ids": [ids("+"), ids(END)]}),
        ("1", {"structured_outputs": {"choice": ["1+2"]}, "bad_words": ["1+"]}),
        ("1", {"structured_outputs": {"choice": ["1+2"]}, "stop_token_ids": [ids("+")]}),
        ("", {"structured_outputs": {"grammar": "root ::= root"}}),
        ("", {"allowed_token_ids": [ids(END)], "min_tokens": 1}),
        ("", {"allowed_token_ids": [ids("5")], "bad_words": ["5"]}),
    ]
    for text, keys in refused:
        with pytest.raises(UserError, match=f"^rollout.generation_kwargs: no token may follow '{text}': masks leave"):
            check(tiny_model, **keys)
