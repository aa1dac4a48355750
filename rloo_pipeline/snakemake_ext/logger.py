"""Snakemake's logger plugin `rloo`: the live display of a run on a terminal, or plain lines without one.

On a terminal, it shows a header, a table with a line per round, the running jobs and a progress bar, all updated below
the output of the stages. Without a terminal, it prints a plain line for each event. A dry run says what would run and
why. After a failure, the last lines say what failed, why, where its log is, and which command continues.

Snakemake's messages that `NOISE` and `ENDS` match are left out here, but are in its log,
`.snakemake/log/*.snakemake.log`. `--logger-rloo-plain`, `--verbose`, `--quiet` and `--debug-dag` give Snakemake's own
output. So do jobs, since Snakemake loads no logger plugin in them.
"""

import logging
import os
import re
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent
from snakemake_interface_logger_plugins.settings import LogHandlerSettingsBase

from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import caches
from rloo_pipeline.snakemake_ext import configfiles, failures

if TYPE_CHECKING:
    from rloo_pipeline.snakemake_ext.run_display import RunDisplay
    from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall

NOISE = re.compile(
    r"Workflow defines that rule |Assuming unrestricted shared filesystem usage|Building DAG of jobs|Using shell: |"
    r"Singularity containers: ignored|Conda environments: ignored|Group jobs: inactive|Select jobs to execute|"
    r"Execute \d+ jobs|Processed \d+ potential jobs|Updating checkpoint dependencies|Elapsed time: |Touching output |"
    r"Complete log\(s\): |"
    r"Removing temporary output |Would remove temporary output |This was a dry-run|Reasons:\n|"
    r"Some jobs were triggered by provenance|Rules with provenance triggered jobs|"
    r"Config file \S+ is (?:extended|replaced) by|"
    # the page of a run in progress has the same name
    r"Warning: the following output files of rule report were not present"
)
"""Pattern of Snakemake messages whose content is shown here in another way."""
ENDS = ("Exiting because a job execution failed", "WorkflowError:\nAt least one job did not complete successfully")
"""Errors that only say that some job failed; the last lines give the details."""
ERROR = re.compile(
    r'WorkflowError(?: in file "[^"]*", line \d+)?:\n(?P<sentence>.*?)\n(?P<frames>  File "[^"]*", line .*)', re.DOTALL
)
RAISES = re.compile(r'/workflow/(?:Snakefile|rules/common\.smk)"|/rloo_pipeline/snakemake_ext/controller\.py"')
"""Files that turn a UserError into a Snakemake error; showing their names would not help the user."""


# Snakemake needs the types of options themselves, so annotations in this module must not be strings.
@dataclass
class LogHandlerSettings(LogHandlerSettingsBase):
    """Options of the plugin, `--logger-rloo-…`."""

    plain: bool = field(
        default=False, metadata={"help": "Print what Snakemake prints without this plugin", "env_var": True}
    )


class LogHandler(LogHandlerBase):
    """Shows Snakemake's events one by one. Snakemake calls `emit` in a dedicated thread."""

    # Snakemake has its own log file, filters by its output options, and formats messages that are shown unchanged
    writes_to_file = has_filter = has_formatter = needs_rulegraph = False

    def __post_init__(self) -> None:
        """Checks the files of `--configfile`, since Snakemake reads them next, and gives it a cache folder that it can
        write to; without one it ends with a traceback.

        Raises:
            CliException: a file is missing or broken, or the disk or quota of the cache folder is full.
        """
        configfiles.check()
        if configfiles.is_snakemake(sys.argv[0]):
            try:
                os.environ.update(caches.for_snakemake())
            except UserError as error:
                from snakemake.exceptions import CliException

                raise CliException(str(error)) from None
        settings = self.common_settings
        plain = isinstance(self.settings, LogHandlerSettings) and self.settings.plain
        self.display: RunDisplay | None = None
        """The display; None if the user asked for Snakemake's own output."""
        if not (plain or settings.verbose or settings.quiet or settings.debug_dag):
            from rloo_pipeline.snakemake_ext import run_display

            self.display = run_display.RunDisplay(
                sys.stdout if settings.stdout else sys.stderr,
                dry_run=settings.dryrun,
                color=not settings.nocolor,
                show_failed_logs=settings.show_failed_logs,
            )

    @property
    def writes_to_stream(self) -> bool:
        """True if Snakemake itself prints nothing."""
        return self.display is not None

    def emit(self, record: logging.LogRecord) -> None:
        """Shows an event. If that fails, prints it as Snakemake would."""
        if self.display is None:
            return
        try:
            self._show(self.display, record)
        except Exception:
            self.display.message(self.format(record), record.levelno)

    def _show(self, display: "RunDisplay", record: Any) -> None:
        event = getattr(record, "event", None)
        if event == LogEvent.WORKFLOW_STARTED:
            display.header()
        elif event == LogEvent.RUN_INFO:
            display.planned(record.stats["total"])
        elif event == LogEvent.JOB_INFO:
            display.job(record)
        elif event == LogEvent.JOB_FINISHED:
            display.finished(record.job_id)
        elif event == LogEvent.PROGRESS:
            display.progress(record.done, record.total)
        elif event == LogEvent.JOB_ERROR:
            display.failed(record.jobid, record.rule_name, record.log, record.rule_msg)
        elif event in (None, LogEvent.ERROR, LogEvent.GROUP_ERROR):
            self._message(display, self.format(record), record.levelno)

    def _message(self, display: "RunDisplay", text: str, level: int) -> None:
        if text.startswith("Trying to restart job "):
            display.restarted(int(text.rstrip(".").rpartition(" ")[2]))
        if text.startswith("Terminating processes on user request"):
            display.interrupted = True
        if text.startswith("Will exit after finishing currently running jobs"):
            display.stopping = True
        if status := failures.exit_status(text):
            display.exit_status(*status)
            return
        hidden = NOISE.match(text) if level < logging.ERROR else text.startswith(ENDS) and display.explains_failure
        hidden = hidden or (display.interrupted and text.startswith("RuleException:\nCalledProcessError"))
        if not hidden:
            error = ERROR.match(text)
            ours = error and RAISES.search(error["frames"])
            display.message(f"Error: {error['sentence']}" if error and ours else text, level)

    def close(self) -> None:
        """Ends the display with the outcome of the call."""
        if self.display:
            self.display.close()
        super().close()


def displays(call: "SnakemakeCall") -> "list[RunDisplay]":
    """This plugin's display, if the plugin is active and shows something, and this process is not a job."""
    handlers = call.workflow.logger_manager.get_log_handlers()
    return [handler.display for handler in handlers if isinstance(handler, LogHandler) and handler.display]


def is_only_one(call: "SnakemakeCall") -> bool:
    """True if this plugin's display is the only logger."""
    return 0 < len(displays(call)) == len(call.workflow.logger_manager.get_log_handlers())


def tell_displays(call: "SnakemakeCall") -> None:
    """Tells the display which runs this process works on."""
    for display in displays(call):
        for run, config in call.runs.configs.items():
            display.add_run(config, call.run_folder(run), call.workflow.logger_manager.get_logfile())
        if call.runs.experiment:
            display.add_experiment(call.folder / "experiment.html", call.runs.users)
