"""Keys of environments that do not fit each other are a sentence, and those that change no episode rerun no stage."""

import pytest
from helpers import mini
from pydantic import ValidationError

from rloo_pipeline.config import Config
from rloo_pipeline.rollout import resets
from rloo_pipeline.user_code.confinement import Confinement

CALCULATOR, PYTHON = (f"rloo_pipeline.environments.tools:{name}" for name in ("calculator", "python"))


def config_of(**keys) -> Config:
    return Config(**mini(rollout={"tools": [CALCULATOR], **keys}))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"environment_sandbox": True, "tools": []}, "environment_sandbox has no effect without tools; set"),
        ({"environment_image": "a.sif", "tools": []}, "environment_image has no effect without tools"),
        (
            {"environment_python": "python", "environment_sandbox": True},
            "environment_python: python cannot be used with environment_sandbox",
        ),
        ({"environment_gpus": 1, "tools": []}, "environment_gpus has no effect without tools"),
        (
            {"environment_sandbox": True, "environment_gpus": 1},
            "environment_gpus: 1 cannot be used with environment_sandbox",
        ),
        ({"environment_sandbox": True, "tools": [PYTHON]}, "python runs each program in a sandbox of its own, which"),
        (
            {"environment_sandbox": True, "environment": {"game": "openenv:http://node:8000"}},
            "environment_sandbox: the sandbox has no network, which episodes need to reach OpenEnv's server; leave out",
        ),
        (
            {"environment_read_only": ["words"]},
            "environment_read_only has no effect without a sandbox or an image; set",
        ),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys, message) -> None:
    with pytest.raises(ValidationError, match=message):
        config_of(**keys)


def test_what_an_environment_may_see_decides_and_how_many_gpus_it_has_does_not() -> None:
    before, gpus, confined = config_of(), config_of(environment_gpus=1), config_of(environment_sandbox=True)
    for stage in ("prompts", "rollout", "evaluate"):
        assert before.params(stage) == gpus.params(stage)
        assert before.params(stage) != confined.params(stage)


def test_the_processes_run_where_the_configuration_says(monkeypatch) -> None:
    confinements: list[Confinement] = []
    monkeypatch.setattr(resets, "EnvironmentPool", lambda *keys: confinements.append(keys[-1]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    resets.pool_of(config_of().rollout)
    resets.pool_of(config_of(environment_image="a.sif", environment_gpus=1, environment_read_only=["b"]).rollout)
    resets.pool_of(config_of(environment_sandbox=True, environment_memory_mb=300).rollout)
    resets.pool_of(config_of(environment_python="env/bin/python").rollout)
    assert confinements == [
        Confinement(),
        Confinement(image="a.sif", read_only=("b",), gpus=("4",)),
        Confinement(sandbox=True, memory_mb=300),
        Confinement(python="env/bin/python"),
    ]
