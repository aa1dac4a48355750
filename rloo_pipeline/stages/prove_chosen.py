"""prove-chosen: completions of a chosen policy on the test rows → proof.json, if that policy sampled them.

It compares the sampler's log-probs with the trainer's, as the stage `distance` does for evaluations on `dataset.dev`,
but for some completions only and without policy 0.
"""

from pathlib import Path

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.artifacts.policy import Policy, chosen_of
from rloo_pipeline.config import Config
from rloo_pipeline.runtime import ranks
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.seeds import derive, permutation
from rloo_pipeline.training import forward_only, round_data, sampler_proof
from rloo_pipeline.training.sampler_proof import MOST


def prove_chosen(config: Config, selection: Path, seed: int, completions: Path, output: Path) -> None:
    """Writes the difference of the log-probs, in nats a token.

    Args:
        config: the stage's configuration, that of the chosen run.
        selection: file that `select` wrote.
        seed: seed of the chosen run.
        completions: table that `evaluate-chosen` wrote.
        output: proof.json.

    Raises:
        UserError: the log-probs show that another policy sampled the completions.
    """
    chosen = chosen_of(selection, seed)
    table = tables.read(completions, "completions", policy=chosen.digest)
    order = permutation(len(table), derive(config.seed, "proof", "test"))
    table = table.take(sorted(order[:MOST]))
    policy = Policy(chosen.policy, config.model.trust_remote_code)
    sequences = round_data.sequences_of(table, chosen.run / "prompts", policy)
    temperature = config.evaluation.temperature or 1.0
    logps = forward_only.logps_of_completions(config, policy, temperature, sequences, "proof")
    checks = chosen.run / "warmstart" / "checks.json"
    found = sampler_proof.require_evaluation(config, policy, table, logps, completions, checks)
    if ranks.current().first:
        write_json(output, {"policy": chosen.digest, sampler_proof.KEY: found.mean, "tokens": found.tokens})
    say(f"{chosen.policy} sampled the test completions: {found.mean:.2g} nats a token from the trainer's log-probs")
