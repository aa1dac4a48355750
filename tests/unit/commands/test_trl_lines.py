"""`rloo init --from-trl`: the modules that a script uses, and the options that its lines set, are read as they run."""

import sys
from pathlib import Path
from unittest import mock

import pytest
import yaml
from helpers import printed
from trl_scripts import GRPO, SMALL, project

from rloo_pipeline.commands import trl_copies
from rloo_pipeline.commands.init import init_from_trl
from rloo_pipeline.commands.trl_script import TrlScript
from rloo_pipeline.errors import UserError
from rloo_pipeline.import_string import load as load_function


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("lines", "rewards", "modules"),
    [
        ("from rewards import exact\ndef same(**kw): return exact(**kw)", ["same"], {"rewards"}),
        ("import own.rewards\ndef same(**kw): return own.rewards.exact(**kw)", ["same"], {"own.rewards"}),
        ("def same(**kw):\n    from own import rewards\n    return rewards.exact(**kw)", ["same"], {"own.rewards"}),
        ("import own.rewards as mine", ["mine.exact"], {"own.rewards"}),
        ("from own.rewards import exact", ["exact"], {"own.rewards"}),
        ("from own.rewards import exact\nfrom top import exact as other", ["exact", "other"], {"own.rewards", "top"}),
        ("from rewards import exact", ["exact"], set()),
    ],
)
def test_copies_find_the_modules_of_their_script_which_a_run_does_not_copy(lines, rewards, modules, monkeypatch):
    Path("code/own").mkdir(parents=True)
    helper = "def exact(completions, **kwargs): return [1.0 for _ in completions]\n"
    for file, text in {"top.py": helper, "code/own/helper.py": helper, "code/rewards.py": helper}.items():
        Path(file).write_text(text)
    Path("code/own/rewards.py").write_text("from own.helper import exact\n")
    script = lines + "\n" + SMALL.format(options="").replace(" length,", f" [{', '.join(rewards)}],")
    Path("code/train.py").write_text(script)
    output = " ".join(printed(init_from_trl, Path("project"), "code/train.py", None, False).split())
    missing = output[output.index("Without a counterpart") :] if modules else ""
    for module in modules:
        where = Path("code" if module != "top" else "").resolve()
        assert f"import: {module} stays in {where}; a run does not copy it" in missing
    assert output.count("import: ") == len(modules)
    monkeypatch.chdir("project")
    monkeypatch.setattr(sys, "path", [*sys.path])
    config = yaml.safe_load(Path("config/config.yaml").read_text())
    with mock.patch.dict(sys.modules):  # forgets them afterwards
        for entry in config["rewards"]:
            assert load_function(entry["function"])(completions=["a", "b"]) == [1.0, 1.0]


def test_relative_imports_of_a_script_are_those_of_its_package(monkeypatch) -> None:
    Path("code/own").mkdir(parents=True)
    helper = "def exact(completions, **kwargs): return [1.0 for _ in completions]\n"
    for name, text in {"__init__": "", "helper": helper, "own_rewards": "from .helper import exact\n"}.items():
        Path(f"code/own/{name}.py").write_text(text)
    lines = "from .own_rewards import exact\nfrom . import helper as h\ndef same(**kw): return h.exact(**kw)\n"
    Path("code/own/train.py").write_text(lines + SMALL.format(options="").replace(" length,", " [exact, same],"))
    monkeypatch.chdir("code/own")
    printed(init_from_trl, Path("project"), "train.py", None, False)
    monkeypatch.chdir("project")
    monkeypatch.setattr(sys, "path", [*sys.path])
    config = yaml.safe_load(Path("config/config.yaml").read_text())
    with mock.patch.dict(sys.modules):
        assert [load_function(one["function"])(completions=["a"]) for one in config["rewards"]] == [[1.0], [1.0]]


def test_a_relative_import_stays_in_a_folder_whose_name_is_none_of_a_package() -> None:
    Path("my-code").mkdir()
    Path("my-code/train.py").write_text("from .own import exact\n" + SMALL.format(options=""))
    assert TrlScript("my-code/train.py").text.startswith("from .own import exact\n")


COPIES = """
base = GRPOConfig("out", learning_rate=1e-5, beta=0.1, max_steps=5)
base.temperature = 0.6
{copies}
base.temperature = 0.5
"""


