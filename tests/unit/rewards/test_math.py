"""math_reward on answers in the forms that models write."""

import csv
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import gsm8k_rows, needs_gsm8k

from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards.math import math_reward
from rloo_pipeline.user_code import symbolic


def score(completion: str, gold: Any, **options: Any) -> float | None:
    [value] = math_reward([completion], [gold], **options)
    return value


RIGHT = [
    ("#### 1,234", "1234"),
    ("#### $18 per day, 126 a week", "18"),
    ("#### **18**", "18"),
    ("#### 18 a day", "18"),
    ("#### 3*4 = 12", "12"),
    ("#### 42\nLet me check: 6*7 = 42, and 43 - 1 = 42; 41 is too few", "42"),
    ("#### Step 1: the eggs\n16 - 7 = 9\n\n#### **Step 2: the price**\n\nSo 9 * 2 = 18.", "18"),
    ("The answer is 18.\n#### Note\nThere are 3 others.", "18"),
    ("##### Part 2\nSo 9 * 2 = 18.", "18"),
    ("#### Step 2: 9 * 2 = 18\n", "18"),
    ("#### x = 18\nCheck: 36 / 2", "18"),
    ("She earns #### 18 in all", "18"),
    ("#### 6 p.m.", "6"),
    ("#### 18 N", "18"),
    ("#### 18 ευρώ", "18"),
    ("A: 90,000", "90000"),
    ("A: 9 + 9 = $18", "18"),
    ("She makes 9 * 2 = $<<9*2=18>>18 every day at the market.\nA: 18", "9 * 2 = $<<9*2=18>>18\nA: 18"),
    ("Answer: Janet sells 9 eggs for a total of $18.", "18"),
    ("**Final Answer:** 18 eggs in 4 days", "18"),
    ("The answer is 18.\nLet me verify: 9*2=18, and 16-7=9", "18"),
    ("The answer is: \n\n18", "18"),
    ("The answer to how many there are is 18", "18"),
    (r"The final answer is: $18$", "18"),
    (r"The answer is \(18\).", "18"),
    ("<answer>18</answer>", "18"),
    (r"<answer>\boxed{18}</answer>", "18"),
    (r"\boxed{1} or rather \boxed{2}", "2"),
    ("#### 3\n" + r"so \boxed{4}", "4"),
    (r"\boxed{\$18}", "18"),
    (r"\boxed{18\text{ dollars}}", "18"),
    (r"\boxed{1{,}234}", "1234"),
    (r"\boxed{1\,234}", "1234"),
    (r"\boxed{x = 5}", "5"),
    (r"$\boxed{18}$", "18"),
    (r"\[ 9 \times 2 = 18 \]", "18"),
    (r"\boxed{\frac{3}{4}}", "0.75"),
    (r"\boxed{1\frac{1}{2}}", "3/2"),
    (r"\boxed{1.8 \times 10^3}", "1800"),
    ("3/4 of a cup", "0.75"),
    ("1 1/2", "1.5"),
    ("1/3", "0.333333"),
    ("50%", "50"),
    ("50%", "0.5"),
    (r"\boxed{50\%}", "50"),
    ("0.5", "50%"),
    ("1.5 million dollars", "1500000"),
    ("25k", "25000"),
    ("#### 2.5e-3", "0.0025"),
    ("It is 1.8E3 m long", "1800"),
    ("0.00001", "1e-5"),
    ("$18.00", "18"),
    ("18 dollars per day", "5 + 13\n#### 18"),
    ("18€", "18"),
    ("It costs £18.", "18"),
    ("Rs. 500", "500"),
    ("Janet makes **$18** per day at the market.", "18"),
    ("So 16 - 3 - 4 = 9, and 9 * 2 = 18 dollars", "18"),
    ("The answer is -5.", "-5"),
    ("-$5", "-5"),
    ("$-5", "-5"),
    ("−5 degrees", "-5"),
    ("It is -7 degrees", "-7"),
    ("A: 0.04999999999999999", "0.05"),
    ("18 km/h", "18 km/h"),
    ("12", "12 eggs"),
    ("so he has 12.", "In the end he has 12 apples"),
    ("To get the answer we add 3 and 4. That is 7 apples", "7"),
    (r"\boxed{2\pi}", r"2\pi"),
    (r"\boxed{(3,4)}", "(3, 4)"),
    (r"\boxed{\frac{\sqrt{3}}{3}}", r"\frac{1}{\sqrt{3}}"),
    (r"\boxed{(x+1)^2}", "x^2+2x+1"),
    ("The answer is $x+1$, clearly.", "1+x"),
    (r"\boxed{\text{evelyn}}", r"\text{Evelyn}"),
    ("Answer: B", "B"),
    ("Answer: b", "(B)"),
    ("The answer is (B).", "B"),
    ("**Answer:** B) Paris", "B"),
    ("The answer is option B. It has 3 million people.", "B"),
    ("The correct answer is B because 4 is even", "B"),
    ("Answer: (B) 42", "(B)"),
    ("Answer: B - Paris", "B"),
    (r"\boxed{(B)}", "B"),
    ("So it is 4 and 5, hence option B.\nAnswer: B", "B"),
    ("The answer is B.\nNote the 2 others: their answer is obvious", "B"),
    ("We use 2 steps.\nThe answer is $x$, clearly.", "x"),
    ("We use 2 steps.\n" + r"Answer: $\frac{a}{b}$", r"\frac{a}{b}"),
    ("Answer: A) 5\nAnswer: 5", "5"),
]
WRONG = [
    ("", "42"),
    ("   \n", "42"),
    ("#### ", "42"),
    ("42\n#### ", "42"),
    (r"it is 18, so \boxed{18", "18"),
    (r"\boxed{2} or rather \boxed{1}", "2"),
    ("#### 18 or 20", "18"),
    ("#### 20 or 18", "18"),
    ("#### 18, 20", "18"),
    ("5", "-5"),
    ("-5", "5"),
    ("He has 9 -7 apples", "-7"),
    ("0.5", "50"),
    ("#### 1e3", "1"),
    ("1000001", "1000000"),
    ("1000000.5", "1000001"),
    ("A: 266", "267"),
    ("A: 2x", "2"),
    (r"\boxed{2\pi}", "2"),
    ("A: 2π", "2"),
    ("A: 2√3", "2"),
    ("A: 10²", "10"),
    (r"\boxed{2 x}", "2"),
    (r"\boxed{2 x + 1}", "2"),
    (r"\boxed{\frac{3}{4}x}", "3/4"),
    ("#### 5:30", "5:45"),
    ("It costs 3/0", "3"),
    (r"\boxed{\frac{1}{0}}", "1"),
    ("it is $x+2$, clearly.", "1+x"),
    ("12 eggs", "13 eggs"),
    ("Answer: A", "B"),
    *((f"Answer: {guesses}", "A") for guesses in ("A or B", "A, B", "(A) and (C)", "A/B", "A B C D", "not A")),
    ("The answer is a prime", "A"),
    ("Answer: N - 1", "N"),
    ("Answer: N = 2k", "N"),
    *((f"Answer: {text}", "x") for text in ("x^2", "2x", "x*2", r"\sqrt{x}", "√x", "f(x)")),
    ("Answer:", "B"),
]


