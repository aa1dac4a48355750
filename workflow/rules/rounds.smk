# Round r samples from policy r-1 and trains policy r. The number of rounds is no parameter of a round, so a run can be
# extended without running finished rounds again.


rule rollout:
    input:
        prompts=f"{RUN}/prompts",
        policy=policy_before,
        base=base_policy,
        gate=gate_before,
    output:
        f"{RUN}/rounds/{{round}}/rollouts/{{shard}}.parquet",
    log:
        f"{RUN}/logs/rollout/{{round}}-{{shard}}.log",
    benchmark:
        f"{RUN}/benchmarks/rollout/{{round}}-{{shard}}.tsv"
    threads: CONFIG.vllm.threads
    resources:
        mem_mb=growing(8000),
        runtime=growing(120),
    params:
        decides=DECIDES["rollout"],
        source=SOURCE["rollout"],
    shell:
        "rloo rollout --prompts {input.prompts} --policy {input.policy} --round {wildcards.round}"
        " --shard {wildcards.shard} --output {output} --log={log}"


# One reward function that needs a GPU, for one shard.
rule score_alone:
    input:
        prompts=f"{RUN}/prompts",
        policy=f"{RUN}/policies/00000",  # for its tokenizer
        rollouts=f"{RUN}/rounds/{{round}}/rollouts/{{shard}}.parquet",
    output:
        f"{RUN}/rounds/{{round}}/scores/parts/{{reward}}/{{shard}}.parquet",
    log:
        f"{RUN}/logs/score/{{round}}-{{shard}}-{{reward}}.log",
    benchmark:
        f"{RUN}/benchmarks/score/{{round}}-{{shard}}-{{reward}}.tsv"
    wildcard_constraints:
        reward=one_of(map(re.escape, ALONE)),
    threads: lambda wildcards: ALONE[wildcards.reward].threads
    resources:
        gres=lambda wildcards: f"gpu:{ALONE[wildcards.reward].gpus}",
        mem_mb=growing(16000),
        runtime=growing(60),
    params:
        decides=lambda wildcards: DECIDES_ALONE[wildcards.reward],
        source=lambda wildcards: SOURCE_ALONE[wildcards.reward],
    shell:
        "rloo score --only {wildcards.reward} --prompts {input.prompts} --policy {input.policy}"
        " --rollouts {input.rollouts} --output {output} --log={log}"


rule score:
    input:
        prompts=f"{RUN}/prompts",
        policy=f"{RUN}/policies/00000",  # for its tokenizer
        rollouts=f"{RUN}/rounds/{{round}}/rollouts/{{shard}}.parquet",
        parts=scored_alone,
    output:
        f"{RUN}/rounds/{{round}}/scores/{{shard}}.parquet",
    log:
        f"{RUN}/logs/score/{{round}}-{{shard}}.log",
    benchmark:
        f"{RUN}/benchmarks/score/{{round}}-{{shard}}.tsv"
    threads: scoring_threads()
    resources:
        mem_mb=growing(3000 + 1000 * CONFIG.scoring.workers),
        runtime=growing(60),
    params:
        decides=DECIDES["score"],
        source=SOURCE["score"],
    shell:
        "rloo score --prompts {input.prompts} --policy {input.policy} --rollouts {input.rollouts}"
        " --parts {input.parts} --output {output} --log={log}"


rule reference:
    input:
        policy=f"{RUN}/policies/00000",
        rollouts=f"{RUN}/rounds/{{round}}/rollouts/{{shard}}.parquet",
    output:
        f"{RUN}/rounds/{{round}}/reference/{{shard}}.parquet",
    log:
        f"{RUN}/logs/reference/{{round}}-{{shard}}.log",
    benchmark:
        f"{RUN}/benchmarks/reference/{{round}}-{{shard}}.tsv"
    threads: CONFIG.deepspeed.threads
    resources:
        mem_mb=growing(8000),
        runtime=growing(120),
    params:
        decides=DECIDES["reference"],
        source=SOURCE["reference"],
    shell:
        "rloo reference --policy {input.policy} --rollouts {input.rollouts} --output {output} --log={log}"


