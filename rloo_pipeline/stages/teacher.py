"""teacher: one shard of rollouts → log-probs of the completions under the teacher of `algorithm.teacher`.

A teacher is a separate model that never changes; it sees the token ids that the student saw and sampled. With several
(`algorithm.teacher.models`), each scores the completions whose prompts name it, one teacher at a time.
"""

from pathlib import Path

from rloo_pipeline.artifacts import assets as asset_files
from rloo_pipeline.artifacts import round_tables
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.config import Config, distillation
from rloo_pipeline.errors import UserError
from rloo_pipeline.stages.reference import Scorer, write_logps


def teacher(config: Config, assets: Path, rollouts: Path, output: Path, prompts: Path | None = None) -> None:
    """Writes the teacher's log-probs of a shard, in the order of its rollouts, and with `algorithm.teacher.top_k` its
    likeliest tokens; every rank of a split model must call this.

    Args:
        config: the stage's configuration.
        assets: folder that `stage-assets` wrote.
        rollouts: table of the shard's rollouts.
        output: the table of log-probs.
        prompts: folder that the stage `prompts` wrote, in a run with several teachers.

    Raises:
        UserError: the configuration has no teacher, a file of a teacher is damaged, a prompt names an unknown teacher,
            or a teacher has fewer tokens than `top_k`.
    """
    if not config.teachers:
        raise UserError("algorithm.teacher: not set, so there is no teacher; set it")
    folders = {name: asset_files.model_of(assets, distillation.asset_of(name)) for name in config.teachers}
    rows = {"": None} if "" in folders else _rows_by_teacher(config, rollouts, prompts)
    scorers = [
        Scorer(of_teacher, Policy(folders[name], config.model.trust_remote_code), rows.get(name, []))
        for name, of_teacher in config.teachers.items()
    ]
    top_k = config.algorithm.teacher_top_k
    for scorer in scorers:
        distillation.require_vocabulary(top_k, scorer.policy.vocabulary, str(scorer.policy))
    write_logps("teacher", scorers, rollouts, output, top_k=top_k)


def _rows_by_teacher(config: Config, rollouts: Path, prompts: Path | None) -> dict[str, list[int]]:
    """The rows of a shard that each teacher scores."""
    if prompts is None:
        raise UserError("--prompts: missing, but the prompts name each row's teacher; name their folder")
    prompt_ids = round_tables.read_rollouts(rollouts)["prompt_id"].to_pylist()
    row_of = PromptSet(prompts / "train").by_id(list(dict.fromkeys(prompt_ids)))
    names = [row_of[prompt_id].get(distillation.COLUMN) for prompt_id in prompt_ids]
    distillation.require_teachers(config.algorithm.teacher, names, str(prompts))
    return {name: [row for row, own in enumerate(names) if own == name] for name in config.teachers}
