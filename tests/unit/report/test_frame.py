"""Numbers on a page."""

from rloo_pipeline.report.frame import duration, format_number, plain, points, signed


def test_numbers_are_formatted() -> None:
    assert [format_number(value) for value in (None, "pad 0", 12345, 0.018750000000000003, 2210.4, -1e-05, -0.0)] == [
        "–",
        "pad 0",
        "12,345",
        "0.0188",
        "2,210",
        "−1e-05",
        "0",
    ]
    assert [points(value) for value in (0.123, -0.123, 0.0, -0.0001)] == ["+12.3", "−12.3", "0.0", "0.0"]
    assert [duration(value) for value in (1.5, 90, 4000, 7200)] == ["1.5 s", "1 min 30 s", "1 h 7 min", "2 h 0 min"]
    assert [plain(value) for value in (None, "grpo", True, 0.05, 2.0, [1, 2], {"a": "ü"})] == [
        "–",
        "grpo",
        "true",
        "0.05",
        "2",
        "[1, 2]",
        '{"a": "ü"}',
    ]


def test_from_1000_on_numbers_have_all_their_digits() -> None:
    assert [format_number(value) for value in (999.4, 999.5, 999.99, -999.7)] == ["999", "1,000", "1,000", "−1,000"]
    differences = (None, 0.0, -0.0, 0.0123, 12, 999.6, 1234.5, -1234.5)
    assert [signed(value) for value in differences] == (["–", "0", "0", "+0.0123", "+12", "+1,000", "+1,234", "−1,234"])
