"""init: writes a project folder for a model, data and a reward, or for a TRL script, ready for `rloo check` and
`snakemake`.

The folder has config/config.yaml, a reward function with its test, a Snakefile that uses the workflow as a module,
profiles and a README. Data in a single file is split into training and held-out rows.
"""

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from rich.table import Column, Table
from rich.text import Text

from rloo_pipeline import import_string
from rloo_pipeline.artifacts import model_dims, model_files
from rloo_pipeline.artifacts.files import read_json, write_text
from rloo_pipeline.before_run.dataset_inputs import require_hub_name
from rloo_pipeline.commands.project_data import HUB_ID, ProjectData, dump_rows, place_in, project_data
from rloo_pipeline.commands.trl_options import ArgumentRow, groups
from rloo_pipeline.commands.trl_project import TrlProject
from rloo_pipeline.config.loading import flow
from rloo_pipeline.config.run_keys import valid_run_name
from rloo_pipeline.errors import UserError, counted
from rloo_pipeline.report.frame import templates_of
from rloo_pipeline.runtime import devices, installation
from rloo_pipeline.runtime.console import Terminal

T = TypeVar("T")
WITHOUT_DATA = ("Snakefile", "README.md", ".gitignore")
TEMPLATES = ("config/config.yaml", "rewards.py", "test_rewards.py", *WITHOUT_DATA)
PROFILES = ("default", "slurm")
"""Profiles that users edit, or that Snakemake looks for in the project. The package provides the others."""
QUESTIONS = {
    "model": "Model (a folder, or an id on the Hub): ",
    "data": "Data (a file of rows, such as .jsonl or .csv, a folder with train and test files, or an id on the Hub): ",
    "reward": "Reward function (FILE.py:FUNCTION; empty for one that compares with the column of answers): ",
}
COMPLETION, PROMPT = 256, 512
"""Maximum completion length in tokens, if the model's context has room for it."""
MOST_LINES = 8
"""Most lines of a script that are printed, if a project leaves them out."""
GENERATIONS, PROMPTS = 8, 32
"""Completions per prompt, and prompts per round."""


def init(
    folder: Path,
    force: bool = False,
    *,
    model: str | None = None,
    data: str | None = None,
    reward: str | None = None,
    held_out: str | None = None,
    prompt: str | None = None,
    answer: str | None = None,
) -> None:
    """Writes a project and prints what to do next. A choice that is None is detected or asked for.

    Args:
        folder: the project's folder.
        force: replace existing files.
        model: folder or Hub id.
        data: file, folder or Hub id of the rows.
        reward: the user's reward function; if there is none, `init` writes one.
        held_out: file with held-out rows.
        prompt: column with the prompt.
        answer: column with the answer.

    Raises:
        UserError: something is missing or unusable, or a file already exists. Nothing is written then.
    """
    console = Terminal()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, not a project folder; name another one")
    asks = _must_ask(model=model, data=data)
    used = _chosen("model", model, asks, lambda name: _model(name, folder))
    rows = _chosen("data", data, asks, lambda name: project_data(name, held_out, prompt, answer, folder))
    function = _chosen("reward", reward, asks, lambda name: _reward(name or None, rows, folder))
    write(folder, dict(files_of(_context(folder, used, rows, function))), force, console)
    next_steps(folder, rows, "", console)


def write(folder: Path, texts: Mapping[str, str], force: bool, console: Terminal) -> None:
    """Writes the files of a project.

    Raises:
        UserError: a file already exists and `force` is False.
    """
    existing = [name for name in texts if (folder / name).exists()]
    if existing and not force:
        raise UserError(
            f"{folder}: {', '.join(existing)} exist already; name another folder, or add --force to replace them"
        )
    for name, text in texts.items():
        write_text(folder / name, text)
        console.print(f"{'replaced' if name in existing else 'wrote'} {folder / name}", soft_wrap=True)


def _must_ask(**choices: str | None) -> bool:
    """True if a choice is missing, so that the user has to be asked.

    Raises:
        UserError: there is no terminal to ask on.
    """
    missing = [f"--{name}" for name, choice in choices.items() if choice is None]
    if missing and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError(f"{' and '.join(missing)} missing; on a terminal, `rloo init` asks for what is not given")
    return bool(missing)


