"""Encoder for AWS's binary event stream (application/vnd.amazon.eventstream), as far as a server of bytes needs it.

A message is: total length, length of the headers (both u32), CRC-32 of these eight bytes, headers, payload, CRC-32 of
all before it. A header is: length of its name (u8), name, 7 for "string", length of its value (u16), value.
"""

import struct
import zlib

MEDIA_TYPE = "application/vnd.amazon.eventstream"

_PRELUDE = struct.Struct(">II")
_CRC = struct.Struct(">I")
_VALUE_LENGTH = struct.Struct(">H")
_STRING = b"\x07"
_OVERHEAD_BYTES = _PRELUDE.size + 2 * _CRC.size


def payload_part(content: bytes) -> bytes:
    """Encode a part of the container's answer as one message."""
    return _message(
        {":message-type": "event", ":event-type": "PayloadPart", ":content-type": "application/octet-stream"}, content
    )


def model_stream_error(content: bytes) -> bytes:
    """Encode the exception message that ends a failed stream. SDKs raise it."""
    return _message(
        {":message-type": "exception", ":exception-type": "ModelStreamError", ":content-type": "application/json"},
        content,
    )


def _message(headers: dict[str, str], payload: bytes) -> bytes:
    block = b"".join(_header(name, value) for name, value in headers.items())
    prelude = _PRELUDE.pack(_OVERHEAD_BYTES + len(block) + len(payload), len(block))
    body = prelude + _CRC.pack(zlib.crc32(prelude)) + block + payload
    return body + _CRC.pack(zlib.crc32(body))


def _header(name: str, value: str) -> bytes:
    name_bytes, value_bytes = name.encode(), value.encode()
    return bytes([len(name_bytes)]) + name_bytes + _STRING + _VALUE_LENGTH.pack(len(value_bytes)) + value_bytes
