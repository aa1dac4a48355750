rule warmstart:
    input:
        assets=f"{RUN}/assets",
        prompts=f"{RUN}/prompts",
    output:
        directory(f"{RUN}/policies/00000"),
    log:
        f"{RUN}/logs/warmstart.log",
    cache: True
    container:
        SPREAD_IMAGE if CONFIG.warmstart.sft else IMAGE
    threads: CONFIG.deepspeed.threads * CONFIG.deepspeed.processes
    resources:
        **(SPREAD_RESOURCES if CONFIG.warmstart.sft else {}),
        mem_mb=growing(8000),
        runtime=growing(240),
    params:
        decides=DECIDES["warmstart"],
        source=SOURCE["warmstart"],
    shell:
        "rloo warmstart --assets {input.assets} --prompts {input.prompts} --output {output} --log={log}"


rule checks:
    input:
        prompts=f"{RUN}/prompts",
        policy=f"{RUN}/policies/00000",
    output:
        f"{RUN}/warmstart/checks.json",
    log:
        f"{RUN}/logs/checks.log",
    benchmark:
        f"{RUN}/benchmarks/checks.tsv"
    # before the first rollouts, where both could run
    priority: 10
    threads: max(CONFIG.vllm.threads, CONFIG.scoring.workers)
    resources:
        mem_mb=growing(8000),
        runtime=growing(60),
    params:
        decides=DECIDES["checks"],
        source=SOURCE["checks"],
    shell:
        "rloo checks --prompts {input.prompts} --policy {input.policy} --output {output} --log={log}"
