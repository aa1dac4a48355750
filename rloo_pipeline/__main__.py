"""`rloo COMMAND …` or `python -m rloo_pipeline COMMAND …`: runs a command in a free worker process if there is one,
otherwise in this process.
"""

import os
import signal
import sys
from io import TextIOWrapper


def main() -> None:
    """The command `rloo`. Imports `cli` only if no worker takes the command."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale without UTF-8 has no characters for curves
    try:
        from rloo_pipeline.workers import client  # here, so that Ctrl-C at the start of a job prints no traceback

        code = client.run_stage(sys.argv[1:])
        if code is None:
            before = signal.getsignal(signal.SIGINT)
            if before is signal.default_int_handler:  # pydantic would make an error of its own of KeyboardInterrupt
                signal.signal(signal.SIGINT, lambda *_: os._exit(130))
            from rloo_pipeline.cli import main as cli

            signal.signal(signal.SIGINT, before)
            try:
                cli.main()
            finally:
                sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(130) from None  # Ctrl-C; Snakemake says how to continue
    except BrokenPipeError:
        from rloo_pipeline.runtime import output

        if output.has_reader():  # it is another pipe
            raise
        os._exit(128 + signal.SIGPIPE)
    if code is not None:
        raise SystemExit(code)


if __name__ == "__main__":
    main()
