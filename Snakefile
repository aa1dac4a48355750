include: "workflow/Snakefile"


# An included file cannot set the default target.
rule default:
    default_target: True
    input:
        rules.all.input,
    localrule: True
