"""The table from gRPC endings to the SDK's errors, and when to try again."""

from typing import Any

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

import tandem
from mesh.domain import errors as mesh_errors
from mesh.rpc.status import status_of
from tandem._retries import ERROR_BY_NAME, RETRYABLE, RetryPolicy, error_from_rpc


def rpc_error(code: grpc.StatusCode, details: str = "why", **trailing: str) -> AioRpcError:
    metadata = Metadata(*((key.replace("_", "-"), value) for key, value in trailing.items()))
    return AioRpcError(code, Metadata(), metadata, details)


def all_subclasses(cls: type[Any]) -> set[type[Any]]:
    return {cls, *(each for child in cls.__subclasses__() for each in all_subclasses(child))}


@pytest.mark.parametrize("name", sorted(ERROR_BY_NAME))
def test_the_servers_own_errors_keep_their_kind(name: str) -> None:
    sent = getattr(mesh_errors, name)("the reason")
    code, trailing = status_of(sent)
    error = error_from_rpc(AioRpcError(code, Metadata(), Metadata(*trailing), str(sent)), "host:1")
    assert type(error) is ERROR_BY_NAME[name]
    assert str(error) == ("host:1 ended the call: the reason" if name == "RouterStopping" else "the reason")


def test_every_error_a_client_may_see_is_in_the_table() -> None:
    shown = all_subclasses(mesh_errors.MeshError) - all_subclasses(mesh_errors.Replayable) - {mesh_errors.MeshError}
    assert {cls.__name__ for cls in shown} == set(ERROR_BY_NAME)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, tandem.InvalidRequest),
        (grpc.StatusCode.NOT_FOUND, tandem.ModelNotFound),
        (grpc.StatusCode.UNAUTHENTICATED, tandem.Unauthenticated),
        (grpc.StatusCode.PERMISSION_DENIED, tandem.PermissionDenied),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, tandem.Overloaded),
        (grpc.StatusCode.UNAVAILABLE, tandem.ConnectionFailed),
        (grpc.StatusCode.DEADLINE_EXCEEDED, tandem.DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, tandem.ConnectionFailed),
        (grpc.StatusCode.FAILED_PRECONDITION, tandem.ServerMisconfigured),
        (grpc.StatusCode.INTERNAL, tandem.InternalError),
        (grpc.StatusCode.UNIMPLEMENTED, tandem.InternalError),
        (grpc.StatusCode.UNKNOWN, tandem.InternalError),
    ],
)
def test_a_bare_status_has_a_kind(code: grpc.StatusCode, kind: type[tandem.TandemError]) -> None:
    assert type(error_from_rpc(rpc_error(code), "host:1")) is kind


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE]
)
@pytest.mark.parametrize("said", ["Stream removed", "Received RST_STREAM with error code 2"])
def test_a_stream_that_something_on_the_way_has_reset_is_a_broken_connection(code: grpc.StatusCode, said: str) -> None:
    error = error_from_rpc(rpc_error(code, said), "host:1")
    assert isinstance(error, tandem.ConnectionFailed)
    assert error.broke
    own = error_from_rpc(rpc_error(code, said, tandem_error="Overloaded"), "host:1")
    assert type(own) is tandem.Overloaded
    late = error_from_rpc(rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, said), "host:1")
    assert type(late) is tandem.DeadlineExceeded


@pytest.mark.parametrize("said", ["Socket closed", "GOAWAY received", "Cancelling all calls"])
def test_a_connection_that_a_stopping_router_ends_is_a_broken_one(said: str) -> None:
    error = error_from_rpc(rpc_error(grpc.StatusCode.UNAVAILABLE, said), "host:1")
    assert isinstance(error, tandem.ConnectionFailed)
    assert error.broke
    unmade = error_from_rpc(
        rpc_error(grpc.StatusCode.UNAVAILABLE, f"failed to connect to all addresses; {said}"), "h:1"
    )
    assert isinstance(unmade, tandem.ConnectionFailed)
    assert not unmade.broke


@pytest.mark.parametrize(
    ("code", "trailing", "stopped"),
    [
        (grpc.StatusCode.UNAVAILABLE, {"tandem_error": "RouterStopping"}, True),
        (grpc.StatusCode.CANCELLED, {}, False),
    ],
)
def test_a_call_that_a_stopping_router_ends_is_a_broken_one(
    code: grpc.StatusCode, trailing: dict[str, str], stopped: bool
) -> None:
    error = error_from_rpc(rpc_error(code, "it stops", **trailing), "host:1")
    assert isinstance(error, tandem.ConnectionFailed)
    assert (error.broke, error.stopped) == (True, stopped)
    assert str(error) == "host:1 ended the call: it stops"


@pytest.mark.parametrize(("sent", "expected_s"), [("1500", 1.5), ("soon", None), ("-1", None)])
def test_the_time_to_wait_comes_in_milliseconds(sent: str, expected_s: float | None) -> None:
    error = error_from_rpc(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after_ms=sent), "host:1")
    assert isinstance(error, tandem.Overloaded)
    assert error.retry_after_s == expected_s


def test_a_message_over_grpcs_limit_is_the_requests_fault() -> None:
    error = error_from_rpc(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max"), "h:1")
    assert type(error) is tandem.InvalidRequest


@pytest.mark.parametrize("side", ["initial", "trailing"])
def test_headers_over_grpcs_limit_are_not_tried_again(side: str) -> None:
    said = f"received {side} metadata size exceeds hard limit (30072 vs. 16384)"
    error = error_from_rpc(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, said), "h:1")
    assert type(error) is tandem.InternalError
    assert "too large" in str(error)
    own = error_from_rpc(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, said, tandem_error="Overloaded"), "h:1")
    assert type(own) is tandem.Overloaded


def test_only_errors_that_pass_are_tried_again() -> None:
    policy = RetryPolicy(max_retries=2)
    for cls in all_subclasses(tandem.TandemError):
        waits = policy.delay_s(cls("x"), 0, remaining_s=60)
        assert (waits is not None) == (cls in RETRYABLE)


def test_waits_grow_and_end() -> None:
    policy = RetryPolicy(max_retries=3, initial_backoff_s=1, max_backoff_s=3)
    waits = [policy.delay_s(tandem.NoWorkers("x"), tried, remaining_s=60) for tried in range(4)]
    assert waits[3] is None
    for wait, longest in zip(waits[:3], (1, 2, 3), strict=True):
        assert wait is not None
        assert longest / 2 <= wait <= longest


def test_the_server_says_how_long_to_wait_at_least() -> None:
    wait = RetryPolicy().delay_s(tandem.Overloaded("x", retry_after_s=7), 0, remaining_s=60)
    assert wait is not None
    assert wait >= 7


def test_no_wait_passes_the_deadline() -> None:
    assert RetryPolicy().delay_s(tandem.Overloaded("x", retry_after_s=7), 0, remaining_s=6.9) is None


def test_a_closed_client_does_not_try_again() -> None:
    assert RetryPolicy().delay_s(tandem.Cancelled("x"), 0, remaining_s=60) is None
