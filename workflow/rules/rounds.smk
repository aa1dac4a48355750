# Round r samples from policy r-1, or from an older one (rollout.lag), and trains policy r. The number of rounds is
# not a parameter of a round, so a run can be extended without rerunning finished rounds.


rule rollout:
    input:
        prompts=file("prompts"),
        policy=sampling_policy,
        base=base_policy,
        difficulty=difficulty_shards,
        pass_rates=pass_rates_of_policy,
        before=carried_over,
        gate=gate_of_policy,
    output:
        rollouts=f"{RUN}/rounds/{{round}}/rollouts/{{shard}}.parquet",
        held_out=f"{RUN}/rounds/{{round}}/held_out/{{shard}}.parquet",
    log:
        f"{RUN}/logs/rollout/{{round}}-{{shard}}.log",
    benchmark:
        f"{RUN}/benchmarks/rollout/{{round}}-{{shard}}.tsv"
    # With a lag, jobs of several rounds wait for a core. Updates come first, then scores.
    priority: next_policy_first(1)
    threads: by_run(lambda config: config.vllm.job_threads)
    resources:
        gpu_stages=1,
        mem_mb=growing(8000),
        runtime=growing(120),
    params:
        decides=decides_rollout,
        source=source("rollout"),
    shell:
        "rloo rollout --prompts {input.prompts} --policy {input.policy} --round {wildcards.round}"
        " --shard {wildcards.shard} --difficulty {input.difficulty} --pass-rates {input.pass_rates}"
        " --before {input.before} --output {output.rollouts} --held-out {output.held_out} --log={log}"


# Scores one shard with one reward function that needs a GPU.
rule score_alone:
    input:
        prompts=file("prompts"),
        policy=file("policies/00000"),  # for its tokenizer
        rollouts=file("rounds/{round}/rollouts/{shard}.parquet"),
        reward_model=reward_model,
    output:
        f"{RUN}/rounds/{{round}}/scores/parts/{{reward}}/{{shard}}.parquet",
    log:
        f"{RUN}/logs/score/{{round}}-{{shard}}-{{reward}}.log",
    benchmark:
        f"{RUN}/benchmarks/score/{{round}}-{{shard}}-{{reward}}.tsv"
    wildcard_constraints:
        reward=one_of(
            sorted({re.escape(one.column) for config in RUNS.configs.values() for one in config.rewards if one.gpus})
        ),
    priority: next_policy_first(2)
    threads: lambda wildcards: alone(wildcards)[wildcards.reward].threads
    resources:
        gres=lambda wildcards: f"gpu:{alone(wildcards)[wildcards.reward].gpus}",
        gpu_stages=1,
        mem_mb=growing(16000),
        runtime=growing(60),
    params:
        decides=decides_alone,
        source=source_alone,
    shell:
        "rloo score --only {wildcards.reward} --prompts {input.prompts} --policy {input.policy}"
        " --rollouts {input.rollouts} --reward-model {input.reward_model} --output {output} --log={log}"


rule score:
    input:
        prompts=file("prompts"),
        policy=file("policies/00000"),  # for its tokenizer
        rollouts=file("rounds/{round}/rollouts/{shard}.parquet"),
        held_out=file("rounds/{round}/held_out/{shard}.parquet"),
        parts=scored_alone,
        reward_model=reward_model,
    output:
        scores=f"{RUN}/rounds/{{round}}/scores/{{shard}}.parquet",
        held_out=f"{RUN}/rounds/{{round}}/scores/held_out/{{shard}}.parquet",
    log:
        f"{RUN}/logs/score/{{round}}-{{shard}}.log",
    benchmark:
        f"{RUN}/benchmarks/score/{{round}}-{{shard}}.tsv"
    priority: next_policy_first(2)
    threads: by_run(scoring_threads)
    resources:
        mem_mb=scoring_memory,
        runtime=growing(60),
    params:
        **made_by("score"),
    shell:
        "rloo score --prompts {input.prompts} --policy {input.policy} --rollouts {input.rollouts}"
        " --parts {input.parts} --held-out {input.held_out} {output.held_out} --reward-model {input.reward_model}"
        " --output {output.scores} --log={log}"


