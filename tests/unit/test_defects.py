"""Every defect of tests/defects.toml has a test that shows its repair, or the reason why it was kept."""

import re
from pathlib import Path

from tests.defects import ROWS

TESTS = Path(__file__).resolve().parents[1]


def test_every_defect_is_shown_or_kept() -> None:
    shown = {
        defect
        for path in TESTS.rglob("test_*.py")
        if "repaired(" in (text := path.read_text())
        for defect in re.findall(r'"([DMFS]\d+)"', text)
    }
    kept = {defect for defect, row in ROWS.items() if "kept" in row}
    assert ROWS.keys() - shown - kept == set()
