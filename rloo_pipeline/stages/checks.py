"""checks: policy 0 is tried on probe prompts before any update is paid for → checks.json (checks.failed.json).

Stops the run where RLOO could learn nothing: it learns only from groups whose rewards differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rloo_pipeline import tables
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.files import write_json
from rloo_pipeline.generation import groups
from rloo_pipeline.insight import completions as seen
from rloo_pipeline.insight.statistics import pass_at_ks
from rloo_pipeline.progress import say
from rloo_pipeline.prompt_set import PromptSet
from rloo_pipeline.seeds import derive, permutation
from rloo_pipeline.stages.score import score_table
from rloo_pipeline.training import policy

Check = dict[str, Any]


def checks(config: Config, prompts: Path, policy_folder: Path, output: Path) -> None:
    """Tries the policy and writes what came out.

    Raises:
        UserError: no probe prompt has two completions of different reward, so there is nothing to learn from.
    """
    train = PromptSet(prompts / "train")
    probes = permutation(len(train), derive(config.seed, "probes"))[: config.checks.probe_prompts]
    samples = config.checks.probe_num_generations or config.rollout.num_generations
    sampler = groups.load_sampler(policy_folder, config, train.longest, config.rollout.max_completion_length)
    decoding = groups.decoding_of(config.rollout)
    made = groups.sample_groups(sampler, train.rows(probes), samples, decoding, config.seed, ("probe",))
    rolled = pa.Table.from_pylist(made, schema=tables.ROLLOUTS)
    scored = score_table(config, rolled, train, policy_folder)
    tokenizer = policy.load_tokenizer(policy_folder, config.model.trust_remote_code)
    found = [
        _tokens(tokenizer.pad_token_id, tokenizer.eos_token_id, sampler.stop_ids),
        *_probe_checks(config, rolled, scored, samples),
    ]
    for check in found:
        say(f"{check['verdict']:4}  {check['name']}: {check['value']}  {check['advice']}".rstrip())
    failed = [check for check in found if check["verdict"] == "fail"]
    place = output.with_suffix(".failed.json") if failed else output
    about = {"policy": policy.digest(policy_folder), "prompts": len(probes), "num_generations": samples}
    write_json(place, {**about, "checks": found})
    if failed:
        advice = failed[0]["advice"]
        raise UserError(f"{policy_folder}: the warm start does not pass its checks ({place}): {advice}")


def _tokens(pad: int | None, eos: int | list[int] | None, stops: list[int]) -> Check:
    """Pad and end tokens; equal ones are safe here, since masks come from lengths and not from ids, but not in other
    tools.
    """
    verdict, advice = (
        ("pass", "") if pad not in stops else ("warn", "PAD is also an end token; give the tokenizer a PAD of its own")
    )
    return {"name": "tokens", "value": f"pad {pad}, eos {eos}, stop {stops}", "verdict": verdict, "advice": advice}


def _probe_checks(config: Config, rolled: pa.Table, scored: pa.Table, samples: int) -> list[Check]:
    """What real generation on the probe prompts shows."""
    rewards = seen.grid(scored["reward"], samples)
    passes = pass_at_ks(seen.right(scored, config.rewards, config.correct, samples))
    known = rewards[~np.isnan(rewards)]
    spread = np.nanmax(rewards, axis=1, initial=-np.inf) > np.nanmin(rewards, axis=1, initial=np.inf)
    truncated = float(np.mean([reason != "stop" for reason in rolled["finish_reason"].to_pylist()]))
    best = max(passes)

    def check(name: str, value: float | None, verdict: str = "pass", advice: str = "") -> Check:
        return {"name": name, "value": value, "verdict": verdict, "advice": advice}

    return [
        check("mean reward", float(known.mean()) if len(known) else None),
        check("pass@1", float(passes[1].mean())),
        check(f"pass@{best}", float(passes[best].mean())),
        check(
            "truncated completions",
            truncated,
            *(("warn", "raise rollout.max_completion_length") if truncated > 0.5 else ()),
        ),
        check("groups without reward variance", float(1 - spread.mean()), *_lesson(known, spread)),
    ]


def _lesson(known: Any, spread: Any) -> tuple[str, ...]:
    """Whether there is something to learn from."""
    if spread.any():
        share = float(spread.mean())
        return (
            ()
            if share >= 0.2
            else ("warn", f"only {share:.0%} of groups teach; try more num_generations or easier prompts")
        )
    if not len(known):
        return ("fail", "no reward function could score any completion of any probe prompt; check the rewards' columns")
    return (
        "fail",
        f"all {len(known)} scored completions of all probe prompts got the same reward ({known[0]:g}), so RLOO could "
        "learn nothing; train on demonstrations first (warmstart.sft), ease the prompts or the rewards, or raise "
        "rollout.temperature",
    )
