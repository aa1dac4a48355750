"""What a lag gives follows from the time of each side."""

from rloo_pipeline.before_run.queueing import SideSeconds


def test_a_round_takes_as_long_as_its_longer_side_with_a_lag() -> None:
    sides = SideSeconds(70, 30)
    assert [sides.round_seconds(lag) for lag in (0, 1, 2)] == [100, 70, 70]
