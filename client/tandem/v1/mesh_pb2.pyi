import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from tandem.v1 import generation_pb2 as _generation_pb2
from tandem.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AdviceAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADVICE_ACTION_UNSPECIFIED: _ClassVar[AdviceAction]
    ADVICE_ACTION_ADD: _ClassVar[AdviceAction]
    ADVICE_ACTION_REMOVE: _ClassVar[AdviceAction]

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

class Shortage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SHORTAGE_UNSPECIFIED: _ClassVar[Shortage]
    SHORTAGE_DECODE_WORKER: _ClassVar[Shortage]
    SHORTAGE_DECODE_CAPACITY: _ClassVar[Shortage]
    SHORTAGE_PREFILL_CAPACITY: _ClassVar[Shortage]

class IncidentKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INCIDENT_KIND_UNSPECIFIED: _ClassVar[IncidentKind]
    INCIDENT_KIND_JOINED: _ClassVar[IncidentKind]
    INCIDENT_KIND_READY: _ClassVar[IncidentKind]
    INCIDENT_KIND_DRAINING: _ClassVar[IncidentKind]
    INCIDENT_KIND_STALLED: _ClassVar[IncidentKind]
    INCIDENT_KIND_LOST: _ClassVar[IncidentKind]
    INCIDENT_KIND_TRIPPED: _ClassVar[IncidentKind]
    INCIDENT_KIND_REPLAYED: _ClassVar[IncidentKind]
    INCIDENT_KIND_FAILED: _ClassVar[IncidentKind]
    INCIDENT_KIND_SWITCHED: _ClassVar[IncidentKind]
    INCIDENT_KIND_STOPPED: _ClassVar[IncidentKind]
ADVICE_ACTION_UNSPECIFIED: AdviceAction
ADVICE_ACTION_ADD: AdviceAction
ADVICE_ACTION_REMOVE: AdviceAction
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
SHORTAGE_UNSPECIFIED: Shortage
SHORTAGE_DECODE_WORKER: Shortage
SHORTAGE_DECODE_CAPACITY: Shortage
SHORTAGE_PREFILL_CAPACITY: Shortage
INCIDENT_KIND_UNSPECIFIED: IncidentKind
INCIDENT_KIND_JOINED: IncidentKind
INCIDENT_KIND_READY: IncidentKind
INCIDENT_KIND_DRAINING: IncidentKind
INCIDENT_KIND_STALLED: IncidentKind
INCIDENT_KIND_LOST: IncidentKind
INCIDENT_KIND_TRIPPED: IncidentKind
INCIDENT_KIND_REPLAYED: IncidentKind
INCIDENT_KIND_FAILED: IncidentKind
INCIDENT_KIND_SWITCHED: IncidentKind
INCIDENT_KIND_STOPPED: IncidentKind

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers", "queued_requests", "active_requests", "shortage", "ended_choices", "failed_choices", "replays", "incidents", "traces", "running", "advice", "traffic", "routed")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SHORTAGE_FIELD_NUMBER: _ClassVar[int]
    ENDED_CHOICES_FIELD_NUMBER: _ClassVar[int]
    FAILED_CHOICES_FIELD_NUMBER: _ClassVar[int]
    REPLAYS_FIELD_NUMBER: _ClassVar[int]
    INCIDENTS_FIELD_NUMBER: _ClassVar[int]
    TRACES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    ROUTED_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    queued_requests: int
    active_requests: int
    shortage: Shortage
    ended_choices: int
    failed_choices: int
    replays: int
    incidents: _containers.RepeatedCompositeFieldContainer[Incident]
    traces: _containers.RepeatedCompositeFieldContainer[RequestTrace]
    running: _containers.RepeatedCompositeFieldContainer[RequestTrace]
    advice: _containers.RepeatedCompositeFieldContainer[Advice]
    traffic: _containers.RepeatedCompositeFieldContainer[Traffic]
    routed: _containers.RepeatedCompositeFieldContainer[RoutedTraffic]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., queued_requests: _Optional[int] = ..., active_requests: _Optional[int] = ..., shortage: _Optional[_Union[Shortage, str]] = ..., ended_choices: _Optional[int] = ..., failed_choices: _Optional[int] = ..., replays: _Optional[int] = ..., incidents: _Optional[_Iterable[_Union[Incident, _Mapping]]] = ..., traces: _Optional[_Iterable[_Union[RequestTrace, _Mapping]]] = ..., running: _Optional[_Iterable[_Union[RequestTrace, _Mapping]]] = ..., advice: _Optional[_Iterable[_Union[Advice, _Mapping]]] = ..., traffic: _Optional[_Iterable[_Union[Traffic, _Mapping]]] = ..., routed: _Optional[_Iterable[_Union[RoutedTraffic, _Mapping]]] = ...) -> None: ...

