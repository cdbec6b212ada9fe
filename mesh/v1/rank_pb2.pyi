from mesh.v1 import kvtransfer_pb2 as _kvtransfer_pb2
from tandem.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("hello", "checked", "loaded", "ready", "leaving", "failed", "loading")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    hello: RankHello
    checked: RankChecked
    loaded: RankLoaded
    ready: RankReady
    leaving: RankLeaving
    failed: RankFailed
    loading: RankLoading
    def __init__(self, hello: _Optional[_Union[RankHello, _Mapping]] = ..., checked: _Optional[_Union[RankChecked, _Mapping]] = ..., loaded: _Optional[_Union[RankLoaded, _Mapping]] = ..., ready: _Optional[_Union[RankReady, _Mapping]] = ..., leaving: _Optional[_Union[RankLeaving, _Mapping]] = ..., failed: _Optional[_Union[RankFailed, _Mapping]] = ..., loading: _Optional[_Union[RankLoading, _Mapping]] = ...) -> None: ...

class RankHello(_message.Message):
    __slots__ = ("rank", "group_size", "versions")
    RANK_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    group_size: int
    versions: str
    def __init__(self, rank: _Optional[int] = ..., group_size: _Optional[int] = ..., versions: _Optional[str] = ...) -> None: ...

class RankChecked(_message.Message):
    __slots__ = ("model_fingerprint",)
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    def __init__(self, model_fingerprint: _Optional[str] = ...) -> None: ...

