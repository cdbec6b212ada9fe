"""Conversion between seconds and protobuf's Duration."""

from google.protobuf.duration_pb2 import Duration


def duration_to_proto(seconds: float) -> Duration:
    """Convert seconds, with a precision of one microsecond."""
    duration = Duration()
    duration.FromMicroseconds(round(seconds * 1_000_000))
    return duration


def duration_from_proto(message: Duration) -> float:
    return message.ToMicroseconds() / 1_000_000
