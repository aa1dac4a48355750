"""init --from-trl: turns a TRL training script into a project, with a table that shows what each argument became."""

import ast
import tokenize
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rloo_pipeline.commands import trl_copies
from rloo_pipeline.commands import trl_tables as tables
from rloo_pipeline.commands.project_data import ProjectData, place_in
from rloo_pipeline.commands.trl_model import TrlModel
from rloo_pipeline.commands.trl_options import Translation, shown
from rloo_pipeline.commands.trl_script import TrlScript
from rloo_pipeline.commands.trl_syntax import name_of, without_none
from rloo_pipeline.commands.trl_values import UnknownValueError
from rloo_pipeline.config import JSON, Config, nest
from rloo_pipeline.config.error_messages import checked
from rloo_pipeline.config.run_keys import valid_run_name
from rloo_pipeline.errors import UserError
from rloo_pipeline.user_code.reward_call import OF_TRAINER


class TrlProject(TrlModel):
    """A project made from a script: its configuration, its other files, and the table of arguments.

    Args:
        command: the script's file and command-line options.
        model: overrides the script's model, or names it if the script does not show it.
        folder: the project's folder.

    Raises:
        UserError: the script cannot be read, has no counterpart, or does not show its model, data or rewards.
    """

    def __init__(self, command: str, model: str | None, folder: Path) -> None:
        super().__init__(TrlScript(command), folder)
        self.files: dict[str, str] = {}
        """Python files with code copied from the script: name → text."""
        self.beside: set[Path] = set()
        """Files beside the script that the configuration names functions of."""
        if old := self.script.arguments.keys() & tables.BEFORE_TRL_022:
            problem = f"the trainer's {' and '.join(sorted(old))} belongs to TRL before 0.22; write it for TRL 1, with "
            raise UserError(self.script.at(self.script.trainer, f"{problem}model, reward_funcs and args"))
        options, unknown = self._known(self.script.config_options())
        given = self._init_kwargs(options.get("model_init_kwargs"), unknown.pop("model_init_kwargs", None))
        self._sampling(options, unknown)
        tools = map(self.script.argument, ("tools", "environment_factory"))
        if not any(getattr(tool, "elts", tool) for tool in tools):  # TRL ignores it then
            options.pop("max_tool_calling_iterations", None)
        of_model, dataset = self._model(model, given), self._dataset()
        if options.get("bf16") is False and not options.get("fp16") and "dtype" not in of_model:
            of_model["dtype"] = "float32"
            self._row("bf16", "false", "model.dtype", "float32")
        try:
            translation = Translation(self.script.kind, options)
        except UserError as error:
            raise UserError(self.script.at(self.script.argument("args") or self.script.trainer, str(error))) from error
        config = nest(translation.keys)
        config["run"] = valid_run_name(Path(str(options.get("output_dir") or self.folder.resolve().name)).name)
        config["model"] = of_model | config.get("model", {})
        config["dataset"] = dataset | config.get("dataset", {})
        config["rewards"] = self._rewards(options.get("reward_weights"), options.get("chat_template_kwargs"))
        if len(config["rewards"]) > 1:
            config["correct"] = {"reward": _deciding(config["rewards"])}
        self._tools(config)
        if lora := self._lora():
            config.setdefault("update", {})["lora"] = lora
        self.rows += translation.rows
        for module, where in self.script.modules.items():
            note = f"stays in {where}; a run does not copy it, so leave it as it is until the run has ended"
            self._row("import", module, "", note)
        self._left_over(unknown, translation.keys)
        self.config = {key: config[key] for key in dict.fromkeys((*tables.SECTIONS, *config)) if key in config}
        checked(Config, self.config, str(self.script.path))
        source = dataset["train"].get("name") or str(self.script.path)
        self.data = ProjectData(source, dataset["train"], dataset["eval"], (), "prompt")

    def _left_over(self, unknown: Mapping[str, ast.expr], keys: Mapping[str, Any]) -> None:
        """Adds a row for everything that was not translated: options with unknown values, in place of the rows with
        their defaults, trainer arguments, and lines of the script.
        """
        for name, node in unknown.items():
            defaults = [name, "num_train_epochs" if name == "max_steps" else name]  # TRL ignores epochs then
            rows = [row for row in self.rows if row.option in defaults and "TRL's default" in row.value]
            self.rows = [row for row in self.rows if row not in rows]
            now = [f"{row.here} (now {keys.get(row.here, row.value.split(' (')[0])})" for row in rows]
            self._unshown(name, node, *now)
        for name, node in self.script.arguments.items():
            if name == "processing_class":
                self._tokenizer(node)
            elif name not in tables.KNOWN and not (isinstance(node, ast.Constant) and node.value is None):
                self._row(name, ast.unparse(node), "", tables.ADVICE.get(name, ""))
        for name, module in self.script.of_others():
            self._row("class", name, "", f"is that of {module}; the run does what TRL's does")
        names = {node.value for node in ast.walk(self.script.tree) if isinstance(node, ast.Constant)}
        for column in names & {"image", "images"}:
            self._row("column", str(column), "", "if prompts have images, set dataset.image_column")
        for file, texts in self._texts().items():
            for argument in sorted(texts & {*OF_TRAINER}):
                self._row("argument", argument, "", f"{file} reads it, but only TRL's trainer passes it")
        for file, text in self.files.items():
            for undefined in sorted(trl_copies.undefined(text)):
                self._row("name", undefined, "", f"the script does not define it; define it in {file}")
            for missing in sorted(trl_copies.missing_files(text)):
                self._row("file", missing, "", f"is not here; if it is not on the Hub, write its path into {file}")
        for loop in self.script.loops():
            self._row(f"line {loop.lineno}", ast.unparse(loop).partition("\n")[0], "", "the run trains once")
        for statement in self.script.left():
            text, advice = " ".join(ast.unparse(statement).split()), self.script.advice_on(statement)
            self._row(f"line {statement.lineno}", text, "", advice)

    def _texts(self) -> dict[str, set[str]]:
        """The parameters and strings in rewards.py and in the script's own modules, without those that Python cannot
        read, by file.
        """
        own = [Path(folder, *module.split(".")) for module, folder in self.script.modules.items()]
        files = {*self.beside, *(path.with_suffix(".py") for path in own), *(path / "__init__.py" for path in own)}
        found = {"rewards.py": trl_copies.texts(self.files.get("rewards.py", ""))}
        for path in sorted(files):
            with suppress(OSError, SyntaxError, ValueError), tokenize.open(path) as file:  # in the file's encoding
                found[str(path)] = trl_copies.texts(file.read())
        return found

    def _known(self, options: Mapping[str, Any]) -> tuple[JSON, dict[str, ast.expr]]:
        """Splits options into those with known values, and those whose values the script does not show."""
        known: JSON = {}
        unknown: dict[str, ast.expr] = {}
        for name, value in options.items():
            try:
                known[name] = self.script.value(value) if isinstance(value, ast.expr) else value
            except UnknownValueError:
                unknown[name] = value
        return known, unknown

    def _sampling(self, options: JSON, unknown: dict[str, ast.expr]) -> None:
        """Makes `generation_kwargs` of all sampling parameters whose values the script shows."""
        for name in ("generation_kwargs", "vllm_sampling_params"):
            if (node := unknown.get(name)) is None:
                continue
            call = self.script.resolved(node)
            entries = self.script.entries(node)
            if isinstance(call, ast.Call) and name_of(call.func) == "SamplingParams" and not call.args:
                entries = self.script.keywords(call)
            if entries is None:
                continue
            known, hidden = self._known(entries)
            options["generation_kwargs"] = {**(options.get("generation_kwargs") or {}), **known}
            del unknown[name]
            for key, value in hidden.items():
                if "eos_token" not in ast.unparse(value):  # which always ends a completion
                    self._unshown(f"{name}.{key}", value)

    def _dataset(self) -> JSON:
        """Builds the section `dataset`."""
        names = ("train_dataset", "eval_dataset")
        train, held_out = (self.script.passed(self.script.arguments.get(name)) for name in names)
        if train is None:
            problem = "the trainer has no train_dataset, and prompts are needed here"
            raise UserError(self.script.at(self.script.trainer, problem))
        shown_eval = self.script.argument("eval_dataset")
        if shown_eval is None:
            held_out = None
        elif isinstance(shown_eval, ast.IfExp):  # a project has held-out rows even if TRL skips them
            held_out = without_none(shown_eval) or held_out
        if isinstance(shown_eval, ast.Dict):
            raise UserError(
                self.script.at(shown_eval, "eval_dataset: a project has one held-out set; name one of these")
            )
        sources = {"train": self._source(train), "eval": self._source(held_out)}
        if all(sources.values()):
            for part, source in sources.items():
                self._row(f"{part}_dataset", ", ".join(map(str, (source or {}).values())), f"dataset.{part}")
            return sources
        self.files["data.py"], notes = trl_copies.data(self.script, train, held_out)
        for node, here, remark in notes:
            self._row(f"line {node.lineno}", " ".join(ast.unparse(node).split()), here, remark)
        note = "its lines are in data.py"
        self._row("train_dataset", ast.unparse(train), "dataset.train.generator", note)
        note = "a fifth of the rows, at most 500, is held out" if held_out is None else note
        shown_as = "none" if held_out is None else ast.unparse(held_out)
        self._row("eval_dataset", shown_as, "dataset.eval.generator", note)
        return {"train": {"generator": "data.py:train"}, "eval": {"generator": "data.py:held_out"}}

    def _source(self, node: ast.expr | None) -> JSON | None:
        """Translates a plain `load_dataset` into a source; None for anything else, such as one followed by `.map`."""
        split, node = None, node and self.script.resolved(node)
        if isinstance(node, ast.Subscript):
            split, node = self._value(node.slice), self.script.resolved(node.value)
        if not isinstance(node, ast.Call) or name_of(node.func) != "load_dataset":
            return None
        keywords = {name: self._value(value) for name, value in self.script.keywords(node).items()}
        keywords |= dict(zip(("path", "name"), map(self._value, node.args), strict=False))
        path, split = keywords.pop("path", None), keywords.pop("split", split)
        name, revision = keywords.pop("name", None), keywords.pop("revision", None)
        is_file = path in ("json", "parquet", "csv", "text")
        if keywords or is_file or not isinstance(path, str) or not isinstance(split, str):
            return None
        path = str(Path(path).resolve()) if Path(path).is_dir() else path
        source = {"name": path, "config_name": name, "split": split, "revision": revision}
        return {key: value for key, value in source.items() if value is not None}

    def _rewards(self, given: Sequence[float] | float | None, template: JSON | None) -> list[JSON]:
        weights = [given] if isinstance(given, int | float) else given
        target = self.script.argument("reward_funcs")
        nodes = [] if target is None else self._elements(target, "reward_funcs")
        if weights and len(weights) != len(nodes):
            problem = f"reward_weights has {len(weights)} numbers, but the script shows {len(nodes)} reward functions"
            raise UserError(self.script.at(target or self.script.trainer, f"{problem}; list all of them in one place"))
        rewards, copied = list[JSON](), dict[str, ast.expr | None]()
        for number, part in enumerate(nodes):
            made = self.script.resolved(part)
            if isinstance(made, ast.Call) and name_of(made.func) == "get_soft_overlong_punishment":
                passed = dict(zip(tables.OVERLONG_OPTIONS, made.args, strict=False)) | self.script.keywords(made)
                names = tables.OVERLONG_OPTIONS.items()
                options = {key: self._value(passed[name]) for name, key in names if name in passed}
                function: JSON | None = {"function": tables.OVERLONG, "options": options}
            elif model := self._reward_model(made):
                model |= {"chat_template_kwargs": template} if template else {}
                function = {"function": tables.REWARD_MODEL, "batch": "all", "options": model}
            else:
                function = self._function(part, "rewards.py", copied)
            is_made = isinstance(part, ast.Call | ast.Lambda)
            is_made |= isinstance(part, ast.Attribute) and not self.script.is_parsed(part.value)
            if function is None and is_made and self.script.shows(part):
                called = name_of(getattr(part, "func", part))
                copied[name := f"{called or 'reward'}_{number + 1}"] = part
                function = {"function": f"rewards.py:{name}"}
            if function is None:
                note = "write it as a function in rewards.py, and name it in rewards"
                self._row("reward_funcs", ast.unparse(part), "", note)
                continue
            if _column(function) == "reward":  # the name of the weighted sum
                function["name"] = "reward_function"
            if (name := _column(function)) in map(_column, rewards):
                function["name"] = f"{name}_{number + 1}"
            if weights and weights[number] != 1:
                function["weight"] = weights[number]
            rewards.append(function)
            is_trls = function["function"] == tables.REWARDS["accuracy_reward"]["function"]
            note = "math_reward compares by value, as TRL's does" if is_trls else ""
            self._row("reward_funcs", ast.unparse(part), f"rewards: {function['function']}", note)
        if weights:
            self._row("reward_weights", shown(weights), "rewards[].weight", "with each function")
        if (factory := self.script.argument("environment_factory")) is not None:
            rewards += self._of_environment(factory, len(rewards) == 0)
        if not rewards:
            text = "none" if target is None else ast.unparse(target)
            problem = f"its reward functions cannot be read (reward_funcs: {shown(text)}); at least one is needed"
            where = target or self.script.trainer
            raise UserError(self.script.at(where, f"{problem}, as a function or class of this file or a module"))
        if copied:
            self.files["rewards.py"] = trl_copies.functions(self.script, copied)
        return rewards

    def _of_environment(self, factory: ast.expr, alone: bool) -> list[JSON]:
        """The reward that environments give, if any does, to which TRL gives the weight 1."""
        made = [*map(self._gives_reward, factory.values if isinstance(factory, ast.Dict) else [factory])]
        if True in made or alone:
            self._row(
                "environment_factory", "get_reward", f"rewards: {tables.ENVIRONMENT_REWARD}", "weight 1, as in TRL"
            )
            return [{"function": tables.ENVIRONMENT_REWARD}]
        if None in made:
            note = f"if the environment has get_reward, add {tables.ENVIRONMENT_REWARD} to rewards"
            self._row("environment_factory", ast.unparse(factory), "", note)
        return []

    def _gives_reward(self, node: ast.expr) -> bool | None:
        """True if a class of environments has `get_reward`; None if the script does not show it."""
        found = self.script.binding(node.id, node.lineno) if isinstance(node, ast.Name) else None
        if found is None or not isinstance(found.statement, ast.ClassDef):
            return False if ast.unparse(node) in ("object", "ABC") else None
        names = {part.name for part in found.statement.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
        of_bases = [*map(self._gives_reward, found.statement.bases)]
        return True if "get_reward" in names or True in of_bases else None if None in of_bases else False

    def _function(self, node: ast.expr, file: str, copied: dict[str, ast.expr | None]) -> JSON | None:
        """Builds the reference to a function or class, which is copied from the script, or found in TRL or an imported
        module.
        """
        if not isinstance(node, ast.Name) or (found := self.script.binding(node.id, node.lineno)) is None:
            return None
        statement = found.statement
        if isinstance(found.value, ast.Name):
            return self._function(found.value, file, copied)
        is_made = isinstance(statement, ast.Assign) and isinstance(found.value, ast.Call | ast.Lambda)
        if is_made or isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if found.function or found.place is not None or not self.script.shows(found.value):
                return None
            copied[node.id] = None
            return {"function": f"{file}:{node.id}"}
        if not isinstance(statement, ast.ImportFrom) or not statement.module:
            return None
        name = next(alias.name for alias in statement.names if (alias.asname or alias.name) == node.id)
        if statement.module.partition(".")[0] == "trl":
            return {**tables.REWARDS[name]} if name in tables.REWARDS else None
        beside = self.script.path.parent / f"{statement.module}.py"
        if not beside.is_file() and any(self.script.own_modules(statement)):  # in a package, which has its own imports
            copied[node.id] = None
            return {"function": f"{file}:{node.id}"}
        if beside.is_file():
            self.beside.add(beside.resolve())
            return {"function": f"{place_in(self.folder, beside)}:{name}"}
        return {"function": f"{statement.module}:{name}"}

    def _elements(self, node: ast.expr, argument: str) -> list[ast.expr]:
        """The elements of a list. Any other expression counts as one element, as it is written in the call."""
        found = self.script.elements(node)
        return [self.script.arguments[argument]] if found is None else found

    def _tools(self, config: JSON) -> None:
        """Sets `rollout.tools` and `rollout.environment`."""
        copied = dict[str, ast.expr | None]()
        rollout = config.setdefault("rollout", {})
        for option, key in (("tools", "tools"), ("environment_factory", "environment")):
            target = self.script.argument(option)
            if target is None:
                continue
            parts = target.values if isinstance(target, ast.Dict) else self._elements(target, option)
            found = [self._function(part, "tools.py", copied) for part in parts]
            if None in found:
                raise UserError(self.script.at(target, f"{option}: name functions or classes of this file or a module"))
            functions = [reference["function"] for reference in found if reference]
            if isinstance(target, ast.Dict):
                rollout[key] = dict(zip(map(str, map(self._value, target.keys)), functions, strict=True))
            else:
                rollout[key] = functions if key == "tools" else functions[0]
            self._row(option, ast.unparse(target), f"rollout.{key}", "copied to tools.py" if copied else "")
        if copied:
            self.files["tools.py"] = trl_copies.functions(self.script, copied)


def _column(reward: JSON) -> str:
    """The name of a reward's column."""
    return str(reward.get("name") or str(reward["function"]).rpartition(":")[2])


def _deciding(rewards: Sequence[JSON]) -> str:
    """Name of the reward that decides what is right: the first one whose name suggests it, otherwise the first. A
    reward of the format decides only if all rewards are of the format. The penalty of length, which is never above 0,
    decides only if it is alone.
    """
    names = [_column(reward) for reward in rewards if reward["function"] != tables.OVERLONG] or [_column(rewards[0])]
    names = [name for name in names if "format" not in name] or names
    words = ("accura", "correct", "math", "right", "answer")
    return next((name for name in names if any(word in name for word in words)), names[0])