class Traffic(_message.Message):
    __slots__ = ("name", "shares")
    class SharesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    name: str
    shares: _containers.ScalarMap[str, float]
    def __init__(self, name: _Optional[str] = ..., shares: _Optional[_Mapping[str, float]] = ...) -> None: ...

class RoutedTraffic(_message.Message):
    __slots__ = ("name", "requests", "span")
    class RequestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    name: str
    requests: _containers.ScalarMap[str, int]
    span: _duration_pb2.Duration
    def __init__(self, name: _Optional[str] = ..., requests: _Optional[_Mapping[str, int]] = ..., span: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SetTrafficRequest(_message.Message):
    __slots__ = ("traffic",)
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    traffic: Traffic
    def __init__(self, traffic: _Optional[_Union[Traffic, _Mapping]] = ...) -> None: ...

class SetTrafficResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Advice(_message.Message):
    __slots__ = ("action", "role", "reason", "model")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    action: AdviceAction
    role: WorkerRole
    reason: str
    model: str
    def __init__(self, action: _Optional[_Union[AdviceAction, str]] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., reason: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class SetDrainingRequest(_message.Message):
    __slots__ = ("worker_id", "draining")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    draining: bool
    def __init__(self, worker_id: _Optional[str] = ..., draining: _Optional[bool] = ...) -> None: ...

class SetDrainingResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SwitchRoleRequest(_message.Message):
    __slots__ = ("worker_id", "role")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: WorkerRole
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ...) -> None: ...

class SwitchRoleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetHistoryRequest(_message.Message):
    __slots__ = ("span",)
    SPAN_FIELD_NUMBER: _ClassVar[int]
    span: _duration_pb2.Duration
    def __init__(self, span: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GetHistoryResponse(_message.Message):
    __slots__ = ("points",)
    POINTS_FIELD_NUMBER: _ClassVar[int]
    points: _containers.RepeatedCompositeFieldContainer[HistoryPoint]
    def __init__(self, points: _Optional[_Iterable[_Union[HistoryPoint, _Mapping]]] = ...) -> None: ...

class HistoryPoint(_message.Message):
    __slots__ = ("age", "length", "generated_tokens", "computed_tokens", "replays", "failed_choices", "waiting", "running", "kv_used", "first_token_p50", "first_token_p95", "gap_p50", "gap_p99")
    AGE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPLAYS_FIELD_NUMBER: _ClassVar[int]
    FAILED_CHOICES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    KV_USED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_P50_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_P95_FIELD_NUMBER: _ClassVar[int]
    GAP_P50_FIELD_NUMBER: _ClassVar[int]
    GAP_P99_FIELD_NUMBER: _ClassVar[int]
    age: _duration_pb2.Duration
    length: _duration_pb2.Duration
    generated_tokens: int
    computed_tokens: int
    replays: int
    failed_choices: int
    waiting: float
    running: float
    kv_used: float
    first_token_p50: _duration_pb2.Duration
    first_token_p95: _duration_pb2.Duration
    gap_p50: _duration_pb2.Duration
    gap_p99: _duration_pb2.Duration
    def __init__(self, age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., length: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., generated_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., replays: _Optional[int] = ..., failed_choices: _Optional[int] = ..., waiting: _Optional[float] = ..., running: _Optional[float] = ..., kv_used: _Optional[float] = ..., first_token_p50: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., first_token_p95: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., gap_p50: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., gap_p99: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WorkerRecord(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "address", "model", "max_batch_tokens", "max_num_seqs", "num_blocks", "max_model_len", "device", "pid", "speculative", "tensor_parallel", "pipeline_parallel", "adapters", "switchable", "block_size", "state_blocks", "windows", "windows_are_chunks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    SWITCHABLE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    STATE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_ARE_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    role: WorkerRole
    address: str
    model: str
    max_batch_tokens: int
    max_num_seqs: int
    num_blocks: int
    max_model_len: int
    device: str
    pid: int
    speculative: str
    tensor_parallel: int
    pipeline_parallel: int
    adapters: _containers.RepeatedScalarFieldContainer[str]
    switchable: bool
    block_size: int
    state_blocks: int
    windows: _containers.RepeatedScalarFieldContainer[int]
    windows_are_chunks: bool
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., address: _Optional[str] = ..., model: _Optional[str] = ..., max_batch_tokens: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., device: _Optional[str] = ..., pid: _Optional[int] = ..., speculative: _Optional[str] = ..., tensor_parallel: _Optional[int] = ..., pipeline_parallel: _Optional[int] = ..., adapters: _Optional[_Iterable[str]] = ..., switchable: _Optional[bool] = ..., block_size: _Optional[int] = ..., state_blocks: _Optional[int] = ..., windows: _Optional[_Iterable[int]] = ..., windows_are_chunks: _Optional[bool] = ...) -> None: ...

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

class Incident(_message.Message):
    __slots__ = ("kind", "age", "worker_id", "request_id", "cause")
    KIND_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    kind: IncidentKind
    age: _duration_pb2.Duration
    worker_id: str
    request_id: str
    cause: str
    def __init__(self, kind: _Optional[_Union[IncidentKind, str]] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., worker_id: _Optional[str] = ..., request_id: _Optional[str] = ..., cause: _Optional[str] = ...) -> None: ...

class RequestTrace(_message.Message):
    __slots__ = ("request_id", "age", "prompt_tokens", "completion_tokens", "cached_tokens", "finish_reason", "error", "timing", "places")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    age: _duration_pb2.Duration
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish_reason: _sampling_pb2.FinishReason
    error: str
    timing: _generation_pb2.Timing
    places: _containers.RepeatedCompositeFieldContainer[AttemptPlace]
    def __init__(self, request_id: _Optional[str] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., finish_reason: _Optional[_Union[_sampling_pb2.FinishReason, str]] = ..., error: _Optional[str] = ..., timing: _Optional[_Union[_generation_pb2.Timing, _Mapping]] = ..., places: _Optional[_Iterable[_Union[AttemptPlace, _Mapping]]] = ...) -> None: ...

class AttemptPlace(_message.Message):
    __slots__ = ("prefill_worker", "decode_worker", "failure")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: str
    decode_worker: str
    failure: str
    def __init__(self, prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., failure: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("record", "load", "state", "last_seen", "serving", "open_transfers", "transferred_bytes", "prefilling_tokens", "canary_error")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    OPEN_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERRED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFILLING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CANARY_ERROR_FIELD_NUMBER: _ClassVar[int]
    record: WorkerRecord
    load: WorkerLoad
    state: WorkerState
    last_seen: _duration_pb2.Duration
    serving: bool
    open_transfers: int
    transferred_bytes: int
    prefilling_tokens: int
    canary_error: str
    def __init__(self, record: _Optional[_Union[WorkerRecord, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., state: _Optional[_Union[WorkerState, str]] = ..., last_seen: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., serving: _Optional[bool] = ..., open_transfers: _Optional[int] = ..., transferred_bytes: _Optional[int] = ..., prefilling_tokens: _Optional[int] = ..., canary_error: _Optional[str] = ...) -> None: ...
