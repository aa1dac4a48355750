"""What `rloo check` says about rewards from the data alone."""

from itertools import pairwise
from typing import Any

from helpers import mini

from rloo_pipeline.before_run import reward_audit
from rloo_pipeline.before_run.findings import Finding
from rloo_pipeline.config import Config, Reward
from rloo_pipeline.rewards.math import math_reward

MATH = "rloo_pipeline.rewards.math:math_reward"
EXACT = "rloo_pipeline.rewards.answer:exact_answer_reward"
CODE = "rloo_pipeline.rewards.code:code_reward"


def config(*rewards: dict[str, Any], **changes: Any) -> Config:
    return Config(**mini() | {"rewards": list(rewards), "evaluation": {}} | changes)


def found(column: str, values: list[Any], function: str = MATH, **reward: Any) -> list[Finding]:
    rows = [{column: value} for value in values]
    return list(reward_audit.findings(config({"function": function, **reward}), {"dataset.train": rows}))


def test_gold_answers_that_cannot_be_read_are_a_problem_that_names_their_rows() -> None:
    [finding] = found("solution", ["x=5", "???", None, "#### ", "7"])
    assert not finding.ok
    assert "4 gold answers in 'solution': 2 cannot be read: row 1 '???', row 3 '#### '" in finding.message


def test_gold_answers_that_accept_themselves_and_no_other_are_fine() -> None:
    [finding] = found(
        "answer", [rf"x^{n}+{n}" for n in range(2, 8)] + ["He has 3 + 4 = 7.\n#### 7", "12 - 5 = 7\n#### 7"]
    )
    assert (finding.ok, finding.note) == (True, False)
    assert finding.message.endswith("accept themselves, and none of 7 compared accepts its neighbour's")


def test_few_pairs_are_compared_where_golds_are_expressions_which_take_long() -> None:
    golds = {row: rf"\frac{{e^{{{row}x}}(\sin x - \cos x)}}{{2}}+C" for row in range(1000)}
    pairs = list(pairwise(golds))
    chosen = reward_audit._chosen(pairs, golds)
    assert len(chosen) == reward_audit.MOST_EXPRESSIONS
    assert chosen[-1][0] > 900, "they are spaced evenly"
    assert len(reward_audit._chosen(pairs, golds | {row: str(row) for row in range(500)})) == reward_audit.MOST_PAIRS
    assert reward_audit._chosen(pairs, dict.fromkeys(range(1000), "x+1" * 100)) == []
    assert len(reward_audit._chosen(pairs, {})) == reward_audit.MOST_PAIRS


def test_a_gold_answer_that_accepts_its_neighbours_is_shown() -> None:
    [finding] = found("answer", [r"\frac{1}{2}", "0.5", "3"])
    assert finding.note
    assert r"row 0 '\\frac{1}{2}' that of row 1 '0.5'" in finding.message


def test_a_value_that_an_exact_reward_refuses_is_a_problem() -> None:
    assert found("answer", ["a", "b"], EXACT)[0].ok
    [finding] = found("answer", ["a", 5], EXACT)
    assert "has 5 of type int" in finding.message


def test_more_rows_than_are_read_are_spaced_evenly() -> None:
    [finding] = found("answer", list(range(30_000)))
    assert "20,000 gold answers in 'answer', evenly spaced in 30,000 rows" in finding.message
    assert list(reward_audit._spaced(range(10), 4)) == [0, 2, 5, 7]


def test_time_limits_of_code_reward_that_give_none_or_fail_slow_programs_are_told() -> None:
    tests = [[{"input": "1", "output": "1"}] * 8, ["assert f(1) == 1"]]
    [note] = found("tests", tests, CODE)
    assert note.note
    assert "row 0 has 8 inputs of up to 10 s, but a row gets 40 s" in note.message
    [problem] = found("tests", tests, CODE, timeout=30, options={"timeout": 1})
    assert "row_timeout (40 s) and timeout (1 s) exceed its timeout (30 s)" in problem.message
    assert found("tests", tests, CODE, options={"timeout": 2}) == []


def test_the_reward_that_decides_what_is_right_is_said_where_there_are_several() -> None:
    first, second = {"function": "rloo_pipeline.rewards.format:think_format_reward"}, {"function": MATH, "name": "math"}
    [said] = reward_audit.findings(config(first, second), {})
    assert said.message == (
        "are those to which think_format_reward gives at least 1 (the first of rewards; correct.reward names another)"
    )
    [said] = reward_audit.findings(config(first, second, correct={"reward": "math", "threshold": 0.5}), {})
    assert said.message == "are those to which math gives at least 0.5 (correct.reward)"


def test_solutions_that_are_not_right_and_a_constant_reward_are_told() -> None:
    run = config({"function": MATH, "name": "math"}, {"function": EXACT, "name": "exact"})
    deciding, other = run.rewards
    assert "1 of 2 of these solutions are not right" in reward_audit.verdict(run, deciding, [1.0, 0.5], [0.0, 0.0])
    assert "here it does not tell the data's own solutions from wrong" in reward_audit.verdict(
        run, other, [0.2, 0.2], [0.2, 0.2]
    )
    assert reward_audit.verdict(run, deciding, [1.0, 1.0], [0.0, 0.0]) == ""
    assert reward_audit.verdict(run, other, [0.0, 0.0], [0.0, 1.0]) == ""


def test_a_gold_answer_that_is_right_in_a_box_only_accepts_itself() -> None:
    gold = r"$y_{1}=x(1-x)$" "\n" r"$y_{2}=x^{2}(1-x)$"
    assert math_reward([gold, rf"\boxed{{{gold}}}"], answer=[gold] * 2) == [0.0, 1.0]
    result = reward_audit.audit(Reward(function=MATH), [{"answer": gold}])
    assert result is not None
    assert result.not_themselves == []
