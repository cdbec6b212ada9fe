"""A storm of cancellations leaves no block behind. `make chaos` repeats it."""

from tests.evidence import Evidence
from tests.service.cancel_storm import check_storms


async def test_cancel_storm(evidence: Evidence) -> None:
    await check_storms(num_runs=1, num_rounds=3, evidence=evidence)