@pytest.mark.parametrize(
    ("copies", "beta", "rounds"),
    [
        ("config = dataclasses.replace(base, beta=0.3)", 0.3, 5),
        ("config = replace(replace(base, beta=0.3, max_steps=7), beta=0.2)", 0.2, 7),
        ("config = copy.deepcopy(base)\nconfig.beta = 0.4", 0.4, 5),
    ],
)
def test_a_copy_of_options_has_those_that_were_set_before_it_was_made(copies, beta, rounds) -> None:
    script = GRPO.format(options="").replace('GRPOConfig("out", )', "config")
    config, output = project(script.replace("\nGRPOTrainer(", COPIES.format(copies=copies) + "GRPOTrainer("))
    assert (config["algorithm"]["beta"], config["rounds"], config["rollout"]["temperature"]) == (beta, rounds, 0.6)
    assert config["update"]["learning_rate"] == 1e-5
    left = output.partition("Without a counterpart")[2]
    assert "config" not in left.partition("Next")[0]
    assert ("temperature = 0.6" in left, "temperature = 0.5" in left) == (False, True)


def test_a_call_that_may_set_options_before_they_are_copied_is_listed() -> None:
    copies = "set_up(base)\nconfig = dataclasses.replace(base, beta=0.3)"
    script = GRPO.format(options="").replace('GRPOConfig("out", )', "config")
    output = project(script.replace("\nGRPOTrainer(", COPIES.format(copies=copies) + "GRPOTrainer("))[1]
    assert "set_up(base)" in output.partition("Without a counterpart")[2]


REGISTRY = """
parser = ArgumentParser()
parser.add_argument("--names", nargs="+", default=["exact", "long"])
options = parser.parse_args()
def exact(completions, **kwargs): return [1.0 for _ in completions]
TABLE = {"exact": exact, "long": lambda completions, **kwargs: [2.0 for _ in completions]}
TABLE["short"] = length
def chosen(names):
    own = {"exact": exact}
    return [own.get(name) for name in names]
"""


@pytest.mark.parametrize(
    ("functions", "words", "rewards"),
    [
        ("[TABLE[name] for name in options.names]", "", [1.0, 2.0]),
        ("[TABLE[name] for name in options.names]", "--names short", [3.0]),
        ("[TABLE.get(name) for name in ('long', 'exact')]", "", [2.0, 1.0]),
        ("chosen(options.names)", "--names exact", [1.0]),
    ],
)
def test_reward_functions_that_a_table_names_are_those_of_the_names(functions, words, rewards, monkeypatch) -> None:
    config, _ = project(REGISTRY + SMALL.format(options="").replace(" length,", f" {functions},"), words)
    monkeypatch.chdir("project")
    assert [load_function(entry["function"])(["abc"]) for entry in config["rewards"]] == [[one] for one in rewards]


def test_a_name_that_is_not_in_the_table_of_reward_functions_is_refused() -> None:
    script = REGISTRY + SMALL.format(options="").replace(" length,", " [TABLE[name] for name in options.names],")
    with pytest.raises(UserError, match=r"line 16: TABLE has no exakt; name one of exact, long, short$"):
        project(script, "--names exact exakt")


