"""`rollout.generation_kwargs`: stops go with every algorithm, masks with importance weights, and the rest with none."""

import ast
import importlib.util
from pathlib import Path

import pytest
from helpers import mini

from rloo_pipeline.config.generation import REFUSED, STRUCTURES, GenerationKwargs
from rloo_pipeline.config.loading import validate
from rloo_pipeline.errors import UserError

WEIGHTED = {"mismatch": {"correction": "sequence_tis"}}
CHOICE = {"structured_outputs": {"choice": ["4", "5"]}}
MASKS = [{"min_tokens": 2}, {"bad_words": ["x"]}, {"allowed_token_ids": [2, 4]}, CHOICE]
CASES = {
    "an unknown key": ({"stops": ["x"]}, {}, {}, ["unknown key 'rollout.generation_kwargs.stops'", "'stop'"]),
    "a penalty": ({"repetition_penalty": 1.1}, WEIGHTED, {}, ["repetition_penalty", "cannot compute"]),
    "a bias": ({"logit_bias": {4: 1.0}}, WEIGHTED, {}, ["logit_bias", "bad_words or allowed_token_ids"]),
    "a key of the pipeline": ({"temperature": 0.5}, {}, {}, ["temperature", "rollout.temperature"]),
    "a number of completions": ({"n": 4}, {}, {}, ["n is set by the pipeline", "rollout.num_generations"]),
    "beams": ({"use_beam_search": True}, {}, {}, ["unknown key 'rollout.generation_kwargs.use_beam_search'", "stop"]),
    "patterns the wrong way around": (
        {"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}},
        {},
        {},
        ["min_pattern_size (3) exceeds max_pattern_size (2)"],
    ),
    "an empty stop string": ({"stop": ["a", ""]}, {}, {}, ["stop", "empty string"]),
    "two forms": ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, WEIGHTED, {}, ["regex, choice", "one of"]),
    "an unknown form": ({"structured_outputs": {"xml": "a"}}, WEIGHTED, {}, ["xml", "json, regex, choice, grammar"]),
    "more allowed tokens than vLLM takes": (
        {"allowed_token_ids": [*range(1025)]},
        WEIGHTED,
        {},
        ["rollout.generation_kwargs.allowed_token_ids", "1024"],
    ),
    "more tokens than there may be": ({"min_tokens": 49}, WEIGHTED, {}, ["min_tokens (49)", "(48)"]),
    "a mask without weights": (CHOICE, {}, {}, ["structured_outputs", "mismatch.correction: sequence_tis"]),
    "a mask without weights of tokens": (
        {"min_tokens": 2},
        {"importance_sampling_level": "token"},
        {},
        ["min_tokens", "mismatch.correction: token_tis", "old_logps: trainer"],
    ),
    "a mask with weights of 1": (
        {"min_tokens": 2},
        {"mismatch": {"correction": "sequence_mean_mis", "min": 0.9, "max": 1.1}},
        {},
        ["min_tokens", "mismatch.correction"],
    ),
    "a mask as the old policy": ({"bad_words": ["x"]}, {"old_logps": "sampler"}, {}, ["bad_words", "old_logps"]),
    "a mask that steers beta": ({"min_tokens": 2}, WEIGHTED | {"kl": {"target": 3}}, {}, ["min_tokens", "kl.target"]),
    "a mask with weights that are raised": (
        {"min_tokens": 2},
        {"mismatch": {"correction": "sequence_tis", "min": 0.1}},
        {},
        ["min_tokens", "mismatch.min", "biased"],
    ),
    "a mask with weights that are dropped": (
        {"min_tokens": 2},
        {"mismatch": {"correction": "sequence_tis", "reject": {"min": 0.9, "max": 1.1}}},
        {},
        ["min_tokens", "mismatch.reject.min", "biased"],
    ),
    "a mask with the thresholds of a lag": (
        {"min_tokens": 2},
        {"importance_sampling_level": "token"},
        {"lag": 1},
        ["min_tokens", "mismatch.min", "null"],
    ),
    "a mask with a teacher": (
        {"min_tokens": 2},
        {
            "importance_sampling_level": "token",
            "mismatch": {"correction": "token_tis"},
            "teacher": {"name_or_path": "teacher"},
        },
        {},
        ["min_tokens", "algorithm.teacher"],
    ),
    "turns that end elsewhere": (
        {"stop": ["x"]},
        {},
        {"tools": ["rloo_pipeline.environments.tools:calculator"]},
        ["rollout: tools cannot be used with generation_kwargs"],
    ),
}


