"""Keys of earlier versions: what to write instead, and how configurations of finished runs that have them are read."""

from collections.abc import Mapping

from rloo_pipeline.config.section import JSON

REMOVED: Mapping[str, str] = {
    "checks.probe_num_generations": "policy 0 answers rollout.num_generations times; leave the key out",
    "evaluation.bootstrap_samples": "intervals always take 10,000 resamples; leave the key out",
    "evaluation.breakdown": "completions.parquet has all scores to break accuracy down by; leave the key out",
    "judge.timeout_value": "write the number at on_timeout, in place of `value`",
    "report.note": "leave the key out",
    "report.task_column": "the page has the mean of each reward, so give each task its own; leave the key out",
    "rewards.timeout_value": "write the number at on_timeout, in place of `value`",
    "select.then": "the choice is always evaluated on dataset.eval; leave the key out",
    "warmstart.train": "SFT runs if warmstart.sft is set; leave out this key, and warmstart.sft to train none",
}
"""Key without list indices → what to do instead, in the words that end the error message."""


def forget(raw: JSON) -> None:
    """Removes these keys from the configuration of a finished run so that it can be read. `timeout_value` moves to
    `on_timeout`.
    """
    for path in REMOVED:
        section, _, key = path.partition(".")
        holders = raw.get(section) or []
        for holder in holders if isinstance(holders, list) else [holders]:
            value = holder.pop(key, None)
            if key == "timeout_value" and value is not None:
                holder["on_timeout"] = value
