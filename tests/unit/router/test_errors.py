"""Every error has its status, and every reason of a decode worker its error."""

import pytest

from mesh import wire
from mesh.domain.errors import DeadlineExceeded, InvalidRequest, MeshError, ModelFailed, Replayable, TooLarge
from mesh.domain.tokens import SequenceFailure, failure_of
from mesh.rpc.status import STATUS_BY_ERROR
from mesh.v1 import decode_pb2
from router.workers.decode_link import _error_of

FINAL = {
    SequenceFailure.TOO_LARGE: InvalidRequest,
    SequenceFailure.REFUSED: InvalidRequest,
    SequenceFailure.MODEL_FAILED: ModelFailed,
    SequenceFailure.DEADLINE: DeadlineExceeded,
}


def subclasses(cls: type[MeshError]) -> set[type[MeshError]]:
    return {cls, *(deeper for child in cls.__subclasses__() for deeper in subclasses(child))}


def test_every_error_is_in_the_table() -> None:
    ours = {cls for cls in subclasses(MeshError) if cls.__module__.startswith("mesh.")} - {MeshError}
    assert ours == set(STATUS_BY_ERROR)


@pytest.mark.parametrize("reason", SequenceFailure)
def test_every_reason_is_replayed_or_ends_the_request(reason: SequenceFailure) -> None:
    error = _error_of(decode_pb2.SequenceFailed(reason=wire.failure_to_proto(reason), detail="the worker's words"))
    assert isinstance(error, FINAL.get(reason, Replayable))
    assert "the worker's words" in str(error)
    if reason is not SequenceFailure.TOO_LARGE:
        assert failure_of(error) is reason
    else:
        assert failure_of(TooLarge("")) is reason
