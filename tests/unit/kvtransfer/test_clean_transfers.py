"""Clean transfers raise no alarm. `make chaos` does ten thousand."""

from tests.evidence import Evidence
from tests.unit.kvtransfer.clean_transfers import check_no_false_alarms


async def test_clean_transfers_raise_no_alarm(evidence: Evidence) -> None:
    await check_no_false_alarms(300, evidence)
