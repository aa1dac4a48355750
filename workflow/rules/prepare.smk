rule stage_assets:
    input:
        local_sources,
    output:
        directory(f"{RUN}/assets"),
    log:
        f"{RUN}/logs/stage_assets.log",
    benchmark:
        f"{RUN}/benchmarks/stage_assets.tsv"
    localrule: True
    params:
        **made_by("stage-assets"),
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
        **made_by("prompts"),
    shell:
        "rloo prompts --assets {input} --output {output} --log={log}"
