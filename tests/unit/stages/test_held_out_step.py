"""The optimizer steps at which held-out accuracy lies in TensorBoard."""

import pytest

from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.errors import UserError
from rloo_pipeline.stages.held_out import _step


def test_the_step_is_that_of_the_policy_that_was_measured(tmp_path) -> None:
    metrics = tmp_path / "metrics.json"
    write_json(metrics, {"round": 3, "step": 24})
    assert _step(0, None) == 0
    assert _step(3, metrics) == 24
    with pytest.raises(UserError, match=r"metrics\.json: .*round"):
        _step(2, metrics)
    with pytest.raises(UserError, match=r"--policy-metrics: policy 3 was measured; name metrics\.json of round 3"):
        _step(3, None)
