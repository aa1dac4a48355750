"""teacher: one shard of rollouts → log-probs of the completions under the teacher of `algorithm.teacher`.

The teacher is a model of its own that never changes; it sees the token ids that the student saw and sampled.
"""

from __future__ import annotations

from pathlib import Path

from rloo_pipeline.artifacts import assets as asset_files
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Config
from rloo_pipeline.stages.reference import write_logps


def teacher(config: Config, assets: Path, rollouts: Path, output: Path) -> None:
    """Writes the teacher's log-probs of a shard, in the order of its rollouts; every rank of a split model calls this.

    Args:
        config: the stage's configuration.
        assets: folder that `stage-assets` wrote.
        rollouts: the shard.
        output: the table.

    Raises:
        UserError: the configuration has no teacher, or a file of it is damaged.
    """
    folder = asset_files.model_of(assets, "teacher")
    write_logps(config.of_teacher, "teacher", Policy(folder, config.model.trust_remote_code), rollouts, output)
