import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KeepPriority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KEEP_PRIORITY_UNSPECIFIED: _ClassVar[KeepPriority]
    KEEP_PRIORITY_LOW: _ClassVar[KeepPriority]
    KEEP_PRIORITY_NORMAL: _ClassVar[KeepPriority]
    KEEP_PRIORITY_HIGH: _ClassVar[KeepPriority]
KEEP_PRIORITY_UNSPECIFIED: KeepPriority
KEEP_PRIORITY_LOW: KeepPriority
KEEP_PRIORITY_NORMAL: KeepPriority
KEEP_PRIORITY_HIGH: KeepPriority

class CacheHints(_message.Message):
    __slots__ = ("session_id", "keep_priority", "time_to_live")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KEEP_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_LIVE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    keep_priority: KeepPriority
    time_to_live: _duration_pb2.Duration
    def __init__(self, session_id: _Optional[str] = ..., keep_priority: _Optional[_Union[KeepPriority, str]] = ..., time_to_live: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
