from mesh.v1 import kvtransfer_pb2 as _kvtransfer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("hello", "checked", "loaded", "ready", "leaving", "failed")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    hello: RankHello
    checked: RankChecked
    loaded: RankLoaded
    ready: RankReady
    leaving: RankLeaving
    failed: RankFailed
    def __init__(self, hello: _Optional[_Union[RankHello, _Mapping]] = ..., checked: _Optional[_Union[RankChecked, _Mapping]] = ..., loaded: _Optional[_Union[RankLoaded, _Mapping]] = ..., ready: _Optional[_Union[RankReady, _Mapping]] = ..., leaving: _Optional[_Union[RankLeaving, _Mapping]] = ..., failed: _Optional[_Union[RankFailed, _Mapping]] = ...) -> None: ...

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

class HoldKvRequest(_message.Message):
    __slots__ = ("rank", "group", "number", "payload")
    RANK_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    rank: int
    group: str
    number: int
    payload: bytes
    def __init__(self, rank: _Optional[int] = ..., group: _Optional[str] = ..., number: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class HoldKvResponse(_message.Message):
    __slots__ = ("number", "action", "block_ids", "span", "payload")
    class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ACTION_UNSPECIFIED: _ClassVar[HoldKvResponse.Action]
        ACTION_READ: _ClassVar[HoldKvResponse.Action]
        ACTION_WRITE: _ClassVar[HoldKvResponse.Action]
        ACTION_CLEAR: _ClassVar[HoldKvResponse.Action]
    ACTION_UNSPECIFIED: HoldKvResponse.Action
    ACTION_READ: HoldKvResponse.Action
    ACTION_WRITE: HoldKvResponse.Action
    ACTION_CLEAR: HoldKvResponse.Action
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    number: int
    action: HoldKvResponse.Action
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    span: _kvtransfer_pb2.KvSpan
    payload: bytes
    def __init__(self, number: _Optional[int] = ..., action: _Optional[_Union[HoldKvResponse.Action, str]] = ..., block_ids: _Optional[_Iterable[int]] = ..., span: _Optional[_Union[_kvtransfer_pb2.KvSpan, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

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
