"""Rows are copied where they belong, and nothing else is touched."""

import numpy as np
import pytest

from engine.block_copy import copy_rows


def test_rows_go_where_they_are_told() -> None:
    rng = np.random.default_rng(1)
    source = rng.integers(0, 256, (9, 100), np.uint8)
    target = np.zeros((7, 100), np.uint8)
    copy_rows(target, np.array([6, 0, 3]), source, np.array([8, 1, 1]))
    assert (target[[6, 0, 3]] == source[[8, 1, 1]]).all()
    assert not target[[1, 2, 4, 5]].any()


@pytest.mark.parametrize("row", [-1, 7])
def test_rows_that_do_not_exist_are_refused(row: int) -> None:
    rows = np.zeros((7, 8), np.uint8)
    good, bad = np.array([0]), np.array([row])
    for target_rows, source_rows in ((bad, good), (good, bad)):
        with pytest.raises(IndexError, match="of 7"):
            copy_rows(rows, target_rows, rows.copy(), source_rows)


def test_what_does_not_fit_is_refused() -> None:
    rows, one = np.zeros((7, 8), np.uint8), np.array([0])
    with pytest.raises(ValueError, match="rows"):
        copy_rows(rows, one, np.zeros((7, 9), np.uint8), one)
    with pytest.raises(ValueError, match="rows"):
        copy_rows(rows, one, rows.copy(), np.array([0, 1]))
    with pytest.raises(ValueError, match="one after another"):
        copy_rows(rows, one, np.zeros((7, 16), np.uint8)[:, ::2], one)
    frozen = rows.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        copy_rows(frozen, one, rows, one)