def _chosen(name: str, choice: str | None, asks: bool, use: Callable[[str], T]) -> T:
    """Applies `use` to a choice, or to the user's answer if there is none. Asks again if `use` refuses the answer.

    Raises:
        UserError: the input ended, or `use` refuses a choice that was given.
    """
    if choice is not None or not asks:
        return use(choice or "")
    while True:
        try:
            return use(input(QUESTIONS[name]).strip())
        except EOFError:
            raise UserError(f"--{name} missing: the input ended before an answer") from None
        except UserError as error:
            print(error)


class ProjectModel(NamedTuple):
    """The model of a project."""

    entry: dict[str, Any]
    """The section `model` of the configuration."""
    has_template: bool
    """True if its tokenizer has a chat template, or is not on this machine."""
    context: int | None
    """Its context length in tokens, if known."""
    folder: Path | None = None
    """Folder with the model's files, if they are on this machine."""


def _model(name: str, folder: Path) -> ProjectModel:
    """Finds the model by its folder or Hub id.

    Raises:
        UserError: the name is neither.
    """
    # bfloat16 is slow on CPUs
    dtype = {} if devices.has_gpu() else {"dtype": "float32"}
    path = Path(name).expanduser()
    if not name or not path.is_dir():
        if HUB_ID.fullmatch(name):
            require_hub_name(name, path, "--model")
            return ProjectModel({"name_or_path": name, **dtype}, True, None)
        raise UserError(f"--model {name}: neither a folder nor a Hub id such as Qwen/Qwen3-0.6B")
    if not (path / "config.json").is_file():
        advice = "; it is an adapter: merge it into its model first" if (path / model_files.ADAPTER).is_file() else ""
        raise UserError(f"--model {name}: no config.json, so this is not the folder of a model{advice}")
    tokenizer, remedy = path / "tokenizer_config.json", model_files.remedy(path)
    in_tokenizer = tokenizer.is_file() and "chat_template" in read_json(tokenizer, remedy)
    has_template = any(path.glob("chat_template*")) or in_tokenizer
    context = model_dims.context(read_json(path / "config.json", remedy))
    return ProjectModel({"name_or_path": place_in(folder, path), **dtype}, has_template, context, path)


def _reward(reference: str | None, data: ProjectData, folder: Path) -> str | None:
    """The user's reward function as the configuration will name it; None if `init` writes one.

    Raises:
        UserError: the function does not exist, or none is given and the data has no column of answers.
    """
    if reference is None:
        if data.answer is None:
            raise UserError(
                f"{data.name}: none of its columns ({', '.join(data.columns)}) has a usual name for answers: name it "
                "with --answer COLUMN, or a reward function with --reward FILE.py:FUNCTION"
            )
        return None
    import_string.check(reference)
    module, _, function = reference.rpartition(":")
    return f"{place_in(folder, Path(module))}:{function}" if module.endswith(".py") else reference


def _kept_prompts(model: ProjectModel, data: ProjectData, keys: Mapping[str, Any]) -> int:
    """Number of training prompts that the stage `prompts` will keep. All rows count if data or tokenizer are not here.

    Args:
        model: the project's model.
        data: the project's data.
        keys: section `dataset` without its sources.
    """
    from rloo_pipeline.config import Dataset

    count = len(data.rows.get("train", range(PROMPTS)))
    if not data.rows or model.folder is None:
        return count
    try:
        from rloo_pipeline.artifacts.policy import Policy
        from rloo_pipeline.rollout.templating import PromptParts, Templater

        dataset = Dataset.model_validate({"train": data.train, "eval": data.eval, **keys})
        parts = PromptParts(Templater(dataset, Policy(model.folder)))
        for name in parts.order:
            parts.add(name, [*data.rows[name]], data.name)
    except (ImportError, UserError):  # `rloo check` explains such errors
        return count
    return len(parts.rows["train"])


