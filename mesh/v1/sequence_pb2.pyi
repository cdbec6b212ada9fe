import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from tandem.v1 import cache_pb2 as _cache_pb2
from tandem.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SequenceSpec(_message.Message):
    __slots__ = ("request_id", "attempt", "token_ids", "num_prompt_tokens", "sampling", "eos_token_ids", "top_logprobs", "prompt_logprobs", "cache_namespace", "time_left", "traceparent", "forks", "adapter", "cache_hints")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    FORKS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CACHE_HINTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling: _sampling_pb2.SamplingParams
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: int
    prompt_logprobs: bool
    cache_namespace: str
    time_left: _duration_pb2.Duration
    traceparent: str
    forks: _containers.RepeatedCompositeFieldContainer[SequenceFork]
    adapter: str
    cache_hints: _cache_pb2.CacheHints
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[bool] = ..., cache_namespace: _Optional[str] = ..., time_left: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., traceparent: _Optional[str] = ..., forks: _Optional[_Iterable[_Union[SequenceFork, _Mapping]]] = ..., adapter: _Optional[str] = ..., cache_hints: _Optional[_Union[_cache_pb2.CacheHints, _Mapping]] = ...) -> None: ...

class SequenceFork(_message.Message):
    __slots__ = ("request_id", "attempt", "seed", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    seed: int
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., seed: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class PromptLogprob(_message.Message):
    __slots__ = ("logprob", "top")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.TokenLogprob]
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[_sampling_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class SequenceOutput(_message.Message):
    __slots__ = ("request_id", "attempt", "first_index", "tokens", "finish_reason", "prompt_logprobs", "cached_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    first_index: int
    tokens: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.SampledToken]
    finish_reason: _sampling_pb2.FinishReason
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprob]
    cached_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., first_index: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[_sampling_pb2.SampledToken, _Mapping]]] = ..., finish_reason: _Optional[_Union[_sampling_pb2.FinishReason, str]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprob, _Mapping]]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...
