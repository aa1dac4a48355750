rule stage_assets:
    input:
        local_sources(),
    output:
        directory(f"{RUN}/assets"),
    params:
        decides=DECIDES["stage-assets"],
        source=SOURCE["stage-assets"],
    log:
        f"{RUN}/logs/stage_assets.log",
    benchmark:
        f"{RUN}/benchmarks/stage_assets.tsv"
    shell:
        "rloo stage-assets --config {CONFIG_FILE} --output {output} --log={log}"


rule prompts:
    input:
        f"{RUN}/assets",
    output:
        directory(f"{RUN}/prompts"),
    params:
        decides=DECIDES["prompts"],
        source=SOURCE["prompts"],
    cache: True
    resources:
        mem_mb=growing(4000),
        runtime=30,
    log:
        f"{RUN}/logs/prompts.log",
    shell:
        "rloo prompts --config {CONFIG_FILE} --assets {input} --output {output} --log={log}"