# With rollout.refill: more completions for a round in which too few groups teach, else empty tables. A checkpoint would make
# Snakemake re-evaluate the whole DAG in each round.
rule refill:
    input:
        prompts=file("prompts"),
        policy=sampling_policy,
        base=base_policy,
        difficulty=difficulty_shards,
        pass_rates=pass_rates_of_policy,
        rollouts=shards_of("rollouts"),
        scores=shards_of("scores"),
        reward_model=reward_model,
    output:
        rollouts=f"{RUN}/rounds/{{round}}/refill/rollouts.parquet",
        scores=f"{RUN}/rounds/{{round}}/refill/scores.parquet",
    log:
        f"{RUN}/logs/refill/{{round}}.log",
    benchmark:
        f"{RUN}/benchmarks/refill/{{round}}.tsv"
    priority: next_policy_first(2)
    threads: by_run(sampling_threads)
    resources:
        gpu_stages=1,
        mem_mb=growing(8000),
        runtime=growing(120),
    params:
        **made_by("refill"),
    shell:
        "rloo refill --prompts {input.prompts} --policy {input.policy} --round {wildcards.round}"
        " --rollouts {input.rollouts} --scores {input.scores} --difficulty {input.difficulty}"
        " --pass-rates {input.pass_rates} --reward-model {input.reward_model} --output {output.rollouts}"
        " --output-scores {output.scores} --log={log}"


# With dataset.select.weights: online. Rollouts of this round's new policy draw their prompts by these rates.
rule pass_rates:
    input:
        scores=shards_and_refill("scores"),
        earlier=pass_rates_before,
    output:
        f"{RUN}/rounds/{{round}}/pass_rates.parquet",
    log:
        f"{RUN}/logs/pass_rates/{{round}}.log",
    benchmark:
        f"{RUN}/benchmarks/pass_rates/{{round}}.tsv"
    priority: 4
    resources:
        mem_mb=growing(4000),
        runtime=growing(30),
    params:
        **made_by("pass-rates"),
    shell:
        "rloo pass-rates --round {wildcards.round} --scores {input.scores} --earlier {input.earlier} --output {output}"
        " --log={log}"


rule reference:
    input:
        policy=file("policies/00000"),
        rollouts=file("rounds/{round}/rollouts/{shard}.parquet"),
        prompts=image_prompts,
    output:
        f"{RUN}/rounds/{{round}}/reference/{{shard}}.parquet",
    log:
        f"{RUN}/logs/reference/{{round}}-{{shard}}.log",
    benchmark:
        f"{RUN}/benchmarks/reference/{{round}}-{{shard}}.tsv"
    priority: next_policy_first(2)
    container:
        PASS_IMAGE
    threads: by_run(pass_threads)
    resources:
        **PASS_RESOURCES,
        gpu_stages=1,
        mem_mb=growing(8000),
        runtime=growing(120),
    params:
        **made_by("reference"),
    shell:
        "rloo reference --policy {input.policy} --rollouts {input.rollouts} --prompts {input.prompts}"
        " --output {output} --log={log}"


use rule reference as refill_reference with:
    input:
        policy=file("policies/00000"),
        rollouts=f"{RUN}/rounds/{{round}}/refill/rollouts.parquet",
        prompts=image_prompts,
    output:
        f"{RUN}/rounds/{{round}}/refill/reference.parquet",
    log:
        f"{RUN}/logs/refill_reference/{{round}}.log",
    benchmark:
        f"{RUN}/benchmarks/refill_reference/{{round}}.tsv"


rule teacher:
    input:
        assets=file("assets"),
        rollouts=file("rounds/{round}/rollouts/{shard}.parquet"),
        prompts=teachers_prompts,
    output:
        f"{RUN}/rounds/{{round}}/teacher/{{shard}}.parquet",
    log:
        f"{RUN}/logs/teacher/{{round}}-{{shard}}.log",
    benchmark:
        f"{RUN}/benchmarks/teacher/{{round}}-{{shard}}.tsv"
    priority: next_policy_first(2)
    container:
        PASS_IMAGE
    threads: by_run(pass_threads)
    resources:
        **PASS_RESOURCES,
        gpu_stages=1,
        mem_mb=growing(8000),
        runtime=growing(120),
    params:
        **made_by("teacher"),
    shell:
        "rloo teacher --assets {input.assets} --rollouts {input.rollouts} --prompts {input.prompts}"
        " --output {output} --log={log}"