class RankLoading(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankLoaded(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class RankReady(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankLeaving(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankFailed(_message.Message):
    __slots__ = ("reason", "is_configuration")
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    reason: str
    is_configuration: bool
    def __init__(self, reason: _Optional[str] = ..., is_configuration: _Optional[bool] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("setup", "admitted", "allocate", "step", "copy")
    SETUP_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    ALLOCATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    setup: RankSetup
    admitted: RankAdmitted
    allocate: RankAllocate
    step: RankStep
    copy: RankCopy
    def __init__(self, setup: _Optional[_Union[RankSetup, _Mapping]] = ..., admitted: _Optional[_Union[RankAdmitted, _Mapping]] = ..., allocate: _Optional[_Union[RankAllocate, _Mapping]] = ..., step: _Optional[_Union[RankStep, _Mapping]] = ..., copy: _Optional[_Union[RankCopy, _Mapping]] = ...) -> None: ...

class RankSetup(_message.Message):
    __slots__ = ("num_ranks", "settings", "group")
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    num_ranks: int
    settings: str
    group: str
    def __init__(self, num_ranks: _Optional[int] = ..., settings: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class RankAdmitted(_message.Message):
    __slots__ = ("host",)
    HOST_FIELD_NUMBER: _ClassVar[int]
    host: str
    def __init__(self, host: _Optional[str] = ...) -> None: ...

class RankAllocate(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class RankStep(_message.Message):
    __slots__ = ("command", "token_ids", "positions", "sequences")
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    command: bytes
    token_ids: bytes
    positions: bytes
    sequences: bytes
    def __init__(self, command: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., positions: _Optional[bytes] = ..., sequences: _Optional[bytes] = ...) -> None: ...

class RankCopy(_message.Message):
    __slots__ = ("source", "target")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    source: int
    target: int
    def __init__(self, source: _Optional[int] = ..., target: _Optional[int] = ...) -> None: ...

class KvReport(_message.Message):
    __slots__ = ("rank", "group", "number", "failed", "port", "first_token", "sent")
    RANK_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    group: str
    number: int
    failed: KvFailed
    port: int
    first_token: _sampling_pb2.SampledToken
    sent: KvSent
    def __init__(self, rank: _Optional[int] = ..., group: _Optional[str] = ..., number: _Optional[int] = ..., failed: _Optional[_Union[KvFailed, _Mapping]] = ..., port: _Optional[int] = ..., first_token: _Optional[_Union[_sampling_pb2.SampledToken, _Mapping]] = ..., sent: _Optional[_Union[KvSent, _Mapping]] = ...) -> None: ...

class KvOrder(_message.Message):
    __slots__ = ("number", "setup", "clear", "expect", "send", "announce", "finish", "abort", "collect")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SETUP_FIELD_NUMBER: _ClassVar[int]
    CLEAR_FIELD_NUMBER: _ClassVar[int]
    EXPECT_FIELD_NUMBER: _ClassVar[int]
    SEND_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    COLLECT_FIELD_NUMBER: _ClassVar[int]
    number: int
    setup: KvSetup
    clear: KvClear
    expect: KvExpect
    send: KvSend
    announce: KvAnnounce
    finish: KvFinish
    abort: KvAbort
    collect: KvCollect
    def __init__(self, number: _Optional[int] = ..., setup: _Optional[_Union[KvSetup, _Mapping]] = ..., clear: _Optional[_Union[KvClear, _Mapping]] = ..., expect: _Optional[_Union[KvExpect, _Mapping]] = ..., send: _Optional[_Union[KvSend, _Mapping]] = ..., announce: _Optional[_Union[KvAnnounce, _Mapping]] = ..., finish: _Optional[_Union[KvFinish, _Mapping]] = ..., abort: _Optional[_Union[KvAbort, _Mapping]] = ..., collect: _Optional[_Union[KvCollect, _Mapping]] = ...) -> None: ...

class KvSetup(_message.Message):
    __slots__ = ("transports", "worker_id", "incarnation")
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    transports: _containers.RepeatedScalarFieldContainer[str]
    worker_id: str
    incarnation: str
    def __init__(self, transports: _Optional[_Iterable[str]] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class KvClear(_message.Message):
    __slots__ = ("block_ids", "first_token")
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    first_token: int
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ..., first_token: _Optional[int] = ...) -> None: ...

class KvExpect(_message.Message):
    __slots__ = ("transfer_id", "attempt", "block_ids", "first_block", "num_tokens")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    attempt: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    first_block: int
    num_tokens: int
    def __init__(self, transfer_id: _Optional[str] = ..., attempt: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., first_block: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class KvCollect(_message.Message):
    __slots__ = ("expect",)
    EXPECT_FIELD_NUMBER: _ClassVar[int]
    expect: int
    def __init__(self, expect: _Optional[int] = ...) -> None: ...

class KvSend(_message.Message):
    __slots__ = ("transfer_id", "attempt", "address", "receiver_incarnation", "block_ids", "first_block", "span")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    attempt: int
    address: str
    receiver_incarnation: str
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    first_block: int
    span: _kvtransfer_pb2.KvSpan
    def __init__(self, transfer_id: _Optional[str] = ..., attempt: _Optional[int] = ..., address: _Optional[str] = ..., receiver_incarnation: _Optional[str] = ..., block_ids: _Optional[_Iterable[int]] = ..., first_block: _Optional[int] = ..., span: _Optional[_Union[_kvtransfer_pb2.KvSpan, _Mapping]] = ...) -> None: ...

class KvAnnounce(_message.Message):
    __slots__ = ("send", "first_block", "num_blocks", "first_layer", "num_layers")
    SEND_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    send: int
    first_block: int
    num_blocks: int
    first_layer: int
    num_layers: int
    def __init__(self, send: _Optional[int] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ...) -> None: ...

class KvFinish(_message.Message):
    __slots__ = ("send", "num_tokens", "first_token")
    SEND_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    send: int
    num_tokens: int
    first_token: _sampling_pb2.SampledToken
    def __init__(self, send: _Optional[int] = ..., num_tokens: _Optional[int] = ..., first_token: _Optional[_Union[_sampling_pb2.SampledToken, _Mapping]] = ...) -> None: ...

class KvAbort(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: int
    def __init__(self, request: _Optional[int] = ...) -> None: ...

class KvFailed(_message.Message):
    __slots__ = ("error", "reason")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    error: str
    reason: str
    def __init__(self, error: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class KvSent(_message.Message):
    __slots__ = ("transport", "num_bytes", "num_chunks")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    transport: str
    num_bytes: int
    num_chunks: int
    def __init__(self, transport: _Optional[str] = ..., num_bytes: _Optional[int] = ..., num_chunks: _Optional[int] = ...) -> None: ...

class PutNoteRequest(_message.Message):
    __slots__ = ("key", "value", "group")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    group: str
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ..., group: _Optional[str] = ...) -> None: ...

class PutNoteResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetNoteRequest(_message.Message):
    __slots__ = ("key", "group")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    key: str
    group: str
    def __init__(self, key: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class GetNoteResponse(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: bytes
    def __init__(self, value: _Optional[bytes] = ...) -> None: ...
