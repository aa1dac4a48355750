"""What the stage `harness` prints of a task."""

from rloo_pipeline.stages.harness import line_of


def test_a_metric_is_printed_for_each_filter_of_the_answers() -> None:
    metrics = {
        "alias": "gsm8k_cot",
        "exact_match,strict-match": 0.25,
        "exact_match_stderr,strict-match": 0.0119,
        "exact_match,flexible-extract": 0.5,
        "exact_match_stderr,flexible-extract": "N/A",
        "acc,none": 0.75,
    }
    assert line_of(metrics) == (
        "exact_match strict-match 0.25, exact_match_stderr strict-match 0.0119, exact_match flexible-extract 0.5, "
        "acc 0.75"
    )
