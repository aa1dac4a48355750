rule warmstart:
    input:
        assets=file("assets"),
        prompts=file("prompts"),
    output:
        directory(f"{RUN}/policies/00000"),
    log:
        f"{RUN}/logs/warmstart.log",
    cache: PINNED
    container:
        SPREAD_IMAGE if TRAINS_FIRST else IMAGE
    threads: by_run(lambda config: config.deepspeed.threads * config.deepspeed.processes)
    resources:
        **(SPREAD_RESOURCES if TRAINS_FIRST else {}),
        gpu_stages=1,
        mem_mb=growing(8000),
        runtime=growing(240),
    params:
        **made_by("warmstart"),
    shell:
        "rloo warmstart --assets {input.assets} --prompts {input.prompts} --output {output} --log={log}"


rule reward_model:
    input:
        assets=file("assets"),
        prompts=file("prompts"),
    output:
        model=directory(f"{RUN}/reward_model/model"),
        checks=f"{RUN}/reward_model/checks.json",
    log:
        f"{RUN}/logs/reward_model.log",
    benchmark:
        f"{RUN}/benchmarks/reward_model.tsv"
    container:
        SPREAD_IMAGE
    threads: by_run(lambda config: config.deepspeed.threads * config.deepspeed.processes)
    resources:
        **SPREAD_RESOURCES,
        gpu_stages=1,
        mem_mb=growing(8000),
        runtime=growing(240),
    params:
        **made_by("reward-model"),
    shell:
        "rloo reward-model --assets {input.assets} --prompts {input.prompts} --model {output.model}"
        " --output {output.checks} --log={log}"


rule probe:
    input:
        prompts=file("prompts"),
        policy=file("policies/00000"),
        reward_model=reward_model,
    output:
        f"{RUN}/warmstart/probe.parquet",
    log:
        f"{RUN}/logs/probe.log",
    benchmark:
        f"{RUN}/benchmarks/probe.tsv"
    # before the first rollouts, when both could run
    priority: 10
    threads: by_run(sampling_threads)
    resources:
        gpu_stages=1,
        mem_mb=growing(8000),
        runtime=growing(60),
    params:
        **made_by("probe"),
    shell:
        "rloo probe --prompts {input.prompts} --policy {input.policy}"
        " --reward-model {input.reward_model} --output {output} --log={log}"


rule checks:
    input:
        assets=file("assets"),
        prompts=file("prompts"),
        policy=file("policies/00000"),
        probe=file("warmstart/probe.parquet"),
        reward_model=reward_model,
    output:
        report(f"{RUN}/warmstart/checks.json", caption="../report/checks.rst", category="Warm start"),
    log:
        f"{RUN}/logs/checks.log",
    benchmark:
        f"{RUN}/benchmarks/checks.tsv"
    priority: 10
    container:
        PASS_IMAGE
    threads: by_run(pass_threads)
    resources:
        **PASS_RESOURCES,
        gpu_stages=1,
        mem_mb=growing(8000),
        runtime=growing(60),
    params:
        **made_by("checks"),
    shell:
        "rloo checks --assets {input.assets} --prompts {input.prompts} --policy {input.policy} --probe {input.probe}"
        " --reward-model {input.reward_model} --output {output} --log={log}"


# Pass rates of policy 0 on all training prompts, if dataset.select needs them.
rule difficulty:
    input:
        prompts=file("prompts"),
        policy=file("policies/00000"),
        reward_model=deciding_model,
    output:
        f"{RUN}/warmstart/difficulty/{{shard}}.parquet",
    log:
        f"{RUN}/logs/difficulty/{{shard}}.log",
    cache: PINNED
    priority: 5
    threads: by_run(sampling_threads)
    resources:
        gpu_stages=1,
        mem_mb=growing(8000),
        runtime=growing(240),
    params:
        **made_by("difficulty"),
        # for the cache key, in which the shell command has no wildcards
        shard=lambda wildcards: wildcards.shard,
    shell:
        "rloo difficulty --prompts {input.prompts} --policy {input.policy} --shard {wildcards.shard}"
        " --reward-model {input.reward_model} --output {output} --log={log}"
