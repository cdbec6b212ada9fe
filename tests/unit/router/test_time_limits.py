"""Limits of the router that must fit those of workers."""

from pathlib import Path

from kvtransfer import TransferSettings
from router.settings import RouterSettings


def test_a_reservation_lasts_as_long_as_the_router_waits_for_its_prefill(tmp_path: Path) -> None:
    """A shorter lease would take the blocks from a prompt that still waits on the prefill worker."""
    assert TransferSettings().opening_lease_s >= RouterSettings(model=str(tmp_path)).prefill_timeout_s
