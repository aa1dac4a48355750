"""Presets of the section `algorithm`: they are consistent, explicit keys win, and each one is documented."""

import csv
import runpy

import pytest
import yaml
from helpers import ROOT, mini

from rloo_pipeline.config import KL, Algorithm, Config
from rloo_pipeline.config.loading import validate
from rloo_pipeline.config.presets import PRESETS
from rloo_pipeline.errors import UserError

SYSTEMS = {"paper", "trl", "openrlhf", "verl", "nemo_rl", "skyrl", "tunix"}
MUST_SPELL_OUT = {
    *("advantage", "normalize_advantages", "beta", "kl", "importance_sampling_level", "clip", "epsilon"),
    *("loss_agg_mode", "old_logps"),
}


def algorithm(**keys) -> Algorithm:
    """The section `algorithm` with only these keys."""
    return Algorithm.model_validate(keys)


def config(**keys) -> Config:
    """The smallest configuration with only these keys of `algorithm`, and only its first reward, which is 0 or 1."""
    reward, *_ = mini()["rewards"]
    return validate({**mini(), "algorithm": keys, "rewards": [reward], "evaluation": {}}, "test.yaml")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_works_with_all_other_defaults(name) -> None:
    for key, value in PRESETS[name].items():
        filled = getattr(algorithm(preset=name), key)
        if isinstance(value, dict):
            filled = {inner: getattr(filled, inner) for inner in value}
        assert filled == value, key
    assert config(preset=name).algorithm == algorithm(preset=name)


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"rloo"}))
def test_a_preset_sets_every_key_that_defines_it(name) -> None:
    assert PRESETS[name].keys() >= MUST_SPELL_OUT
    assert PRESETS[name].keys() <= Algorithm.model_fields.keys() - {"preset", "steps_per_generation"}
    assert PRESETS[name]["kl"].keys() >= {"placement", "estimator"}


@pytest.mark.parametrize("name", [name for name, values in PRESETS.items() if values.get("beta") == 0])
def test_an_explicit_beta_goes_into_the_loss_where_the_preset_has_none(name) -> None:
    section = config(preset=name, beta=0.001).algorithm
    assert (section.kl.placement, section.kl.estimator) == ("loss", "k3")


def test_explicit_keys_win_over_a_preset() -> None:
    section = algorithm(preset="verl", beta=0.5, delta=None, epsilon_high=0.3)
    assert (section.beta, section.delta, section.epsilon_high) == (0.5, None, 0.3)
    assert (section.loss_agg_mode, section.importance_sampling_level) == ("token_mean", "token")


def test_explicit_keys_of_a_nested_section_win_one_by_one() -> None:
    section = algorithm(preset="grpo", kl={"target": 2.0, "estimator": "k2"})
    assert section.kl == KL(placement="loss", estimator="k2", target=2.0)
    section = algorithm(preset="openrlhf", mismatch={"correction": "token_tis", "max": 3.0})
    assert (section.mismatch.correction, section.mismatch.max) == ("token_tis", 3.0)
    assert section.kl.placement == "token_reward"
    section = algorithm(preset="dapo", response_length={"overlong_cache": 9})
    assert section.response_length.overlong_cache == 9, "which is not in the preset"


def test_without_a_preset_nothing_is_filled_in() -> None:
    assert algorithm() == algorithm(preset=None)
    assert algorithm(preset="rloo").model_copy(update={"preset": None}) == algorithm()


def test_the_package_s_own_rloo_is_that_of_trl_but_for_masked_completions() -> None:
    trl = algorithm(preset="trl")
    differs = {key for key, value in algorithm() if value != getattr(trl, key)}
    assert differs == {"preset", "keep_truncated_in_baseline"}


def test_filling_leaves_the_presets_as_they_are() -> None:
    before = yaml.safe_dump(dict(PRESETS["grpo"]))
    algorithm(preset="grpo", beta=1.0, kl={"estimator": "k1"})
    assert yaml.safe_dump(dict(PRESETS["grpo"])) == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("opnrlhf", "test.yaml: algorithm: no preset 'opnrlhf'; did you mean 'openrlhf'?"),
        ("ppo2000", f"test.yaml: algorithm: no preset 'ppo2000'; there are {', '.join(PRESETS)}"),
        (["trl"], "test.yaml: algorithm: no preset '['trl']'; did you mean 'trl'?"),
    ],
)
def test_an_unknown_preset_gives_a_one_line_error_that_helps(name, message) -> None:
    with pytest.raises(UserError) as error:
        config(preset=name)
    assert str(error.value) == message


@pytest.mark.parametrize("name", PRESETS)
def test_a_configuration_that_was_written_out_reads_back_the_same(name) -> None:
    """With the keys that won over the preset."""
    first = config(preset=name, steps_per_generation=4, delta=None, kl={"estimator": "k2"})
    again = validate(yaml.safe_load(yaml.safe_dump(first.model_dump(mode="json"))), "config.yaml")
    assert again == first


PAGE = runpy.run_path(str(ROOT / "tools" / "presets_page.py"))


def test_the_documentation_has_a_row_for_each_preset_and_none_besides() -> None:
    with PAGE["ROWS"].open(newline="") as file:
        groups = {row["preset"]: row["group"] for row in csv.DictReader(file)}
    assert {name for name, group in groups.items() if group == "system"} == SYSTEMS
    assert groups.keys() | {"rloo"} == PRESETS.keys()


def test_the_documentation_gives_the_keys_of_a_preset_as_they_are() -> None:
    assert PAGE["PAGE"].read_text() == PAGE["page"](), "run `make reference`"
    for name, preset in (item for item in PRESETS.items() if item[0] != "rloo"):
        written = yaml.safe_load("\n".join(PAGE["keys"](preset)))
        kl = {key: preset["kl"][key] for key in written.pop("kl", {})}
        assert written == {key: preset[key] for key in written}, name
        assert kl.keys() == ({"placement", "estimator"} if preset["beta"] else set()), name
