"""`rloo STAGE …` or `python -m rloo_pipeline STAGE …`: runs on a worker where one is free, else in this process."""

import sys

from rloo_pipeline.workers import client


def main() -> None:
    """The command `rloo`; imports `cli` only where no worker runs the stage."""
    code = client.run_stage(sys.argv[1:])
    if code is not None:
        raise SystemExit(code)
    from rloo_pipeline.cli import main as cli

    cli.main()


if __name__ == "__main__":
    main()
