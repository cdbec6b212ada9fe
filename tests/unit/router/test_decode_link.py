"""What a decode worker's reasons mean for a request."""

import pytest

from mesh import wire
from mesh.domain.errors import DeadlineExceeded, InvalidRequest, ModelFailed, Replayable
from mesh.domain.tokens import SequenceFailure
from mesh.v1 import decode_pb2
from router.workers.decode_link import _error_of

FINAL = {
    SequenceFailure.TOO_LARGE: InvalidRequest,
    SequenceFailure.REFUSED: InvalidRequest,
    SequenceFailure.MODEL_FAILED: ModelFailed,
    SequenceFailure.DEADLINE: DeadlineExceeded,
}


@pytest.mark.parametrize("reason", SequenceFailure)
def test_every_reason_is_replayed_or_ends_the_request(reason: SequenceFailure) -> None:
    error = _error_of(decode_pb2.SequenceFailed(reason=wire.failure_to_proto(reason), detail="the worker's words"))
    assert isinstance(error, FINAL.get(reason, Replayable))
    assert "the worker's words" in str(error)