@pytest.mark.parametrize(("completion", "gold"), RIGHT)
def test_right_answers_in_many_forms(completion: str, gold: str) -> None:
    assert score(completion, gold) == 1.0


@pytest.mark.parametrize(("completion", "gold"), WRONG)
def test_wrong_and_missing_answers(completion: str, gold: str) -> None:
    assert score(completion, gold) == 0.0


def test_377_pairs_of_30_kinds_score_as_they_should() -> None:
    with (Path(__file__).parent / "math_pairs.tsv").open(encoding="utf-8") as file:
        pairs = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    texts, golds = ([pair[key].replace("⏎", "\n") for pair in pairs] for key in ("completion", "gold"))
    scores = math_reward(texts, golds)
    assert [pair for pair, score in zip(pairs, scores, strict=True) if score != float(pair["right"])] == []
    assert (len(pairs), len({pair["kind"] for pair in pairs})) == (377, 30)


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("9^{9^9}", r"9^{9^{9}}", "9^{9^8}"),  # too large to compute: compared as it is written
        (r"2^{2024}", r"4^{1012}", r"2^{2024}+1"),
    ],
)
def test_large_powers_are_compared_by_value_or_as_they_are_written(gold: str, right: str, wrong: str) -> None:
    assert math_reward([rf"\boxed{{{right}}}", rf"\boxed{{{wrong}}}"], [gold, gold]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("latex", "large"),
    [
        (r"2^{2024}", False),
        (r"x^2 y^2 z^2", False),
        (r"\sum_{k=1}^{100} k", False),
        (r"9^{9^9}", True),
        (r"(1+1)^{10^9}", True),
        (r"(99999!)!", True),
        (r"\prod_{k=1}^{10^9} k", True),
        (r"10^{1000000.5}", True),
    ],
)
def test_the_size_of_an_expression_follows_from_its_values(latex: str, large: bool) -> None:
    [expression] = symbolic.parsed(latex)
    assert (symbolic.digits(expression) > symbolic.MOST_DIGITS) == large


