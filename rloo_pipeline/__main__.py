"""`rloo STAGE …`, also as `python -m rloo_pipeline STAGE …`: done by a worker where one is free, else here."""

import sys

from rloo_pipeline.workers import client


def main() -> None:
    """The command; see `cli`, which is imported only where the work is done here."""
    code = client.run_stage(sys.argv[1:])
    if code is not None:
        raise SystemExit(code)
    from rloo_pipeline.cli import main as cli

    cli.main()


if __name__ == "__main__":
    main()
