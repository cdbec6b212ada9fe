"""The verdict of the regression guard."""

from bench.guard import compare

STEADY = [10.0, 10.2, 9.9]


def test_slower_beyond_noise_is_counted() -> None:
    before = {"equal": STEADY, "slower": STEADY, "noisy": STEADY, "faster": STEADY, "gone": STEADY}
    after = {"equal": [10.1, 9.9, 10.0], "slower": [11.0, 10.9, 11.2], "noisy": [13.0, 9.0, 14.0], "faster": [8.0] * 3}
    table, num_slower = compare(before, after, 1.03)
    assert num_slower == 1
    verdicts = dict(zip(table.columns[0].cells, table.columns[4].cells, strict=True))
    assert verdicts == {"equal": "", "slower": "slower", "noisy": "", "faster": "faster"}


def test_a_small_difference_without_noise_is_no_verdict() -> None:
    _, num_slower = compare({"step": [10.0, 10.0]}, {"step": [10.2, 10.2]}, 1.03)
    assert num_slower == 0
