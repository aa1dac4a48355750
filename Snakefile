include: "workflow/Snakefile"


# An included file cannot set the default target.
rule default:
    default_target: True
    localrule: True
    input:
        rules.all.input,
