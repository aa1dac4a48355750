"""A run that a gate has ended is finished by a second call of Snakemake."""

from pathlib import Path

from rloo_pipeline.snakemake_ext import early_stop


def test_a_stopped_run_is_finished_by_the_same_call_with_fewer_rounds_of_the_configuration_that_it_began_with() -> None:
    argv = ["/bin/snakemake", "--profile", "slurm", "--configfile", "mine.yaml", "--config", "run=x", "rounds=50"]
    again = early_stop.command("rounds=7", Path("copy.yaml"), argv)
    assert again is not None
    assert again[1:] == [
        *("-m", "snakemake", *argv[1:], "--nolock"),
        *("--configfile", "copy.yaml", "--config", "rounds=7"),
    ]
    assert early_stop.command("rounds=7", None, ["/lib/snakemake/__main__.py"]) is not None
    assert early_stop.command("rounds=7", None, ["/bin/jupyter"]) is None, "called from Python, the caller decides"
