"""init --from-trl: writes a project from a TRL script, with a table that shows what each argument became."""

from __future__ import annotations

import shlex
from pathlib import Path

import yaml
from rich.table import Table
from rich.text import Text

from rloo_pipeline.commands.init import files_of, next_steps, write
from rloo_pipeline.commands.trl_options import groups
from rloo_pipeline.commands.trl_project import TrlProject
from rloo_pipeline.runtime.console import Terminal


def init_from_trl(folder: Path, command: str, model: str | None, force: bool) -> None:
    """Writes a project from a TRL script, and prints what each argument of its trainer became.

    Args:
        folder: the project's folder.
        command: the script's file and command-line options.
        model: overrides the script's model, or names it if the script does not show it.
        force: replace existing files.

    Raises:
        UserError: the script cannot be translated, or a file already exists. Nothing is written then.
    """
    console, project = Terminal(), TrlProject(command, model, folder)
    written = yaml.safe_dump(project.config, default_flow_style=None, sort_keys=False, allow_unicode=True, width=100)
    tables = list(groups(project.rows))
    context = {"run": project.config["run"], "model": project.config["model"], "data": project.data, "examples": ()}
    context |= {"reward": None, "tables": tables, "files": project.files, "script": Path(shlex.split(command)[0]).name}
    texts = {
        "config/config.yaml": f"# From {context['script']}; README.md says what became of each option.\n\n{written}"
    }
    write(folder, {**texts, **project.files, **dict(files_of(context))}, force, console)
    for title, rows in tables:
        if rows:
            table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
            for _ in ("in the script", "here"):
                table.add_column(overflow="fold")
            for row in rows:
                here = Text.assemble(row.here, "\n" if row.here and row.note else "", (row.note, "dim"))
                table.add_row(f"{row.option}: {row.value}", here)
            console.print(f"\n{title}", style="bold" if rows[0].here else "bold yellow")
            console.print(table)
    fetch = (
        "  python data.py           # fetches the data, where there is internet\n" if "data.py" in project.files else ""
    )
    next_steps(folder, project.data, fetch, console)
