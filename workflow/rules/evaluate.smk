rule evaluate:
    input:
        prompts=f"{RUN}/prompts",
        policy=evaluated_policy,
        base=f"{RUN}/policies/00000",
    output:
        completions=f"{RUN}/evaluation/{{name}}/completions.parquet",
        summary=f"{RUN}/evaluation/{{name}}/summary.json",
    log:
        f"{RUN}/logs/evaluate/{{name}}.log",
    benchmark:
        f"{RUN}/benchmarks/evaluate/{{name}}.tsv"
    threads: max(CONFIG.vllm.threads, CONFIG.scoring.workers)
    resources:
        mem_mb=growing(8000),
        runtime=growing(120),
    params:
        decides=DECIDES["evaluate"],
        source=SOURCE["evaluate"],
    shell:
        "rloo evaluate --prompts {input.prompts} --policy {input.policy} --name {wildcards.name}"
        " --output {output.completions} --summary {output.summary} --log={log}"


rule report:
    input:
        checks=f"{RUN}/warmstart/checks.json",
        metrics=expand(f"{RUN}/rounds/{{round}}/metrics.json", round=ROUNDS),
        evaluations=expand(
            f"{RUN}/evaluation/{{name}}/{{file}}",
            name=["warmstart", "final"],
            file=["summary.json", "completions.parquet"],
        ),
        prompts=f"{RUN}/prompts",
        stopped=STOPPED,
    output:
        summary=f"{RUN}/summary.json",
        page=report(f"{RUN}/report.html", caption="../report/report.rst", category="Run"),
    log:
        f"{RUN}/logs/report.log",
    benchmark:
        f"{RUN}/benchmarks/report.tsv"
    resources:
        mem_mb=growing(4000),
        runtime=growing(30),
    params:
        decides=DECIDES["report"],
        source=SOURCE["report"],
    shell:
        "rloo report --output {output.page} --summary {output.summary} --log={log}"