@pytest.mark.parametrize(
    "parsing",
    [
        "script_args, training_args = parser.parse_args_and_config()[:2]",
        "training_args = parser.parse_args_and_config()[1]\nscript_args = parser.parse_args_and_config()[0]",
        "parsed = parser.parse_args_into_dataclasses()\nscript_args, training_args = parsed[0], parsed[1]",
        "parsed = parser.parse_args_into_dataclasses()\nscript_args, training_args = parsed[:2]",
    ],
)
def test_a_part_of_the_parsed_options_is_read_as_such(parsing, monkeypatch) -> None:
    Path("train.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(5)))
    config, _ = project(PARTS.format(parsing=parsing, lines=""), "--file train.jsonl --beta 0.2 --max_steps 7")
    assert (config["algorithm"]["beta"], config["rounds"]) == (0.2, 7)
    monkeypatch.chdir("project")
    assert len(load_function("data.py:train")()) == 4
    assert "parser" not in Path("data.py").read_text()


PARTS = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, TrlParser
class Script: file: str
def length(completions, **kwargs): return [float(len(text)) for text in completions]
parser = TrlParser((Script, GRPOConfig))
{parsing}
{lines}
rows = load_dataset("json", data_files=script_args.file, split="train")
GRPOTrainer("org/model", length, training_args, rows).train()
"""


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("training_args.beta = 0.3", "algorithm.beta", 0.3),
        ("training_args.beta: float = 0.3", "algorithm.beta", 0.3),
        ("setattr(training_args, 'beta', 0.3)", "algorithm.beta", 0.3),
        ("training_args.max_steps += 2", "rounds", 9),
        ("script_args.beta = training_args.beta = 0.3", "algorithm.beta", 0.3),
        ("mine = training_args\nmine.beta = 0.3", "algorithm.beta", 0.3),
        ("training_args.temperature = 0.5", "rollout.temperature", 0.7),  # main sets it afterwards
    ],
)
def test_an_option_that_a_line_sets_after_parsing_is_read_in_each_form_and_under_each_name(line, key, value) -> None:
    above, _, makes = PARTS.partition("{lines}")
    main = "def main(args):\n    args.temperature = 0.7\n" + makes.replace("training_args", "args").replace(
        "\n", "\n    "
    )
    top, _, parser = above.partition("parser = ")
    script = f"{top}{main}\nparser = {parser}{line}\nmain(training_args)\n"
    script = script.format(parsing="script_args, training_args = parser.parse_args_and_config()")
    config, output = project(script.replace("script_args.file", "'f'"), "--beta 0.2 --max_steps 7")
    for name in key.split("."):
        config = config[name]
    assert config == value
    assert "line " not in output.partition("Without a counterpart")[2]


def test_options_that_a_line_sets_by_names_that_the_script_does_not_show_are_listed() -> None:
    lines = "for name in NAMES: setattr(training_args, name, 1)"
    parsing = "script_args, training_args = parser.parse_args_and_config()"
    _, output = project(PARTS.format(parsing=parsing, lines=lines).replace("script_args.file", "'f'"))
    assert "for name in NAMES: setattr(training_args, name, 1)" in output


@pytest.mark.parametrize(
    ("lines", "value", "part", "line"),
    [
        ("rate = float(\n    os.environ['RATE'])", "rate", "os.environ['RATE']", 3),
        ("from settings import RATE\nrate = 2 * RATE", "rate", "RATE", 2),
        ("SETTINGS = {\n    'rate': rate_of()}", "SETTINGS['rate'] / 2", "rate_of()", 3),
        ("if small():\n    rate = 1e-5\nelse:\n    rate = 1e-6", "rate", "rate", 2),
        ("def rate(config): return config.optim.rate", "rate(load('a.yaml'))", "config.optim.rate", 2),
    ],
)
def test_the_part_of_an_option_that_holds_its_value_is_named_with_its_line(lines, value, part, line) -> None:
    _, output = project(f"\n{lines}\n" + SMALL.format(options=f"learning_rate={value}, weight_decay=0.1"))
    missing = " ".join(output[output.index("Without a counterpart") :].split())
    assert f"the script does not show its value (script.py:{line}: {part}); set" in missing
    assert "weight_decay" not in missing


def test_a_line_of_the_data_names_the_value_that_it_lacks() -> None:
    script = SMALL.format(options="").replace('load_dataset("org/data", split="train")', "rows.select(range(count))")
    script = script.replace("RLOOTrainer(", "def main(count):\n  rows = load_dataset('json')\n  RLOOTrainer(").replace(
        "\n    load", "load"
    )
    with pytest.raises(
        UserError, match=r"line 8: the script does not show its value \(script.py:9: sizes\(\)\); write it"
    ):
        project(script + "main(sizes())")


@pytest.mark.parametrize(
    ("kind", "options", "told", "rows"),
    [
        (
            "GRPO",
            "use_vllm=True, beta=0.1",
            7,
            [
                "max_completion_length: 512 (TRL's default since 1.10, 256 before)",
                "temperature: 1.0 (TRL's default since 0.18, 0.9 before) rollout.temperature",
                "top_k: 0 (TRL's default since 0.18, 50 before) rollout.top_k",
                "loss_agg_mode: token_mean; TRL's default since 0.22, bnpo before",
                "which TRL keeps; TRL's default since 0.26, 512 before",
                "placement: loss, estimator: k3; TRL's default since 1.10, false before",
                "max: 3.0; TRL's default since 0.26, token_truncate at 2.0, or none, before",
            ],
        ),
        (
            "GRPO",
            "temperature=0.9, top_k=5, loss_type='bnpo'",
            3,
            ["beta: 0.0 (TRL's default since 0.19, 0.04 before)"],
        ),
        ("RLOO", "", 2, ["256 before)", "which TRL keeps; TRL's default since 0.27, 512 before"]),
    ],
)
def test_a_default_that_trl_has_changed_is_told_with_its_release(kind, options, told, rows, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    config, output = project(SMALL.replace("RLOO", kind).format(options=options))
    words = " ".join(output.split())
    assert [row for row in rows if row not in words] == []
    assert words.count("default since") == told, "not of an option that the script sets"
    assert config["rollout"].get("temperature") == (0.9 if "0.9" in options else None), "the default here is TRL's"


@pytest.mark.parametrize(
    ("option", "key", "default", "default_of"),
    [
        ("learning_rate", "update.learning_rate", "1e-06", "learning_rate"),
        ("beta", "algorithm.beta", "0.0", "beta"),
        ("loss_type", "algorithm", "dapo", "loss_type"),
        ("max_steps", "rounds", "100", "num_train_epochs"),
    ],
)
def test_an_option_without_a_shown_value_is_one_row_with_the_default_that_its_key_has(
    option, key, default, default_of
) -> None:
    _, output = project(GRPO.format(options=f"{option}=read()"))
    words = " ".join(output.split())
    note = f"the script does not show its value (script.py:6: read()); set {key} (now {default}) yourself"
    assert f"{option}: read() {note}" in words
    assert words.count(f" {option}: ") == 1
    assert words.count(f" {default_of}: ") == (option == default_of)


SET = "training_args.reward_weights = "


@pytest.mark.parametrize(
    "lines",
    [
        f"if hasattr(script_args, 'weights') and script_args.weights:\n    {SET}script_args.weights",
        f"{SET}getattr(script_args, 'weights', None)",
        f"{SET}script_args.weights if hasattr(script_args, 'weights') else None",
        f"weights = getattr(script_args, 'weights', None)\nif weights is not None:\n    {SET}weights",
        "def set_up(mine, given):\n    mine.reward_weights = given.weights\nset_up(training_args, script_args)",
    ],
)
def test_weights_of_rewards_are_those_that_the_script_takes_from_its_options_in_each_form(lines) -> None:
    parsing = "script_args, training_args = parser.parse_args_and_config()"
    script = PARTS.format(parsing=parsing, lines=lines).replace("str\n", "str; weights: list = None\n", 1)
    assert "weight" not in project(script, "--file f")[0]["rewards"][0]
    config, output = project(script, "--file f --weights 2", "other")
    assert config["rewards"][0]["weight"] == 2
    assert "line " not in output.partition("Without a counterpart")[2]


@pytest.mark.parametrize(
    ("lines", "is_told"),
    [
        ("from mine import set_up\nset_up(training_args)", True),
        ("def set_up(mine): log(mine)\nset_up(training_args)", False),
        ("from mine import set_up\nset_up(training_args.seed)", False),
        ("if hasattr(torch, 'xpu'): training_args.beta = 0.1", True),
    ],
)
def test_a_call_that_may_set_options_where_the_script_does_not_show_it_is_listed(lines, is_told) -> None:
    parsing = "script_args, training_args = parser.parse_args_and_config()"
    _, output = project(PARTS.format(parsing=parsing, lines=lines), "--file f")
    assert (f": {lines.splitlines()[-1]}" in output) == is_told
    assert output.partition("Without a counterpart")[2].count("line ") == is_told


HYDRA = """
import hydra
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
def length(completions, **kwargs): return [float(len(text)) for text in completions]

@hydra.main(config_path="conf", config_name="grpo")
def main(cfg):
    rows = load_dataset("org/data", split="train")
    config = GRPOConfig(
        loss_type="mine",
    )
    GRPOTrainer(
        model="m",
        reward_funcs=length,
        args=config,
        train_dataset=rows,
    ).train()
main()
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "", r"script\.py, line 10: loss_type mine: has no counterpart"),
        ('"m"', "cfg.model.path", r"script\.py, line 14: the script does not show the model \(cfg\.model\.path\)"),
        ('model="m",', "", r"script\.py, line 13: the script does not show the model \(no argument\)"),
        ("=length,", "=get(cfg.rewards),", r"script\.py, line 15: its reward functions cannot be read"),
        ("=length,", "=[length, length],", r"script\.py, line 15: reward_weights has 1 numbers"),
        ("train_dataset=rows,", "", r"script\.py, line 13: the trainer has no train_dataset"),
        ("train_dataset=rows", "reward_model=rm", r"script\.py, line 13: the trainer's reward_model belongs"),
        ("args=config", "args=cfg.training", r"script\.py, line 16: write the call of GRPOConfig here"),
    ],
)
def test_a_refusal_of_settings_from_other_files_names_the_line(old, new, message) -> None:
    script = HYDRA.replace('loss_type="mine"', "reward_weights=[1]") if old else HYDRA
    with pytest.raises(UserError, match=message):
        project(script.replace(old, new) if old else script)