# Three rules differ only in what they keep: `update` keeps the policy, `update_transient` keeps neither, and `update_last`
# keeps the trainer state too, so that a longer run can continue. Snakemake takes temp() by rule, not by file.
rule update:
    input:
        policy=policy_before,
        base=base_policy,
        trainer=trainer_before,
        rollouts=shards_of("rollouts"),
        scores=shards_of("scores"),
        reference=reference_shards,
        gate=gate,
    output:
        policy=directory(f"{RUN}/policies/{{round}}"),
        trainer=temp(directory(f"{RUN}/trainer/{{round}}")),
        metrics=f"{RUN}/rounds/{{round}}/metrics.json",
        events=f"{RUN}/tensorboard/{{round}}.tfevents",
        table=f"{RUN}/rounds/{{round}}/train.parquet",
    log:
        f"{RUN}/logs/update/{{round}}.log",
    benchmark:
        f"{RUN}/benchmarks/update/{{round}}.tsv"
    wildcard_constraints:
        round=one_of(KEPT),
    container:
        SPREAD_IMAGE
    threads: CONFIG.deepspeed.threads * CONFIG.deepspeed.processes
    resources:
        **SPREAD_RESOURCES,
        mem_mb=growing(16000),
        runtime=growing(240),
    params:
        decides=DECIDES["update"],
        source=SOURCE["update"],
    shell:
        "rloo update --round {wildcards.round} --policy {input.policy} --trainer {input.trainer}"
        " --rollouts {input.rollouts} --scores {input.scores} --reference {input.reference} --output {output.policy}"
        " --output-trainer {output.trainer} --metrics {output.metrics} --events {output.events} --table {output.table} --log={log}"


use rule update as update_transient with:
    output:
        policy=temp(directory(f"{RUN}/policies/{{round}}")),
        trainer=temp(directory(f"{RUN}/trainer/{{round}}")),
        metrics=f"{RUN}/rounds/{{round}}/metrics.json",
        events=f"{RUN}/tensorboard/{{round}}.tfevents",
        table=f"{RUN}/rounds/{{round}}/train.parquet",
    wildcard_constraints:
        round=one_of(TRANSIENT),


use rule update as update_last with:
    output:
        policy=directory(f"{RUN}/policies/{{round}}"),
        trainer=directory(f"{RUN}/trainer/{{round}}"),
        metrics=f"{RUN}/rounds/{{round}}/metrics.json",
        events=f"{RUN}/tensorboard/{{round}}.tfevents",
        table=f"{RUN}/rounds/{{round}}/train.parquet",
    wildcard_constraints:
        round=LAST,


# Between two rounds. The gates' thresholds and source are no parameters: a change of them judges no finished round again.
rule gate:
    input:
        f"{RUN}/rounds/{{round}}/metrics.json",
    output:
        f"{RUN}/rounds/{{round}}/diagnosis.json",
    log:
        f"{RUN}/logs/gate/{{round}}.log",
    retries: 0
    shell:
        "rloo gate --round {wildcards.round} --output {output} --log={log}"


# Copies the metrics to W&B and MLflow, one round after the other. No stage waits for it.
rule track:
    input:
        metrics=f"{RUN}/rounds/{{round}}/metrics.json",
        earlier=tracked_before,
    output:
        f"{RUN}/tracking/{{round}}.json",
    log:
        f"{RUN}/logs/track/{{round}}.log",
    retries: 0
    params:
        run=subpath(output[0], ancestor=2),
        to=CONFIG.trackers,
    shell:
        "rloo track {params.run} --to {params.to} --round {wildcards.round} --earlier {input.earlier} --output {output} --log={log}"
