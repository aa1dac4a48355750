include: "workflow/Snakefile"


# an included file cannot set it
workflow.default_target = "all"
