rule stage_assets:
    input:
        by_run(local_sources),
    output:
        directory(f"{RUN}/assets"),
    log:
        f"{RUN}/logs/stage_assets.log",
    benchmark:
        f"{RUN}/benchmarks/stage_assets.tsv"
    params:
        decides=decides("stage-assets"),
        source=source("stage-assets"),
    shell:
        "rloo stage-assets --output {output} --log={log}"


rule prompts:
    input:
        file("assets"),
    output:
        directory(f"{RUN}/prompts"),
    log:
        f"{RUN}/logs/prompts.log",
    cache: PINNED
    resources:
        mem_mb=growing(4000),
        runtime=growing(30),
    params:
        decides=decides("prompts"),
        source=source("prompts"),
    shell:
        "rloo prompts --assets {input} --output {output} --log={log}"
