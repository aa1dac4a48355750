rule warmstart:
    input:
        assets=f"{RUN}/assets",
        prompts=f"{RUN}/prompts",
        trial=f"{RUN}/warmstart/trial/checks.json" if CONFIG.tries_model else [],
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
        "rloo warmstart --assets {input.assets} --prompts {input.prompts} --trial {input.trial} --output {output} --log={log}"


rule probe:
    input:
        prompts=f"{RUN}/prompts",
        policy=f"{RUN}/policies/00000",
        earlier=f"{RUN}/warmstart/trial/probe.parquet" if CONFIG.tries_model else [],
    output:
        f"{RUN}/warmstart/probe.parquet",
    log:
        f"{RUN}/logs/probe.log",
    benchmark:
        f"{RUN}/benchmarks/probe.tsv"
    # before the first rollouts, when both could run
    priority: 10
    threads: max(CONFIG.vllm.threads, CONFIG.scoring.workers)
    resources:
        mem_mb=growing(8000),
        runtime=growing(60),
    params:
        decides=DECIDES["probe"],
        source=SOURCE["probe"],
    shell:
        "rloo probe --prompts {input.prompts} --policy {input.policy} --earlier {input.earlier} --output {output} --log={log}"


rule checks:
    input:
        assets=f"{RUN}/assets",
        prompts=f"{RUN}/prompts",
        policy=f"{RUN}/policies/00000",
        probe=f"{RUN}/warmstart/probe.parquet",
    output:
        report(f"{RUN}/warmstart/checks.json", caption="../report/checks.rst", category="Warm start"),
    log:
        f"{RUN}/logs/checks.log",
    benchmark:
        f"{RUN}/benchmarks/checks.tsv"
    priority: 10
    threads: CONFIG.deepspeed.threads
    resources:
        mem_mb=growing(8000),
        runtime=growing(60),
    params:
        decides=DECIDES["checks"],
        source=SOURCE["checks"],
        how="",
    shell:
        "rloo checks --assets {input.assets} --prompts {input.prompts} --policy {input.policy} --probe {input.probe}"
        " {params.how} --output {output} --log={log}"


# With `warmstart.train: auto` the model is checked before SFT; SFT runs only where these checks ask for it.
use rule probe as trial_probe with:
    input:
        prompts=f"{RUN}/prompts",
        policy=f"{RUN}/assets",
        earlier=[],
    output:
        f"{RUN}/warmstart/trial/probe.parquet",
    log:
        f"{RUN}/logs/trial_probe.log",
    benchmark:
        f"{RUN}/benchmarks/trial_probe.tsv"


use rule checks as trial_checks with:
    input:
        assets=f"{RUN}/assets",
        prompts=f"{RUN}/prompts",
        policy=f"{RUN}/assets",
        probe=f"{RUN}/warmstart/trial/probe.parquet",
    output:
        f"{RUN}/warmstart/trial/checks.json",
    log:
        f"{RUN}/logs/trial_checks.log",
    benchmark:
        f"{RUN}/benchmarks/trial_checks.tsv"
    params:
        decides=DECIDES["checks"],
        source=SOURCE["checks"],
        how="--trial",