def test_only_the_text_after_the_thinking_counts() -> None:
    assert score("<think>It is 42.</think>It is 42.", "42") == 1.0
    assert score("<think>It is 42.</think>", "42") == 0.0
    assert score("<think>It is 42.", "42") == 0.0
    assert score("<think>a</think>41<think>42", "42") == 0.0
    assert score("It is 42.", "42") == 1.0
    assert score("It is 42.", "42", after_thinking=True) == 0.0
    assert score("It is 41.</think>It is 42.", "42", after_thinking=True) == 1.0
    assert math_reward([[{"role": "assistant", "content": "<think>41</think>It is 42."}]], ["42"]) == [1.0]


@pytest.mark.parametrize(
    "completion",
    [
        *("9**9**9", "#### 9**9**9", r"\boxed{9^{9^9}}", "#### 9**99999999", r"\boxed{(9^9)^{99999}}"),
        *("#### " + "9" * 5000, "9" * 5000, r"\boxed{99999!}", r"\boxed{" + "(" * 3000, "-" * 5000, "1/" * 3000),
        *(
            "\\boxed{" * 300,
            "#### " * 2000,
            "answer is " * 2000,
            "<think>" * 3000,
            "$" * 3000,
            "1," * 3000,
            "1 1" * 2000,
        ),
        *(
            "1" + " " * 50000,
            "#### 1 " + "a" * 5000 + "@",
            "#### 1 " + "ab " * 5000 + "@",
            "<<" * 9999,
            "1\n" * 20000,
            "\n" * 20000,
        ),
    ],
)
def test_nothing_hangs(completion: str) -> None:
    began = time.process_time()
    assert score(completion, "42") == 0.0
    assert time.process_time() - began < 30, "milliseconds of CPU"


@pytest.mark.parametrize("gold", ["", "   ", None, float("nan"), "???", "#### ", "9" * 500, "no idea " * 60])
def test_an_unreadable_gold_answer_gives_none(gold: Any) -> None:
    assert math_reward(["18", "19"], [gold, "19"]) == [None, 1.0]


def test_gold_answers_come_from_the_column_answer_or_solution() -> None:
    assert math_reward(["18"], solution=[r"\boxed{18}"]) == [1.0]
    assert math_reward(["18"], answer=[18]) == [1.0]
    with pytest.raises(UserError, match="needs a column 'answer' or 'solution'"):
        math_reward(["18"])


def test_math_reward_works_in_another_thread() -> None:
    scores: list[float | None] = []
    thread = threading.Thread(target=lambda: scores.extend(math_reward([r"\boxed{2\pi}"], [r"\pi + \pi"])))
    thread.start()
    thread.join()
    assert scores == [1.0]


@needs_gsm8k
@pytest.mark.parametrize(
    "form",
    [
        "{work}\nA: {number}",
        "{work}\n\nSo the answer is $\\boxed{{{number}}}$.",
        "{work}\n\\[ \\boxed{{\\${number}}} \\]\nThat is all 3 parts.",
        "{work}\nTherefore, she has **${number}** a day.",
        "<think>{work} 17?</think>\nThe answer is {number} apples.\n\nCheck: 1 + 1 = 2",
    ],
)
def test_the_answers_of_gsm8k_are_read_in_every_form(form: str) -> None:
    golds = [row["answer"] for row in gsm8k_rows("test.jsonl")]
    parts = [gold.rpartition("####") for gold in golds]
    completions = [form.format(work=work.strip(), number=number.strip()) for work, _, number in parts]
    wrong = [form.format(work=work.strip(), number=f"{number.strip()}1") for work, _, number in parts]
    assert math_reward(completions, golds) == [1.0] * len(golds)
    assert math_reward(wrong, golds) == [0.0] * len(golds)


@pytest.mark.parametrize(
    ("gold", "other"),
    [
        (r"$y_{1}=x(1-x)$" "\n" r"$y_{2}=x^{2}(1-x)$", r"$y_{1}=x(1-x)$" "\n" r"$y_{2}=x^{3}(1-x)$"),
        (
            r"\mathbf{y}=c_{1}\left[\begin{array}{r}" "\n" r"0 \\ -1" "\n" r"\end{array}\right] e^{t}",
            r"\mathbf{y}=c_{1}\left[\begin{array}{r}" "\n" r"0 \\ 1" "\n" r"\end{array}\right] e^{t}",
        ),
    ],
)
def test_a_gold_answer_of_several_lines_is_read_as_it_is_in_a_box(gold, other) -> None:
    assert math_reward([rf"\boxed{{{gold}}}", rf"\boxed{{{other}}}"], answer=[gold] * 2) == [1.0, 0.0]
