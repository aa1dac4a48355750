"""`rloo` itself: commands for people come first, and a wrong word is one sentence with the right one."""

import re
import subprocess
import sys

import pytest

from rloo_pipeline.cli import help, main


def said_of(words: list[str], capsys) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main.main(words)
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rolout"], "rloo: error: no command 'rolout'; did you mean 'rollout'?"),
        (["pla"], "did you mean 'plan'?"),
        (
            ["plan", "--cluster-gup", "x"],
            "rloo plan: error: it takes no '--cluster-gup'; did you mean '--cluster-gpu'?",
        ),
        (["plan", "a", "b"], "rloo plan: error: it takes no 'b'"),
        (["rollout", "--round", "one"], "argument --round: invalid int value: 'one'"),
        (["watch"], "rloo watch: error: the following arguments are required: RUN"),
        ([], "rloo: error: the following arguments are required: COMMAND"),
    ],
)
def test_a_wrong_word_is_one_sentence(words, said, capsys) -> None:
    code, out, err = said_of(words, capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_commands_for_people_come_before_stages(capsys) -> None:
    code, out, _ = said_of(["--help"], capsys)
    assert code == 0
    listed = re.findall(r"^  ([a-z-]+) ", out, re.MULTILINE)
    people = [name for names in help.PEOPLE.values() for name in names]
    assert listed[: len(people)] == people
    assert {"check", "plan", "doctor", "watch", "compare", "submit", "profiles"} <= set(people)
    assert {"stage-assets", "prompts", "rollout", "update", "worker"} <= set(listed[len(people) :])
    assert out.index("stages, which Snakemake calls") > out.index("  track ")
    known = main._parser().commands
    assert known
    assert sorted(listed) == sorted(known.choices), "each command is listed once"


def test_help_needs_no_torch() -> None:
    code = "import sys; from rloo_pipeline.cli import main as cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit(bool({'torch', 'transformers', 'datasets', 'pyarrow', 'vllm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