def config(kwargs, algorithm, rollout=None):
    return validate(mini(rollout={"generation_kwargs": kwargs, **(rollout or {})}, algorithm=algorithm), "test.yaml")


@pytest.mark.parametrize("name", CASES)
def test_what_an_update_could_not_account_for_is_refused(name) -> None:
    kwargs, algorithm, rollout, parts = CASES[name]
    with pytest.raises(UserError) as caught:
        config(kwargs, algorithm, rollout)
    message = str(caught.value)
    assert all(part in message for part in ["test.yaml", *parts]), message
    assert "\n" not in message


def test_a_section_without_a_set_key_goes_with_tools() -> None:
    tools = {"tools": ["rloo_pipeline.environments.tools:calculator"]}
    for kwargs in ({}, {"stop": []}):
        assert config(kwargs, {}, tools).rollout.uses_tools


def test_an_evaluation_has_as_many_tokens_as_a_completion_has_at_least() -> None:
    run = mini(rollout={"generation_kwargs": {"min_tokens": 9}}, algorithm=WEIGHTED)
    assert validate(run | {"evaluation": {"max_completion_length": 9}}, "test.yaml")
    with pytest.raises(UserError, match=r"min_tokens \(9\) exceeds evaluation\.max_completion_length \(8\); lower it"):
        validate(run | {"evaluation": {"max_completion_length": 8}}, "test.yaml")


def test_stops_change_no_distribution_and_go_with_every_algorithm() -> None:
    repetition = {"max_pattern_size": 8, "min_pattern_size": 2, "min_count": 3}
    stops = {"stop": "</answer>", "stop_token_ids": [5], "repetition_detection": repetition}
    for algorithm in ({}, {"old_logps": "sampler"}, {"preset": "grpo"}, {"kl": {"target": 3}}):
        rollout = config(stops, algorithm).rollout
        assert rollout.masked_by is None
        assert rollout.generation_kwargs.for_vllm == {**stops, "stop": ["</answer>"]}


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: next(iter(mask)))
def test_masks_go_with_weights(mask) -> None:
    assert config(mask, WEIGHTED).rollout.masked_by == next(iter(mask))


def test_a_mask_goes_with_a_lag_without_a_lower_threshold() -> None:
    algorithm = {"importance_sampling_level": "token", "mismatch": {"min": None}}
    section = config({"min_tokens": 2}, algorithm, {"lag": 1}).algorithm.mismatch
    assert (section.correction, section.min) == ("token_mis", None)


def test_a_stop_decides_an_evaluation() -> None:
    assert config({"stop": "x"}, {}).params("evaluate") != validate(mini(), "test.yaml").params("evaluate")


OTHER_FORMS = {
    *("json_object", "structural_tag", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
}
"""Parameters of vLLM's structured outputs that are refused: details of a form, and forms for tools."""


def fields_in_vllm() -> dict[str, set[str]]:
    """Public fields of the classes in the installed vLLM's sampling_params.py."""
    package = importlib.util.find_spec("vllm")
    assert package is not None
    assert package.origin is not None
    tree = ast.parse((Path(package.origin).parent / "sampling_params.py").read_text(encoding="utf-8"))
    fields = {}
    for node in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        names = {
            each.target.id
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }
        fields[node.name] = {name for name in names if not name.startswith("_")}
    return fields


def test_what_is_taken_or_refused_are_parameters_of_the_installed_vllm() -> None:
    fields = fields_in_vllm()
    taken = GenerationKwargs.model_fields.keys()
    assert not taken & REFUSED.keys()
    assert taken | REFUSED.keys() < fields["SamplingParams"]
    assert {*STRUCTURES} | OTHER_FORMS == fields["StructuredOutputsParams"]
    detection = GenerationKwargs.model_fields["repetition_detection"].annotation.__args__[0]
    assert detection.model_fields.keys() == fields["RepetitionDetectionParams"]


@pytest.mark.parametrize("key", REFUSED)
def test_a_refused_parameter_is_named_with_what_to_do_instead(key) -> None:
    with pytest.raises(UserError) as caught:
        config({key: 1}, WEIGHTED)
    assert f"{key} {REFUSED[key]}" in str(caught.value)