def _context(folder: Path, model: ProjectModel, data: ProjectData, reward: str | None) -> dict[str, Any]:
    """Variables of the templates."""
    room = model.context or COMPLETION + PROMPT
    completion = min(COMPLETION, room // 2)
    prompt = {"user_prompt": f"{{{data.prompt}}}"} if model.has_template and not data.is_conversation else None
    dataset_keys = {**(prompt or {"prompt_column": data.prompt}), "max_prompt_length": min(PROMPT, room - completion)}
    prompts = _kept_prompts(model, data, dataset_keys)
    return {
        "run": valid_run_name(folder.resolve().name),
        "model": model.entry,
        "data": data,
        "prompt": prompt or {"prompt_column": data.prompt},
        "max_completion_length": completion,
        "max_prompt_length": dataset_keys["max_prompt_length"],
        "num_generations": GENERATIONS,
        "generation_batch_size": GENERATIONS * min(PROMPTS, prompts),
        "reward": reward,
        "tables": (),
        "files": (),
        "function": reward or "rewards.py:right",
        "is_text": prompt is None and not data.is_conversation,
        "examples": [json.loads(json.dumps(row, default=str)) for row in data.examples],
    }


def files_of(context: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the files of the project, relative to its folder, and their texts."""
    environment = templates_of("rloo_pipeline.commands", keep_trailing_newline=True)
    environment.filters["flow"] = flow
    environment.filters["python"] = repr
    for name in WITHOUT_DATA if context["tables"] else TEMPLATES:
        template = "test_own_reward.py" if context["reward"] and name == "test_rewards.py" else Path(name).name
        if (context["reward"] and name == "rewards.py") or (template.startswith("test") and not context["examples"]):
            continue
        yield name, environment.get_template(f"init.{template}.j2").render(context)
    data: ProjectData = context["data"]
    for name, rows in data.splits.items():
        yield name, dump_rows(rows, name)
    for profile in PROFILES:
        for file in sorted((installation.root() / "profiles" / profile).glob("*.yaml")):
            yield f"profiles/{profile}/{file.name}", file.read_text(encoding="utf-8")


def next_steps(folder: Path, data: ProjectData, fetch: str, console: Terminal) -> None:
    """Prints the next commands to type. `fetch` is the line that fetches the data, or empty."""
    if data.splits:
        parts = [f"{counted(len(rows), 'row')} in {name}" for name, rows in data.splits.items()]
        parts += [f"prompts in the column '{data.prompt}'", *([f"answers in '{data.answer}'"] if data.answer else [])]
        console.print(f"{data.name}: {', '.join(parts)}", soft_wrap=True)
    enter = "" if folder.resolve() == Path.cwd() else f"  cd {shlex.quote(str(folder))}\n"
    console.print(
        f"\nNext:\n{enter}{fetch}  rloo check               # model, data and reward, in seconds\n"
        "  snakemake --cores all    # on this machine; `rloo why` says beforehand what it would run\n"
        "README.md says how to run on a cluster.",
        soft_wrap=True,
    )


def init_from_trl(folder: Path, command: str, model: str | None, force: bool) -> None:
    """Writes a project from a TRL script, and prints what each argument of its trainer became.

    Args:
        folder: the project's folder.
        command: the script's file and command-line options, or a command of TRL.
        model: overrides the script's model, or names it if the script does not show it.
        force: replace existing files.

    Raises:
        UserError: the script cannot be translated, or a file already exists. Nothing is written then.
    """
    command = re.sub(r"\s*\\\r?\n\s*", " ", command)  # a shell keeps these in single quotes
    console, project = Terminal(), TrlProject(command, model, folder)
    written = yaml.safe_dump(project.config, default_flow_style=None, sort_keys=False, allow_unicode=True, width=100)
    tables = list(groups(project.rows))
    script = shlex.quote(project.script.path.name)
    context = {"run": project.config["run"], "model": project.config["model"], "data": project.data, "examples": ()}
    context |= {"reward": None, "tables": tables, "files": project.files, "script": script}
    others = dict(files_of(context | {"command": shlex.quote(command)}))
    config = f"# From {script}; README.md says what became of each option.\n\n{written}"
    write(folder, {"config/config.yaml": config, **project.files, **others}, force, console)
    for title, all_rows in tables:
        lines = [row for row in all_rows if row.option.startswith("line ") and not row.note]
        rows = [row for row in all_rows if row not in lines or len(lines) <= MOST_LINES]
        if len(lines) > MOST_LINES:
            numbers = ", ".join(row.option.removeprefix("line ") for row in lines)
            rows.append(ArgumentRow("lines", numbers, "", f"{len(lines)} lines of the script, which README.md shows"))
        if rows:
            there, here = Column(overflow="fold"), Column(overflow="fold")
            table = Table(there, here, box=None, padding=(0, 2, 0, 0), show_header=False)
            for row in rows:
                keys = Text.assemble(row.here, "\n" if row.here and row.note else "", (row.note, "dim"))
                table.add_row(f"{row.option}: {row.value}", keys)
            console.print(f"\n{title}", style="bold" if rows[0].here else "bold yellow")
            console.print(table)
    fetch = (
        "  python data.py           # fetches the data, where there is internet\n" if "data.py" in project.files else ""
    )
    next_steps(folder, project.data, fetch, console)
