rule stage_assets:
    input:
        local_sources(),
    output:
        directory(f"{RUN}/assets"),
    log:
        f"{RUN}/logs/stage_assets.log",
    benchmark:
        f"{RUN}/benchmarks/stage_assets.tsv"
    params:
        decides=DECIDES["stage-assets"],
        source=SOURCE["stage-assets"],
    shell:
        "rloo stage-assets --output {output} --log={log}"


rule prompts:
    input:
        f"{RUN}/assets",
    output:
        directory(f"{RUN}/prompts"),
    log:
        f"{RUN}/logs/prompts.log",
    cache: True
    resources:
        mem_mb=growing(4000),
        runtime=growing(30),
    params:
        decides=DECIDES["prompts"],
        source=SOURCE["prompts"],
    shell:
        "rloo prompts --assets {input} --output {output} --log={log}"