def test_data_that_need_an_option_do_not_copy_the_lines_that_set_others(monkeypatch) -> None:
    Path("train.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(10)))
    parsing = "script_args, training_args = parser.parse_args_and_config()"
    lines = "training_args.model_init_kwargs = dict(use_cache=not training_args.gradient_checkpointing)\n"
    lines += "training_args.file = 'train.jsonl'"
    project(PARTS.format(parsing=parsing, lines=lines).replace("script_args.file", "training_args.file"))
    assert "use_cache" not in Path("project/data.py").read_text()
    monkeypatch.chdir("project")
    assert len(load_function("data.py:train")()) == 8


def test_a_bar_in_an_expression_is_none_of_the_table_in_the_readme() -> None:
    project(SMALL.format(options="learning_rate=rates() | more()"))
    assert r"`learning_rate`: rates() \| more() | – | the script does not show its value (script.py:6: " in (
        readme := Path("project/README.md").read_text()
    )
    assert "script.py:6: rates())" in readme


CONFIG = """
import mine
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
class Other(GRPOConfig): beta: float = 0.8
def length(completions, **kwargs): return [float(len(text)) for text in completions]
def tune(c):
    c.beta = 0.9
def override(c, options):
    for name, value in options.items(): setattr(c, name, value)
def mixed(config, c):
    config.beta = 0.9
    c.temperature = 0.4
config = GRPOConfig(beta=0.1)
{lines}
GRPOTrainer("org/model", length, config, load_dataset("org/data", split="train")).train()
{after}
"""


@pytest.mark.parametrize(
    ("lines", "beta", "temperature"),
    [
        ("tune(config)\nconfig.beta = 0.5", 0.5, None),
        ("config.beta = 0.5\ntune(c=config)", 0.9, None),
        ("config = same(config)\nconfig.beta = 0.5", 0.5, None),
        ("tune(config)\nconfig.temperature = config.beta", 0.9, 0.9),
        ("c = config\nc.beta = 0.4\nconfig.temperature = config.beta", 0.4, 0.4),
        ("config.beta = 0.4\nconfig = GRPOConfig(beta=0.3)", 0.3, None),
        ("mixed(Other(), config)", 0.1, 0.4),
        ("def tune(c):\n    c.beta = 0.9\n    return 1\ndone = tune(config)", 0.9, None),
        ("def off(c):\n    if 1 > 0: return\n    c.beta = 0.9\noff(config)", 0.1, None),
        ("config = GRPOConfig()", 0.0, None),  # the fields of another class are not read
    ],
)
def test_lines_that_set_options_count_in_the_order_in_which_they_run_and_for_their_own_object(
    lines, beta, temperature
) -> None:
    script = CONFIG.format(lines=lines, after="config.beta = 0.7")
    script = script.replace("def mixed", "def same(c):\n    c.beta = 0.9\n    return c\ndef mixed")
    config, _ = project(script)
    assert (config["algorithm"]["beta"], config["rollout"].get("temperature")) == (beta, temperature)


@pytest.mark.parametrize(
    "lines",
    [
        "mine.tune(config)",
        "mine.tune(c=config)",
        "if mine.here(): tune(config)",
        "done = mine.set_up(config)",
        "done: bool = mine.set_up(config)",
        "def tune(c): vars(c)['beta'] = 0.9\ntune(config)",
        "vars(config).setdefault('beta', 0.5)",
        "vars(config)['beta'] = 0.5",
        "config.__dict__['beta'] = 0.5",
        "config.__dict__.update(beta=0.5)",
        "config.set_training(learning_rate=0.1)",
        "for name, value in options.items(): setattr(c, name, value)",
    ],
)
def test_a_line_that_may_set_options_is_listed_in_each_form(lines) -> None:
    called = "override(config, {'beta': 0.5})" if "setattr" in lines else lines
    config, output = project(CONFIG.format(lines=called, after=""))
    shown = lines.partition("\n")[0].removeprefix("def tune(c): ")
    assert f": {shown}" in " ".join(output.partition("Without a counterpart")[2].split())
    assert config["algorithm"]["beta"] == 0.1


def test_an_option_of_the_command_line_stays_if_a_function_sets_it_too() -> None:
    parse = (
        "def parse():\n    mine, given = parser.parse_args_and_config()\n    given.beta = 0.3\n    return mine, given\n"
    )
    script = PARTS.format(parsing=f"{parse}script_args, training_args = parse()", lines="")
    config, output = project(script, "--file f --beta 0.2")
    assert config["algorithm"]["beta"] == 0.2
    assert "given.beta = 0.3" in output.partition("Without a counterpart")[2], "which the table tells"


def test_reward_functions_that_a_line_adds_to_are_refused_with_their_line() -> None:
    script = CONFIG.replace(", length, config", ", functions, config")
    script = script.format(lines="functions = [length]\nfunctions += [mine.reward]", after="")
    with pytest.raises(UserError, match=r"line 17: its reward functions cannot be read \(reward_funcs: functions\)"):
        project(script)


def test_a_script_that_cannot_run_is_refused_as_one_that_shows_too_little() -> None:
    for lines in ("one, config = (1,)", "def main(config):\n    main(config)"):
        script = CONFIG.format(lines=lines, after="")
        script = script.replace("\nGRPOTrainer", "\n    GRPOTrainer") if "main" in lines else script
        with pytest.raises(UserError, match=r"line 1[67]: write the call of GRPOConfig here"):
            project(script)


def test_a_parameter_hides_a_variable_of_the_script_with_its_name() -> None:
    script = CONFIG.format(lines="def main(config):", after="main(GRPOConfig(beta=0.6))")
    config, _ = project(script.replace("\nGRPOTrainer", "\n    config.temperature = 0.4\n    GRPOTrainer"))
    assert (config["algorithm"]["beta"], config["rollout"]["temperature"]) == (0.6, 0.4)


def test_a_data_file_that_is_not_where_the_script_was_read_is_told() -> None:
    Path("here.csv").write_text("prompt\na\n")
    data = """
import os
FOLDER = "there"
def rows_of(name): return load_dataset("json", data_files=os.path.join(FOLDER, name))
train = load_dataset("csv", data_files={"train": ["here.csv", "data/train.csv"], "test": FOLDER + "/plus.csv"})
test = rows_of("own.jsonl")
"""
    script = SMALL.format(options="").replace("\nRLOOTrainer", f"{data}RLOOTrainer")
    script = script.replace('load_dataset("org/data", split="train")', "train")
    script = script.replace('load_dataset("org/data", "main", split="test")', "test")
    _, output = project(script)
    missing = " ".join(output.partition("Without a counterpart")[2].split())
    assert "file: data/train.csv is not here; if it is not on the Hub, write its path into data.py" in missing
    assert missing.count("is not here") == 1


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("load_dataset('csv', data_files='data/train.csv')['train'].to_list()", {"data/train.csv"}),
        ("[open('data/words.txt'), open('log.txt', 'a'), open('log.txt', mode='w')]", {"data/words.txt"}),
        (
            "[Path('data/train.csv'), Path('data', 'test.csv'), Path(os.path.expanduser('~/own.csv'))]",
            {"data/train.csv"},
        ),
        ("load_dataset('rows', data_files='train.csv')", set()),
        ("load_dataset('csv', data_dir='rows', data_files='train.csv')", set()),
        ("rows.to_csv('rows.csv')", set()),
    ],
)
def test_only_files_to_read_from_the_scripts_folder_are_missing(line, missing) -> None:
    Path("rows").mkdir()
    assert trl_copies.missing_files(line) == missing


def test_a_folder_of_rows_beside_the_script_is_found_from_the_project(monkeypatch) -> None:
    for folder in ("sums", "csv"):
        Path(folder).mkdir()
        for split in ("train", "test"):
            Path(folder, f"{split}.csv").write_text(f"prompt,answer\n{split},1\n")
    script = SMALL.format(options="").replace("org/data", "sums").replace('"main", ', "")
    config, _ = project(script)
    assert config["dataset"]["train"] == {"name": str(Path("sums").resolve()), "split": "train"}
    script = script.replace('"sums", split="test")', "'csv', data_files='csv/test.csv', split='train')")
    project(script, folder="other")
    monkeypatch.chdir("other")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(Path("cache").resolve()))
    assert load_function("data.py:train")() == [{"prompt": "train", "answer": 1}]
    assert load_function("data.py:held_out")() == [{"prompt": "test", "answer": 1}]
