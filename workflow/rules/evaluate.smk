rule evaluate:
    input:
        prompts=file("prompts"),
        policy=evaluated_policy,
        base=file("policies/00000"),
        reward_model=reward_model,
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
    threads: by_run(sampling_threads)
    resources:
        gpu_stages=1,
        mem_mb=growing(8000),
        runtime=growing(120),
    params:
        **made_by("evaluate"),
    shell:
        "rloo evaluate --prompts {input.prompts} --policy {input.policy} --name {wildcards.name}"
        " --reward-model {input.reward_model}"
        " --output {output.completions} --greedy {output.greedy} --summary {output.summary} --log={log}"


rule judge_pairs:
    input:
        prompts=file("prompts"),
        before=file("evaluation/warmstart/completions.parquet"),
        after=file("evaluation/final/completions.parquet"),
    output:
        f"{RUN}/judgements.parquet",
    log:
        f"{RUN}/logs/judge_pairs.log",
    benchmark:
        f"{RUN}/benchmarks/judge_pairs.tsv"
    threads: by_run(scoring_threads)
    resources:
        mem_mb=scoring_memory,
        runtime=growing(120),
    params:
        **made_by("judge-pairs"),
    shell:
        "rloo judge-pairs --prompts {input.prompts} --before {input.before} --after {input.after} --output {output} --log={log}"


# Selects the best round of each run and, in an experiment, the best arm.
rule select:
    input:
        CANDIDATES if SELECTED else [],
    output:
        SELECTION,
    log:
        f"results/{RUNS.name}/logs/select.log",
    localrule: True
    params:
        runs=[str(Path(run).relative_to(RUNS.name)) for run in RUNS.configs],
        decides=CONFIG.params("select"),
        source=source_digest("select", CONFIG),
    shell:
        "rloo select {params.runs} --output {output} --log={log}"


# Only the chosen policy is evaluated on the test rows.
rule evaluate_chosen:
    input:
        selection=SELECTION,
        prompts=lambda wildcards: [of_run(run, "prompts") for run in of_seed(wildcards)],
        policies=policies_of_seed,
        reward_models=reward_models_of_seed,
    output:
        completions=f"{TEST}/{{seed}}/completions.parquet",
        greedy=f"{TEST}/{{seed}}/greedy.parquet",
        summary=f"{TEST}/{{seed}}/summary.json",
    log:
        f"results/{RUNS.name}/logs/evaluate_chosen/{{seed}}.log",
    benchmark:
        f"results/{RUNS.name}/benchmarks/evaluate_chosen/{{seed}}.tsv"
    wildcard_constraints:
        seed=one_of(map(str, SEEDS)),
    threads: max(map(sampling_threads, RUNS.configs.values()))
    resources:
        gpu_stages=1,
        mem_mb=growing(8000),
        runtime=growing(120),
    params:
        decides=lambda wildcards: [config.params("evaluate-chosen") for config in of_seed(wildcards).values()],
        source=lambda wildcards: [source_digest("evaluate-chosen", config) for config in of_seed(wildcards).values()],
    shell:
        "rloo evaluate-chosen --selection {input.selection} --seed {wildcards.seed} --output {output.completions}"
        " --greedy {output.greedy} --summary {output.summary} --log={log}"


rule prove_chosen:
    input:
        selection=SELECTION,
        completions=f"{TEST}/{{seed}}/completions.parquet",
        policies=policies_of_seed,
        checks=checks_of_seed,
    output:
        f"{TEST}/{{seed}}/proof.json",
    log:
        f"results/{RUNS.name}/logs/prove_chosen/{{seed}}.log",
    benchmark:
        f"results/{RUNS.name}/benchmarks/prove_chosen/{{seed}}.tsv"
    wildcard_constraints:
        seed=one_of(map(str, SEEDS)),
    container:
        PASS_IMAGE
    threads: largest(pass_threads)
    resources:
        **(spread(largest) if PASS_RESOURCES else {}),
        gpu_stages=1,
        mem_mb=growing(8000),
        runtime=growing(60),
    params:
        decides=lambda wildcards: [config.params("prove-chosen") for config in of_seed(wildcards).values()],
        source=lambda wildcards: [source_digest("prove-chosen", config) for config in of_seed(wildcards).values()],
    shell:
        "rloo prove-chosen --selection {input.selection} --seed {wildcards.seed} --completions {input.completions}"
        " --output {output} --log={log}"


rule distance:
    input:
        completions=file("evaluation/{name}/completions.parquet"),
        policy=evaluated_policy,
        base=file("policies/00000"),
        prompts=image_prompts,
        checks=checks_of,
    output:
        f"{RUN}/evaluation/{{name}}/distance.json",
    log:
        f"{RUN}/logs/distance/{{name}}.log",
    benchmark:
        f"{RUN}/benchmarks/distance/{{name}}.tsv"
    container:
        PASS_IMAGE
    threads: by_run(pass_threads)
    resources:
        **PASS_RESOURCES,
        gpu_stages=1,
        mem_mb=growing(8000),
        runtime=growing(60),
    params:
        **made_by("distance"),
    shell:
        "rloo distance --completions {input.completions} --policy {input.policy} --reference {input.base}"
        " --prompts {input.prompts} --checks {input.checks} --output {output} --log={log}"


rule stage_harness:
    output:
        f"{RUN}/harness/tasks.json",
    log:
        f"{RUN}/logs/stage_harness.log",
    localrule: True
    params:
        **made_by("stage-harness"),
    shell:
        "rloo stage-harness --output {output} --log={log}"


rule harness:
    input:
        tasks=file("harness/tasks.json"),
        policy=evaluated_policy,
        base=file("policies/00000"),
    output:
        f"{RUN}/evaluation/{{name}}/harness.json",
    log:
        f"{RUN}/logs/harness/{{name}}.log",
    benchmark:
        f"{RUN}/benchmarks/harness/{{name}}.tsv"
    threads: by_run(lambda config: config.vllm.threads)
    resources:
        gpu_stages=1,
        mem_mb=growing(8000),
        runtime=growing(240),
    params:
        **made_by("harness"),
    shell:
        "rloo harness --policy {input.policy} --name {wildcards.name} --output {output} --log={log}"


rule report:
    input:
        checks=file("warmstart/checks.json"),
        metrics=metrics_of_all,
        evaluations=evaluations("summary.json", "completions.parquet", "greedy.parquet"),
        distances=evaluations("distance.json", after=1),
        harness=benchmarks,
        judgements=judgements,
        held_out=held_out_of_all,
        prompts=file("prompts"),
        difficulty=difficulty_shards,
        stopped=stopped,
        choice=[] if RUNS.experiment else CHOICE,
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
        **made_by("report"),
    shell:
        "rloo report --output {output.page} --summary {output.summary} --log={log}"
