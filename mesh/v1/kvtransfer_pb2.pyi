import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from tandem.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PushRequest(_message.Message):
    __slots__ = ("open", "chunk", "commit", "renew")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    open: TransferOpen
    chunk: TransferChunk
    commit: TransferCommit
    renew: TransferRenew
    def __init__(self, open: _Optional[_Union[TransferOpen, _Mapping]] = ..., chunk: _Optional[_Union[TransferChunk, _Mapping]] = ..., commit: _Optional[_Union[TransferCommit, _Mapping]] = ..., renew: _Optional[_Union[TransferRenew, _Mapping]] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("model_fingerprint", "num_layers", "num_kv_heads", "head_dim", "block_size", "dtype", "state_blocks", "keys_are_values", "windows", "windows_are_chunks")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    STATE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KEYS_ARE_VALUES_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_ARE_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    state_blocks: int
    keys_are_values: bool
    windows: _containers.RepeatedScalarFieldContainer[int]
    windows_are_chunks: bool
    def __init__(self, model_fingerprint: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_size: _Optional[int] = ..., dtype: _Optional[str] = ..., state_blocks: _Optional[int] = ..., keys_are_values: _Optional[bool] = ..., windows: _Optional[_Iterable[int]] = ..., windows_are_chunks: _Optional[bool] = ...) -> None: ...

class KvSpan(_message.Message):
    __slots__ = ("first_layer", "num_layers", "first_head", "num_heads")
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    def __init__(self, first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., first_head: _Optional[int] = ..., num_heads: _Optional[int] = ...) -> None: ...

class KvRank(_message.Message):
    __slots__ = ("address", "span")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    address: str
    span: KvSpan
    def __init__(self, address: _Optional[str] = ..., span: _Optional[_Union[KvSpan, _Mapping]] = ...) -> None: ...

class TransportOffer(_message.Message):
    __slots__ = ("name", "arena", "nonce", "arena_bytes", "pair", "host", "rendezvous")
    class RendezvousEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAIR_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    name: str
    arena: str
    nonce: bytes
    arena_bytes: int
    pair: str
    host: str
    rendezvous: _containers.ScalarMap[str, bytes]
    def __init__(self, name: _Optional[str] = ..., arena: _Optional[str] = ..., nonce: _Optional[bytes] = ..., arena_bytes: _Optional[int] = ..., pair: _Optional[str] = ..., host: _Optional[str] = ..., rendezvous: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class TransferOpen(_message.Message):
    __slots__ = ("transfer_id", "attempt", "receiver_incarnation", "sender_id", "layout", "transports", "first_block", "end_block", "span")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    END_BLOCK_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    attempt: int
    receiver_incarnation: str
    sender_id: str
    layout: KvLayout
    transports: _containers.RepeatedCompositeFieldContainer[TransportOffer]
    first_block: int
    end_block: int
    span: KvSpan
    def __init__(self, transfer_id: _Optional[str] = ..., attempt: _Optional[int] = ..., receiver_incarnation: _Optional[str] = ..., sender_id: _Optional[str] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., transports: _Optional[_Iterable[_Union[TransportOffer, _Mapping]]] = ..., first_block: _Optional[int] = ..., end_block: _Optional[int] = ..., span: _Optional[_Union[KvSpan, _Mapping]] = ...) -> None: ...

class TransferChunk(_message.Message):
    __slots__ = ("sequence_number", "first_block", "num_blocks", "first_layer", "num_layers", "num_bytes", "checksum", "arena_offset", "first_head", "num_heads", "payload", "tag")
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    ARENA_OFFSET_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    sequence_number: int
    first_block: int
    num_blocks: int
    first_layer: int
    num_layers: int
    num_bytes: int
    checksum: int
    arena_offset: int
    first_head: int
    num_heads: int
    payload: bytes
    tag: int
    def __init__(self, sequence_number: _Optional[int] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., arena_offset: _Optional[int] = ..., first_head: _Optional[int] = ..., num_heads: _Optional[int] = ..., payload: _Optional[bytes] = ..., tag: _Optional[int] = ...) -> None: ...

class TransferCommit(_message.Message):
    __slots__ = ("num_tokens", "num_chunks", "digest", "first_token")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    num_chunks: int
    digest: int
    first_token: _sampling_pb2.SampledToken
    def __init__(self, num_tokens: _Optional[int] = ..., num_chunks: _Optional[int] = ..., digest: _Optional[int] = ..., first_token: _Optional[_Union[_sampling_pb2.SampledToken, _Mapping]] = ...) -> None: ...

class TransferRenew(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("granted", "ack", "committed", "renewed")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    granted: TransferGranted
    ack: TransferAck
    committed: TransferCommitted
    renewed: TransferRenewed
    def __init__(self, granted: _Optional[_Union[TransferGranted, _Mapping]] = ..., ack: _Optional[_Union[TransferAck, _Mapping]] = ..., committed: _Optional[_Union[TransferCommitted, _Mapping]] = ..., renewed: _Optional[_Union[TransferRenewed, _Mapping]] = ...) -> None: ...

class TransferGranted(_message.Message):
    __slots__ = ("transport", "credit_chunks", "lease", "rendezvous")
    class RendezvousEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    CREDIT_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    transport: str
    credit_chunks: int
    lease: _duration_pb2.Duration
    rendezvous: _containers.ScalarMap[str, bytes]
    def __init__(self, transport: _Optional[str] = ..., credit_chunks: _Optional[int] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., rendezvous: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class TransferAck(_message.Message):
    __slots__ = ("sequence_number",)
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    sequence_number: int
    def __init__(self, sequence_number: _Optional[int] = ...) -> None: ...

class TransferRenewed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TransferCommitted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
