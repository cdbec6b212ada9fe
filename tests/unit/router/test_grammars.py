"""What the router refuses before it does anything for a request."""

from pathlib import Path

import pytest

from mesh.domain.errors import InvalidRequest
from mesh.domain.request import Structure, StructureKind
from router.served_model import Grammars
from tests.fakes.router_model import write_checkpoint

GOOD = Structure(StructureKind.REGEX, "a+")


async def test_structures_are_tried(tmp_path: Path) -> None:
    grammars = Grammars(write_checkpoint(tmp_path / "tiny"))
    await grammars.check(None)
    await grammars.check(GOOD)
    with pytest.raises(InvalidRequest, match="regex cannot be used"):
        await grammars.check(Structure(StructureKind.REGEX, "(a"))
    grammars.close()


async def test_structures_can_be_turned_off(tmp_path: Path) -> None:
    """Then not even the tokenizer is looked for."""
    grammars = Grammars(tmp_path, disabled=True)
    await grammars.check(None)
    with pytest.raises(InvalidRequest, match="turned off"):
        await grammars.check(GOOD)
    grammars.close()
