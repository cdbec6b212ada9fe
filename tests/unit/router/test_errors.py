"""Every error has its status."""

from mesh.domain.errors import MeshError
from mesh.rpc.status import STATUS_BY_ERROR


def subclasses(cls: type[MeshError]) -> set[type[MeshError]]:
    return {cls, *(deeper for child in cls.__subclasses__() for deeper in subclasses(child))}


def test_every_error_is_in_the_table() -> None:
    ours = {cls for cls in subclasses(MeshError) if cls.__module__.startswith("mesh.")} - {MeshError}
    assert ours == set(STATUS_BY_ERROR)
