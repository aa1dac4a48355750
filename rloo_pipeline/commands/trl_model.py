"""Translates the models of a TRL script, with adapter and quantization, to configuration keys."""

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rloo_pipeline.commands import trl_tables as tables
from rloo_pipeline.commands.project_data import place_in
from rloo_pipeline.commands.trl_options import ArgumentRow, shown
from rloo_pipeline.commands.trl_script import TrlScript
from rloo_pipeline.commands.trl_syntax import UNSHOWN, name_of, without_none
from rloo_pipeline.commands.trl_values import UnknownValueError
from rloo_pipeline.config.section import JSON
from rloo_pipeline.errors import UserError


class TrlModel:
    """The model of a script, and the table of arguments.

    Args:
        script: the script.
        folder: the project's folder.
    """

    def __init__(self, script: TrlScript, folder: Path) -> None:
        self.script, self.folder = script, folder
        self.rows: list[ArgumentRow] = []
        self.name_in_script: Any = None
        """The model's name in the script, or that of the project if the script does not show it."""
        self.loading: dict[str, str] = {}
        """Arguments of the call that loads the model."""

    def _row(self, option: str, value: str, here: str, note: str = "") -> None:
        self.rows.append(ArgumentRow(option, shown(value), here, note))

    def _unshown(self, option: str, node: ast.expr, key: str = "the key") -> None:
        """Adds a row for an option whose value the script does not show."""
        self._row(option, ast.unparse(node), "", f"{self.script.hidden(node)}; set {key} yourself")

    def _value(self, node: ast.expr | None, default: Any = None) -> Any:
        """The value of an expression, or a default if there is none or the script does not show its value."""
        try:
            return default if node is None else self.script.value(node)
        except UnknownValueError:
            return default

    def _init_kwargs(self, known: Any, node: ast.expr | None) -> dict[str, Any]:
        """Arguments for loading the model, as values, or as expressions if the script does not show every value."""
        if known is None and node is not None and (known := self.script.entries(node)) is None:
            self._unshown("model_init_kwargs", node)
        if known is not None and not isinstance(known, dict):
            raise UserError(f"{self.script.path}: model_init_kwargs {known}: give a JSON object")
        return known or {}

    def _model(self, named: str | None, given: Mapping[str, Any]) -> JSON:
        node, target, in_4_bits = self.script.arguments.get("model"), self.script.argument("model"), False
        while isinstance(target, ast.Call) and (inner := self._wrapped(target)) is not None:
            target = inner
        if isinstance(target, ast.Call) and ast.unparse(target.func) == "PeftModel.from_pretrained":
            note = "the script trains this adapter further; merge it into its model first"
            if named is None:
                raise UserError(self.script.at(target, f"{note}, and name the merged folder with --model"))
            self._row("model", ast.unparse(target), "", f"{note}; update.lora makes a new one")
            target = None
        elif isinstance(target, ast.Call) and name_of(target.func) == "from_pretrained":
            keywords = self.script.keywords(target)
            self.loading = {name: ast.unparse(value) for name, value in keywords.items()}
            by_unsloth = isinstance(target.func, ast.Attribute) and name_of(target.func.value) in tables.UNSLOTH
            other = any(self._value(keywords.get(one)) for one in tables.OTHER_WEIGHTS)
            in_4_bits = by_unsloth and "load_in_4bit" not in keywords and not other
            target, given = _loaded(target, {**given, **keywords})
        name = self.name_in_script = self._value(target)
        option = self.script.options.get("model_name_or_path")
        if (named or option) and not isinstance(name, str) and target is not None:
            source = "--model" if named else "the option model_name_or_path"
            self._row("model", ast.unparse(target), "", f"the project has only its name, from {source}")
            name = option
        name = named or name
        self.name_in_script = self.name_in_script or name
        if not isinstance(name, str):
            shown_as = ast.unparse(node) if node is not None else "no argument"
            problem = f"the script does not show the model ({shown_as}); name it with --model"
            if isinstance(target, ast.Attribute) and self.script.is_parsed(target.value):
                as_called = f"--from-trl '{self.script.path} --{target.attr} …'"
                problem = f"{problem}, or give the options of the script, too: {as_called}"
            raise UserError(self.script.at(node or self.script.trainer, problem))
        self._row("model", name, "model.name_or_path")
        keys: JSON = {"name_or_path": place_in(self.folder, Path(name)) if Path(name).is_dir() else name}
        if "quantization_config" in self.script.arguments:
            given = {**given, "quantization_config": self.script.arguments["quantization_config"]}
        if in_4_bits:
            keys["quantization"] = "nf4"
            self._row("load_in_4bit", "true (Unsloth's default)", "model.quantization", "nf4")
        for option, value in given.items():
            if option not in tables.LOADING:
                self._init_kwarg(option, value, keys)
        return keys

    def _tokenizer(self, node: ast.expr) -> None:
        """Adds a row for the tokenizer. Only that of the model, as it is loaded, has a counterpart."""
        made, name, here = self.script.argument("processing_class"), UNSHOWN, ""
        if made is None:
            return
        made = self.script.resolved(without_none(made) or made)  # TRL loads the model's in place of None
        if isinstance(made, ast.Call) and name_of(made.func) == "from_pretrained":
            loaded, given = _loaded(made, self.script.keywords(made))
            name = self._value(loaded)
            is_models = name is None or Path(str(name)).resolve() == Path(str(self.name_in_script)).resolve()
            here = "model.name_or_path" if is_models else ""
            texts = {option: ast.unparse(value) for option, value in given.items()}
            for option, text in sorted(texts.items() - self.loading.items()):  # Unsloth loads both in one call
                if option not in tables.LOADING_TOKENIZER and text != "None":
                    self._row(f"processing_class.{option}", text, "", "the tokenizer is that of the model")
        shown_as = name if isinstance(name, str) and not here else ast.unparse(node)
        note = "the tokenizer is that of the model" + ("" if here else ", with its chat template")
        self._row("processing_class", shown_as, here, note)

    def _wrapped(self, call: ast.Call) -> ast.expr | None:
        """The model that a call returns as it is or with an adapter; None for any other call."""
        name = name_of(call.func)
        if name == "get_peft_model" and call.args:
            self.script.arguments["peft_config"] = call.args[1] if len(call.args) > 1 else call
        if name in ("get_peft_model", "prepare_model_for_kbit_training") and call.args:
            return self.script.resolved(call.args[0])
        if name in ("to", "cuda") and isinstance(call.func, ast.Attribute):
            return self.script.resolved(call.func.value)
        return None

    def _init_kwarg(self, option: str, given: Any, keys: JSON) -> None:
        """Translates an argument for loading the model into keys of `model`."""
        if option == "quantization_config":
            given = self._quantization(given)
        value = self._value(given, UNSHOWN) if isinstance(given, ast.expr) else given
        text = ast.unparse(given) if isinstance(given, ast.expr) else shown(value)
        if value is UNSHOWN and option == "quantization_config":
            self._row(option, text, "", "only 4-bit weights have a counterpart")
        elif value is UNSHOWN:
            self._unshown(option, given)
        elif option in ("dtype", "torch_dtype") and value in ("float32", "bfloat16", "float16"):
            keys["dtype"] = value
            self._row("dtype", value, "model.dtype")
        elif option == "load_in_4bit" and value:
            keys["quantization"] = "nf4"
            self._row(option, text, "model.quantization", "nf4")
        elif option in ("revision", "trust_remote_code", "quantization_config") and value not in (None, False, "main"):
            key = option.removesuffix("_config")
            keys[key] = value
            self._row(option, text, f"model.{key}")
        elif value not in (None, False, "auto", "main"):
            self._row(option, text, "")

    def _quantization(self, node: Any) -> Any:
        """`nf4`, None if the weights are not quantized, or the expression for any other quantization."""
        call = self.script.chosen(node) if isinstance(node, ast.expr) else node
        if not isinstance(call, ast.Call):
            return call
        if name_of(call.func) == "get_quantization_config":
            given = self.script.options
            return "nf4" if given.get("load_in_4bit") else call if given.get("load_in_8bit") else None
        given = self.script.keywords(call)
        if not self._value(given.get("load_in_4bit")):
            return call
        if (kind := self._value(given.get("bnb_4bit_quant_type"), "fp4")) != "nf4":  # fp4 is transformers' default
            self._row("bnb_4bit_quant_type", kind, "", "4 bits are always nf4")
        return "nf4"

    def _lora(self) -> JSON | None:
        node = self.script.arguments.get("peft_config")
        call = None if node is None else self.script.chosen(node)
        if call is None or (isinstance(call, ast.Constant) and call.value is None):
            return None
        if isinstance(call, ast.Call) and name_of(call.func) == "get_peft_config":
            given = self.script.settings(call.args[0]) if call.args else {}
            made = {key: self._value(node) for key, node in given.items()}
            values = {**tables.OF_MODEL, **self.script.options, **made}
            if not values["use_peft"]:
                return None
            known = {argument: values[option] for option, argument in tables.OF_LORA.items() if values[option]}
            options = {argument: ast.parse(repr(value), mode="eval").body for argument, value in known.items()}
        elif isinstance(call, ast.Call) and name_of(call.func) in ("LoraConfig", "get_peft_model"):
            options = self.script.keywords(call)
        else:
            text = ast.unparse(self.script.arguments["peft_config"])
            self._row("peft_config", text, "", "the script does not show a LoraConfig; set update.lora")
            return None
        # PEFT's defaults and Unsloth's, which differ from those here
        is_unsloth = name_of(call.func) == "get_peft_model"
        lora = {name: self._value(options.get(name), 16 if is_unsloth else 8) for name in ("r", "lora_alpha")}
        others = {name: self._value(options.get(name)) for name in ("lora_dropout", "use_rslora")}
        lora |= {name: value for name, value in others.items() if value is not None}
        default: list[str] | str = ["q_proj", "v_proj"]
        note = "q_proj and v_proj, PEFT's default for most models, but not for phi and nemotron_h"
        if is_unsloth:
            default, note = "all-linear", "all linear layers, Unsloth's default"
        lora["target_modules"] = self._value(options.get("target_modules")) or default
        note = "" if "target_modules" in options else note
        self._row("peft_config", ast.unparse(call), "update.lora", note)
        hidden = {name for name, node in options.items() if self._value(node, UNSHOWN) is UNSHOWN}
        for name in sorted((options.keys() - lora.keys() | hidden) - tables.LORA_SILENT):
            if name in hidden:
                self._unshown(f"peft_config.{name}", options[name])
            elif self._value(options[name]) not in (None, False, "none"):
                self._row(f"peft_config.{name}", ast.unparse(options[name]), "")
        return lora

    def _reward_model(self, made: ast.expr) -> JSON | None:
        """The options of a reward model that the script names or loads; None for any other reward."""
        given: dict[str, Any] = {"model": self._value(made)}
        if isinstance(made, ast.Call) and ast.unparse(made.func).endswith("SequenceClassification.from_pretrained"):
            nodes = dict(zip(("pretrained_model_name_or_path",), made.args, strict=False)) | self.script.keywords(made)
            values = {name: self._value(node) for name, node in nodes.items()}
            given = {"model": values.get("pretrained_model_name_or_path")}
            given |= {name: values[name] for name in ("revision", "trust_remote_code") if values.get(name)}
        if not isinstance(name := given["model"], str):
            return None
        return given | {"model": place_in(self.folder, Path(name)) if Path(name).is_dir() else name}


def _loaded(call: ast.Call, given: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The argument of `from_pretrained` that names what is loaded, and its other keyword arguments."""
    names = [name for name in ("model_name", "pretrained_model_name_or_path") if name in given]
    others = {name: value for name, value in given.items() if name not in names}
    return next(iter((*call.args, *(given[name] for name in names))), call), others
