import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from mesh.v1 import kvtransfer_pb2 as _kvtransfer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_LOST: _ClassVar[WorkerState]
    WORKER_STATE_STALLED: _ClassVar[WorkerState]
    WORKER_STATE_STOPPED: _ClassVar[WorkerState]
    WORKER_STATE_SWITCHING: _ClassVar[WorkerState]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_LOST: WorkerState
WORKER_STATE_STALLED: WorkerState
WORKER_STATE_STOPPED: WorkerState
WORKER_STATE_SWITCHING: WorkerState

class WorkerRecord(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "address", "model", "tokenizer_fingerprint", "layout", "max_batch_tokens", "max_num_seqs", "num_blocks", "max_model_len", "protocol_version", "device", "pid", "speculative", "ranks", "tensor_parallel", "pipeline_parallel", "adapters", "switchable")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    SWITCHABLE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    role: WorkerRole
    address: str
    model: str
    tokenizer_fingerprint: str
    layout: _kvtransfer_pb2.KvLayout
    max_batch_tokens: int
    max_num_seqs: int
    num_blocks: int
    max_model_len: int
    protocol_version: int
    device: str
    pid: int
    speculative: str
    ranks: _containers.RepeatedCompositeFieldContainer[_kvtransfer_pb2.KvRank]
    tensor_parallel: int
    pipeline_parallel: int
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    switchable: bool
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., address: _Optional[str] = ..., model: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., layout: _Optional[_Union[_kvtransfer_pb2.KvLayout, _Mapping]] = ..., max_batch_tokens: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., protocol_version: _Optional[int] = ..., device: _Optional[str] = ..., pid: _Optional[int] = ..., speculative: _Optional[str] = ..., ranks: _Optional[_Iterable[_Union[_kvtransfer_pb2.KvRank, _Mapping]]] = ..., tensor_parallel: _Optional[int] = ..., pipeline_parallel: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., switchable: _Optional[bool] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("free_blocks", "num_running", "num_waiting", "pending_tokens", "generated_tokens", "computed_tokens", "drafted_tokens", "accepted_tokens")
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    PENDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    free_blocks: int
    num_running: int
    num_waiting: int
    pending_tokens: int
    generated_tokens: int
    computed_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    def __init__(self, free_blocks: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., pending_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class CacheEvents(_message.Message):
    __slots__ = ("first_number", "events")
    FIRST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    first_number: int
    events: _containers.RepeatedCompositeFieldContainer[CacheEvent]
    def __init__(self, first_number: _Optional[int] = ..., events: _Optional[_Iterable[_Union[CacheEvent, _Mapping]]] = ...) -> None: ...

class CacheEvent(_message.Message):
    __slots__ = ("block_hash", "evicted")
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    block_hash: bytes
    evicted: bool
    def __init__(self, block_hash: _Optional[bytes] = ..., evicted: _Optional[bool] = ...) -> None: ...

class CacheSnapshot(_message.Message):
    __slots__ = ("next_number", "block_hashes")
    NEXT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    next_number: int
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, next_number: _Optional[int] = ..., block_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("record", "heartbeat", "snapshot")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    record: WorkerRecord
    heartbeat: Heartbeat
    snapshot: CacheSnapshot
    def __init__(self, record: _Optional[_Union[WorkerRecord, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., snapshot: _Optional[_Union[CacheSnapshot, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("load", "cache_events", "state")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CACHE_EVENTS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    load: WorkerLoad
    cache_events: CacheEvents
    state: WorkerState
    def __init__(self, load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., cache_events: _Optional[_Union[CacheEvents, _Mapping]] = ..., state: _Optional[_Union[WorkerState, str]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("registered", "snapshot_request")
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_REQUEST_FIELD_NUMBER: _ClassVar[int]
    registered: Registered
    snapshot_request: SnapshotRequest
    def __init__(self, registered: _Optional[_Union[Registered, _Mapping]] = ..., snapshot_request: _Optional[_Union[SnapshotRequest, _Mapping]] = ...) -> None: ...

class Registered(_message.Message):
    __slots__ = ("heartbeat_interval",)
    HEARTBEAT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    heartbeat_interval: _duration_pb2.Duration
    def __init__(self, heartbeat_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetWorkerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetDrainingRequest(_message.Message):
    __slots__ = ("draining",)
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    def __init__(self, draining: _Optional[bool] = ...) -> None: ...

class SetDrainingResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SwitchRoleRequest(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: WorkerRole
    def __init__(self, role: _Optional[_Union[WorkerRole, str]] = ...) -> None: ...

class SwitchRoleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetWorkerResponse(_message.Message):
    __slots__ = ("record", "load")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    record: WorkerRecord
    load: WorkerLoad
    def __init__(self, record: _Optional[_Union[WorkerRecord, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ...) -> None: ...
