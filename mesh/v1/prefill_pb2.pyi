from mesh.v1 import kvtransfer_pb2 as _kvtransfer_pb2
from mesh.v1 import sequence_pb2 as _sequence_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvDestination(_message.Message):
    __slots__ = ("address", "worker_id", "incarnation", "transfer_id", "ready_tokens", "ranks")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    READY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    address: str
    worker_id: str
    incarnation: str
    transfer_id: str
    ready_tokens: int
    ranks: _containers.RepeatedCompositeFieldContainer[_kvtransfer_pb2.KvRank]
    def __init__(self, address: _Optional[str] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., transfer_id: _Optional[str] = ..., ready_tokens: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[_kvtransfer_pb2.KvRank, _Mapping]]] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("sequence", "destination")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    sequence: _sequence_pb2.SequenceSpec
    destination: KvDestination
    def __init__(self, sequence: _Optional[_Union[_sequence_pb2.SequenceSpec, _Mapping]] = ..., destination: _Optional[_Union[KvDestination, _Mapping]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("started", "first_token", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: PrefillStarted
    first_token: _sequence_pb2.SequenceOutput
    finished: TransferFinished
    def __init__(self, started: _Optional[_Union[PrefillStarted, _Mapping]] = ..., first_token: _Optional[_Union[_sequence_pb2.SequenceOutput, _Mapping]] = ..., finished: _Optional[_Union[TransferFinished, _Mapping]] = ...) -> None: ...

class PrefillStarted(_message.Message):
    __slots__ = ("elapsed_ms",)
    ELAPSED_MS_FIELD_NUMBER: _ClassVar[int]
    elapsed_ms: float
    def __init__(self, elapsed_ms: _Optional[float] = ...) -> None: ...

class TransferFinished(_message.Message):
    __slots__ = ("bytes", "duration_ms")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    duration_ms: float
    def __init__(self, bytes: _Optional[int] = ..., duration_ms: _Optional[float] = ...) -> None: ...