# Three rules differ only in the files that they keep: `update` and `update_last` keep the policy, and `update_transient` does not.
# Snakemake takes temp() by rule, not by file. Trainer states are a cache that updates read and write; only that of the last
# round is an output, from which a longer run continues.
rule update:
    input:
        policy=policy_before,
        sampler=sampling_policy,
        base=base_policy,
        rollouts=shards_and_refill("rollouts"),
        scores=shards_and_refill("scores"),
        reference=all_reference,
        teacher=all_teacher,
        prompts=image_prompts,
        checks=checks_of,
        gate=gate,
    output:
        policy=directory(f"{RUN}/policies/{{round}}"),
        metrics=f"{RUN}/rounds/{{round}}/metrics.json",
        events=f"{RUN}/tensorboard/{{round}}.tfevents",
        table=f"{RUN}/rounds/{{round}}/train.parquet",
    log:
        f"{RUN}/logs/update/{{round}}.log",
    benchmark:
        f"{RUN}/benchmarks/update/{{round}}.tsv"
    wildcard_constraints:
        **rounds_like(kept),
    priority: next_policy_first(3)
    container:
        SPREAD_IMAGE
    threads: by_run(lambda config: config.deepspeed.threads * config.deepspeed.processes)
    resources:
        **SPREAD_RESOURCES,
        gpu_stages=1,
        mem_mb=growing(16000),
        runtime=growing(240),
    params:
        **made_by("update"),
        run=subpath(output.policy, ancestor=2),
    shell:
        "rloo update --round {wildcards.round} --policy {input.policy} --sampler {input.sampler} --trainer {params.run}/trainer"
        " --rollouts {input.rollouts} --scores {input.scores} --reference {input.reference} --teacher {input.teacher}"
        " --prompts {input.prompts} --checks {input.checks} --output {output.policy}"
        " --metrics {output.metrics} --events {output.events} --table {output.table} --log={log}"


use rule update as update_transient with:
    output:
        policy=temp(directory(f"{RUN}/policies/{{round}}")),
        metrics=f"{RUN}/rounds/{{round}}/metrics.json",
        events=f"{RUN}/tensorboard/{{round}}.tfevents",
        table=f"{RUN}/rounds/{{round}}/train.parquet",
    wildcard_constraints:
        **rounds_like(transient),


use rule update as update_last with:
    output:
        policy=directory(f"{RUN}/policies/{{round}}"),
        trainer=directory(f"{RUN}/trainer/{{round}}"),
        metrics=f"{RUN}/rounds/{{round}}/metrics.json",
        events=f"{RUN}/tensorboard/{{round}}.tfevents",
        table=f"{RUN}/rounds/{{round}}/train.parquet",
    wildcard_constraints:
        **rounds_like(last),


# Accuracy of the round's sampling policy on some held-out prompts. Only the report waits for it.
rule held_out:
    input:
        rollouts=shards_of("held_out"),
        scores=shards_of("scores/held_out"),
        policy_metrics=metrics_of_policy,
        after=update_before,
    output:
        summary=f"{RUN}/rounds/{{round}}/held_out.json",
        events=f"{RUN}/tensorboard/eval/{{round}}.tfevents",
    log:
        f"{RUN}/logs/held_out/{{round}}.log",
    benchmark:
        f"{RUN}/benchmarks/held_out/{{round}}.tsv"
    threads: CONTROLLER.threads_beside(1)
    resources:
        mem_mb=growing(4000),
        runtime=growing(30),
    params:
        **made_by("held-out"),
    shell:
        "rloo held-out --rollouts {input.rollouts} --scores {input.scores}"
        " --round {wildcards.round} --policy-metrics {input.policy_metrics}"
        " --output {output.summary} --events {output.events} --log={log}"


# report.html from the files that exist after a round. No stage waits for it. Code and title of the page are not
# parameters, so each page is made once.
rule report_so_far:
    input:
        file("rounds/{round}/metrics.json"),
    output:
        f"{RUN}/pages/{{round}}.json",
    log:
        f"{RUN}/logs/report_so_far/{{round}}.log",
    retries: 0
    threads: CONTROLLER.threads_beside(1)
    resources:
        mem_mb=growing(4000),
        runtime=growing(30),
    shell:
        "rloo report-so-far --output {output} --log={log}"


# Between two rounds. Gate thresholds and source are not rule parameters, so changing them does not rerun finished rounds.
rule gate:
    input:
        file("rounds/{round}/metrics.json"),
    output:
        f"{RUN}/rounds/{{round}}/diagnosis.json",
    log:
        f"{RUN}/logs/gate/{{round}}.log",
    # before jobs that no round waits for
    priority: 10
    retries: 0
    localrule: True
    shell:
        "rloo gate --round {wildcards.round} --output {output} --log={log}"


# Sends metrics to W&B and MLflow, one round after another. No stage waits for it.
rule track:
    input:
        metrics=file("rounds/{round}/metrics.json"),
        held_out=held_out_of,
        earlier=tracked_before,
    output:
        f"{RUN}/tracking/{{round}}.json",
    log:
        f"{RUN}/logs/track/{{round}}.log",
    retries: 0
    localrule: True
    params:
        run=subpath(output[0], ancestor=2),
        to=by_run(lambda config: config.trackers),
    shell:
        "rloo track {params.run} --to {params.to} --round {wildcards.round} --earlier {input.earlier} --output {output} --log={log}"
