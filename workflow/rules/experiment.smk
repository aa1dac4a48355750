# The page of an experiment, once all its runs are finished. After a failure, the controller makes it from finished runs.
rule experiment:
    input:
        [f"results/{run}/summary.json" for run in RUNS.configs],
        CHOICE,
    output:
        [f"results/{RUNS.name}/{name}" for name in EXPERIMENT_FILES],
    log:
        f"results/{RUNS.name}/logs/experiment.log",
    retries: 0
    localrule: True
    params:
        experiment=subpath(output[0], parent=True),
        runs=list(RUNS.configs),  # in order: the first arm is the baseline
    shell:
        "rloo experiment {params.experiment} --log={log}"
