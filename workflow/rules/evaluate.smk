rule evaluate:
    input:
        prompts=f"{RUN}/prompts",
        policy=evaluated_policy,
        base=f"{RUN}/policies/00000",
    output:
        completions=f"{RUN}/evaluation/{{name}}/completions.parquet",
        greedy=f"{RUN}/evaluation/{{name}}/greedy.parquet",
        summary=report(
            f"{RUN}/evaluation/{{name}}/summary.json", caption="../report/evaluation.rst", category="Evaluation"
        ),
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
        " --output {output.completions} --greedy {output.greedy} --summary {output.summary} --log={log}"


rule distance:
    input:
        completions=f"{RUN}/evaluation/{{name}}/completions.parquet",
        policy=evaluated_policy,
        base=f"{RUN}/policies/00000",
    output:
        f"{RUN}/evaluation/{{name}}/distance.json",
    log:
        f"{RUN}/logs/distance/{{name}}.log",
    benchmark:
        f"{RUN}/benchmarks/distance/{{name}}.tsv"
    threads: CONFIG.deepspeed.threads
    resources:
        mem_mb=growing(8000),
        runtime=growing(60),
    params:
        decides=DECIDES["distance"],
        source=SOURCE["distance"],
    shell:
        "rloo distance --completions {input.completions} --policy {input.policy} --reference {input.base}"
        " --output {output} --log={log}"


rule stage_harness:
    output:
        f"{RUN}/harness/tasks.json",
    log:
        f"{RUN}/logs/stage_harness.log",
    params:
        decides=DECIDES["stage-harness"],
        source=SOURCE["stage-harness"],
    shell:
        "rloo stage-harness --output {output} --log={log}"


rule harness:
    input:
        tasks=f"{RUN}/harness/tasks.json",
        policy=evaluated_policy,
        base=f"{RUN}/policies/00000",
    output:
        f"{RUN}/evaluation/{{name}}/harness.json",
    log:
        f"{RUN}/logs/harness/{{name}}.log",
    benchmark:
        f"{RUN}/benchmarks/harness/{{name}}.tsv"
    threads: CONFIG.vllm.threads
    resources:
        mem_mb=growing(8000),
        runtime=growing(240),
    params:
        decides=DECIDES["harness"],
        source=SOURCE["harness"],
    shell:
        "rloo harness --policy {input.policy} --name {wildcards.name} --output {output} --log={log}"


rule report:
    input:
        checks=f"{RUN}/warmstart/checks.json",
        metrics=expand(f"{RUN}/rounds/{{round}}/metrics.json", round=ROUNDS),
        evaluations=expand(
            f"{RUN}/evaluation/{{name}}/{{file}}",
            name=CONFIG.evaluated,
            file=["summary.json", "completions.parquet", "greedy.parquet"],
        ),
        distances=expand(f"{RUN}/evaluation/{{name}}/distance.json", name=list(CONFIG.evaluated)[1:]),
        harness=expand(
            f"{RUN}/evaluation/{{name}}/harness.json", name=CONFIG.evaluated if CONFIG.evaluation.harness else []
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
