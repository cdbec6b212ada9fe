"""The table of `make defects`."""

from types import SimpleNamespace

import pytest

from tests import defects
from tests.chaos.cluster import ROOT


def report(defect: str, *, passed: bool = True) -> SimpleNamespace:
    return SimpleNamespace(user_properties=[("repaired", (defect, "all answered"))], passed=passed)


@pytest.mark.parametrize(
    ("row", "reports", "shown"),
    [
        ({}, [report("D2")], "NOT SHOWN"),
        ({}, [report("D1")], "all answered"),
        ({}, [report("D1", passed=False)], "FAILED: all answered"),
        ({"kept": "it is cheap"}, [report("D2")], "kept: it is cheap"),
        ({"shown_by": "tests/long.py"}, [report("D2")], "shown by make chaos: tests/long.py"),
        ({"shown_by": "tests/long.py"}, [report("D1")], "all answered"),
    ],
)
def test_the_ending_of_a_row(
    row: dict[str, str], reports: list[SimpleNamespace], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {"tried": "all", "before": "none"}
    monkeypatch.setattr(defects, "ROWS", {"D1": {**plain, **row}, "D2": plain})
    assert defects.table(reports)[2] == f"     after  {shown}"


@pytest.mark.parametrize(
    ("defect", "file"), [(name, row["shown_by"]) for name, row in defects.ROWS.items() if "shown_by" in row]
)
def test_a_row_that_make_chaos_shows_names_its_test(defect: str, file: str) -> None:
    text = (ROOT / file).read_text()
    assert f'repaired("{defect}"' in text
    assert "pytest.mark.soak" in text
