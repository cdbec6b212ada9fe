"""Conversion between protobuf messages and domain types.

Names: `x_to_proto(domain) -> message`, `x_from_proto(message) -> domain`. Unknown enum values of a newer version are
read as the safe value: an internal failure, a lost worker, an unknown finish reason. A request that could not be run
raises InvalidRequest.
"""

from collections.abc import Iterable, Sized
from dataclasses import fields

from mesh.domain import request as limits
from mesh.domain.cache_hints import NO_HINTS, CacheHints, KeepPriority
from mesh.domain.errors import InvalidRequest
from mesh.domain.kv import KVLayout, KVSpan, Span
from mesh.domain.request import Fork, SamplingParams, SequenceSpec
from mesh.domain.structure import MAX_OPTIONS, Structure, StructureKind
from mesh.domain.tokens import FinishReason, PromptLogprob, SampledToken, SequenceFailure, SequenceOutput, TokenLogprob
from mesh.domain.worker import Adapter, KVEndpoint, WorkerInfo, WorkerLoad, WorkerRole, WorkerState
from mesh.durations import duration_from_proto, duration_to_proto
from mesh.v1 import decode_pb2, kvtransfer_pb2, sequence_pb2, worker_pb2
from tandem.v1 import cache_pb2, sampling_pb2

_FINISH = {
    FinishReason.LENGTH: sampling_pb2.FINISH_REASON_LENGTH,
    FinishReason.EOS_TOKEN: sampling_pb2.FINISH_REASON_EOS_TOKEN,
    FinishReason.STOP_SEQUENCE: sampling_pb2.FINISH_REASON_STOP_SEQUENCE,
}
_FINISH_BACK = {value: reason for reason, value in _FINISH.items()}

_FAILURE: dict[SequenceFailure, decode_pb2.SequenceFailure] = {
    failure: getattr(decode_pb2, f"SEQUENCE_FAILURE_{failure.name}") for failure in SequenceFailure
}
_FAILURE_BACK = {value: failure for failure, value in _FAILURE.items()}

_ROLE: dict[WorkerRole, worker_pb2.WorkerRole] = {
    role: getattr(worker_pb2, f"WORKER_ROLE_{role.name}") for role in WorkerRole
}
_ROLE_BACK = {value: role for role, value in _ROLE.items()}

_STATE: dict[WorkerState, worker_pb2.WorkerState] = {
    state: getattr(worker_pb2, f"WORKER_STATE_{state.name}") for state in WorkerState
}
_STATE_BACK = {value: state for state, value in _STATE.items()}

_KEEP: dict[KeepPriority, cache_pb2.KeepPriority] = {
    priority: getattr(cache_pb2, f"KEEP_PRIORITY_{priority.name}") for priority in KeepPriority
}
_KEEP_BACK = {value: priority for priority, value in _KEEP.items()}

_SAMPLING_SCALARS = tuple(
    field.name
    for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields
    if field.has_presence and field.message_type is None
)
"""The optional scalars. An absent one has the default of the domain's SamplingParams, which may be None."""

_PLAIN_WORKER = (
    *("worker_id", "incarnation", "address", "model", "tokenizer_fingerprint", "device", "pid", "protocol_version"),
    *("max_batch_tokens", "max_num_seqs", "num_blocks", "max_model_len", "speculative", "switchable"),
)

_LOAD = tuple(field.name for field in fields(WorkerLoad))

_LAYOUT = (
    *("model_fingerprint", "num_layers", "num_kv_heads", "head_dim", "block_size"),
    *("dtype", "state_blocks", "keys_are_values", "windows_are_chunks"),
)


def sampling_to_proto(params: SamplingParams) -> sampling_pb2.SamplingParams:
    """Set all fields, text included."""
    return sampling_pb2.SamplingParams(
        logit_bias=dict(params.logit_bias),
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        bad_words=params.bad_words,
        bad_word_ids=[sampling_pb2.TokenSequence(ids=ids) for ids in params.bad_word_ids],
        structure=None if params.structure is None else _structure_to_proto(params.structure),
        **{name: getattr(params, name) for name in _SAMPLING_SCALARS},
    )


def sampling_from_proto(message: sampling_pb2.SamplingParams) -> SamplingParams:
    """Absent fields get the defaults of SamplingParams. Raises InvalidRequest for a list that is too long, before
    converting it; nothing else is validated.
    """
    _require_counts(message)
    return SamplingParams(
        logit_bias=dict(message.logit_bias),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        bad_words=tuple(message.bad_words),
        bad_word_ids=tuple(tuple(sequence.ids) for sequence in message.bad_word_ids),
        structure=_structure_from_proto(message.structure) if message.HasField("structure") else None,
        **{name: getattr(message, name) for name in _SAMPLING_SCALARS if message.HasField(name)},
    )


def _require_counts(message: sampling_pb2.SamplingParams) -> None:
    """Raise InvalidRequest if a list is longer than SamplingParams allows."""
    require_at_most("logit_bias", message.logit_bias, limits.MAX_LOGIT_BIAS)
    require_at_most("stop", message.stop, limits.MAX_STOP_STRINGS)
    require_at_most("stop_token_ids", message.stop_token_ids, limits.MAX_STOP_TOKEN_IDS)
    require_at_most("bad_words", message.bad_words, limits.MAX_BAD_WORDS)
    require_at_most("bad_word_ids", message.bad_word_ids, limits.MAX_BAD_WORD_RUNS)
    for sequence in message.bad_word_ids:
        require_at_most("one of bad_word_ids", sequence.ids, limits.MAX_BAD_WORD_TOKENS)
    require_at_most("choice", message.structure.choice.texts, MAX_OPTIONS)


def require_at_most(name: str, items: Sized, limit: int) -> None:
    """Raise InvalidRequest, naming the field `name`, if `items` has more than `limit` entries. Check it before any
    conversion: a message of a few MiB can list a million entries, which would block the event loop.
    """
    if len(items) > limit:
        raise InvalidRequest(f"{name} has {len(items)} entries, at most {limit} are allowed")


def _structure_to_proto(structure: Structure) -> sampling_pb2.Structure:
    message = sampling_pb2.Structure()
    if structure.kind is StructureKind.JSON_OBJECT:
        message.json_object = True
    elif structure.kind is StructureKind.CHOICE:
        message.choice.SetInParent()
        message.choice.texts.extend(structure.choices)
    else:
        setattr(message, structure.kind, structure.source)
    return message


def _structure_from_proto(message: sampling_pb2.Structure) -> Structure | None:
    """Raises InvalidRequest for a kind that this version does not know: it must not be ignored silently."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("structure: one of its kinds must be set")
    if kind == StructureKind.JSON_OBJECT:
        return Structure(StructureKind.JSON_OBJECT) if message.json_object else None
    if kind == StructureKind.CHOICE:
        return Structure(StructureKind.CHOICE, choices=tuple(message.choice.texts))
    return Structure(StructureKind(kind), source=getattr(message, kind))


def hints_to_proto(hints: CacheHints) -> cache_pb2.CacheHints | None:
    """None if nothing is hinted, which is what most requests say."""
    if hints == NO_HINTS:
        return None
    message = cache_pb2.CacheHints(session_id=hints.session_id, keep_priority=_KEEP[hints.keep_priority])
    if hints.time_to_live_s is not None:
        message.time_to_live.CopyFrom(duration_to_proto(hints.time_to_live_s))
    return message


def hints_from_proto(message: cache_pb2.CacheHints) -> CacheHints:
    """Raises InvalidRequest for values out of range. A priority of a newer version is read as the normal one."""
    hints = CacheHints(
        session_id=message.session_id,
        keep_priority=_KEEP_BACK.get(message.keep_priority, KeepPriority.NORMAL),
        time_to_live_s=duration_from_proto(message.time_to_live) if message.HasField("time_to_live") else None,
    )
    hints.validate()
    return hints


def spec_to_proto(spec: SequenceSpec) -> sequence_pb2.SequenceSpec:
    """Convert a request for a worker. Text (stop strings, bad words) is left out."""
    sampling = sampling_to_proto(spec.sampling)
    sampling.ClearField("stop")
    sampling.ClearField("bad_words")
    sampling.ClearField("truncate_prompt_tokens")
    return sequence_pb2.SequenceSpec(
        request_id=spec.request_id,
        attempt=spec.attempt,
        token_ids=spec.token_ids,
        num_prompt_tokens=spec.num_prompt_tokens,
        sampling=sampling,
        eos_token_ids=sorted(spec.eos_token_ids),
        top_logprobs=spec.top_logprobs,
        prompt_logprobs=spec.prompt_logprobs,
        cache_namespace=spec.cache_namespace,
        time_left=None if spec.time_left_s is None else duration_to_proto(spec.time_left_s),
        traceparent=spec.traceparent,
        adapter=spec.adapter,
        cache_hints=hints_to_proto(spec.cache_hints),
        forks=[
            sequence_pb2.SequenceFork(
                request_id=fork.request_id, attempt=fork.attempt, seed=fork.seed, traceparent=fork.traceparent
            )
            for fork in spec.forks
        ],
    )


def spec_from_proto(message: sequence_pb2.SequenceSpec) -> SequenceSpec:
    """Raises InvalidRequest if the sequence could not be run."""
    spec = SequenceSpec(
        request_id=message.request_id,
        attempt=message.attempt,
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=sampling_from_proto(message.sampling),
        eos_token_ids=frozenset(message.eos_token_ids),
        top_logprobs=message.top_logprobs,
        prompt_logprobs=message.prompt_logprobs,
        cache_namespace=message.cache_namespace,
        time_left_s=duration_from_proto(message.time_left) if message.HasField("time_left") else None,
        traceparent=message.traceparent,
        adapter=message.adapter,
        forks=tuple(Fork(fork.request_id, fork.attempt, fork.seed, fork.traceparent) for fork in message.forks),
        cache_hints=hints_from_proto(message.cache_hints),
    )
    if len({spec.request_id, *(fork.request_id for fork in spec.forks)}) <= len(spec.forks):
        raise InvalidRequest("a sequence and its forks need different request_ids")
    if not spec.request_id or not 1 <= spec.num_prompt_tokens <= len(spec.token_ids):
        raise InvalidRequest("a sequence needs a request_id and at least one prompt token")
    if spec.sampling.max_new_tokens is None or spec.sampling.seed is None:
        raise InvalidRequest("a sequence needs max_new_tokens and a seed")
    if spec.num_generated >= spec.sampling.max_new_tokens:
        raise InvalidRequest("max_new_tokens must exceed the number of tokens generated so far")
    return spec


def token_from_proto(message: sampling_pb2.SampledToken) -> SampledToken:
    top = message.top
    return SampledToken(message.id, message.logprob, _top_from_proto(top) if top else ())


def output_to_proto(output: SequenceOutput) -> sequence_pb2.SequenceOutput:
    message = sequence_pb2.SequenceOutput()
    write_output(output, message)
    return message


def write_output(output: SequenceOutput, message: sequence_pb2.SequenceOutput) -> None:
    """Fill an empty message. This runs for every token, so it writes in place, field by field: protobuf copies messages
    that are assigned to a field, and keyword arguments take three times as long."""
    message.request_id = output.request_id
    message.attempt = output.attempt
    message.first_index = output.first_index
    for token in output.tokens:
        _write_token(token, message.tokens.add())
    if output.finish_reason is not None:
        message.finish_reason = finish_to_proto(output.finish_reason)
    if output.prompt_logprobs:
        message.prompt_logprobs.extend(map(_prompt_logprob_to_proto, output.prompt_logprobs))
    if output.cached_tokens:
        message.cached_tokens = output.cached_tokens


def _write_token(token: SampledToken, message: sampling_pb2.SampledToken) -> None:
    message.id = token.id
    message.logprob = token.logprob
    if token.top:
        message.top.extend(_top_to_proto(token.top))


def output_from_proto(message: sequence_pb2.SequenceOutput) -> SequenceOutput:
    prompt_logprobs = message.prompt_logprobs
    return SequenceOutput(
        message.request_id,
        message.attempt,
        message.first_index,
        tuple([token_from_proto(token) for token in message.tokens]),
        _finish_from_proto(message.finish_reason),
        tuple(map(_prompt_logprob_from_proto, prompt_logprobs)) if prompt_logprobs else (),
        message.cached_tokens,
    )


def _prompt_logprob_to_proto(entry: PromptLogprob) -> sequence_pb2.PromptLogprob:
    return sequence_pb2.PromptLogprob(logprob=entry.logprob, top=_top_to_proto(entry.top))


def _prompt_logprob_from_proto(message: sequence_pb2.PromptLogprob) -> PromptLogprob:
    return PromptLogprob(message.logprob if message.HasField("logprob") else None, _top_from_proto(message.top))


def _top_to_proto(top: tuple[TokenLogprob, ...]) -> list[sampling_pb2.TokenLogprob]:
    return [sampling_pb2.TokenLogprob(id=entry.id, logprob=entry.logprob) for entry in top]


def _top_from_proto(top: object) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(entry.id, entry.logprob) for entry in top)  # type: ignore[attr-defined]


def finish_to_proto(reason: FinishReason | None) -> sampling_pb2.FinishReason:
    """None, for an unfinished sequence, becomes UNSPECIFIED."""
    return sampling_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH[reason]


def _finish_from_proto(value: sampling_pb2.FinishReason) -> FinishReason | None:
    """Return UNKNOWN for a reason that this version does not know: it must not look unfinished."""
    if value == sampling_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    return _FINISH_BACK.get(value, FinishReason.UNKNOWN)


def failure_to_proto(failure: SequenceFailure) -> decode_pb2.SequenceFailure:
    return _FAILURE[failure]


def failure_from_proto(value: decode_pb2.SequenceFailure) -> SequenceFailure:
    """Return INTERNAL for a failure that this version does not know."""
    return _FAILURE_BACK.get(value, SequenceFailure.INTERNAL)


def role_to_proto(role: WorkerRole) -> worker_pb2.WorkerRole:
    return _ROLE[role]


def role_from_proto(role: worker_pb2.WorkerRole) -> WorkerRole:
    """Raises InvalidRequest for an unknown role."""
    if role not in _ROLE_BACK:
        raise InvalidRequest(f"unknown worker role {role}")
    return _ROLE_BACK[role]


def worker_to_proto(info: WorkerInfo) -> worker_pb2.WorkerRecord:
    return worker_pb2.WorkerRecord(
        role=role_to_proto(info.role),
        layout=layout_to_proto(info.layout),
        ranks=kv_endpoints_to_proto(info.kv_endpoints),
        tensor_parallel=info.tensor_parallel,
        pipeline_parallel=info.pipeline_parallel,
        adapters=[worker_pb2.Adapter(name=adapter.name, digest=adapter.digest) for adapter in info.adapters],
        **{name: getattr(info, name) for name in _PLAIN_WORKER},
    )


def worker_from_proto(message: worker_pb2.WorkerRecord) -> WorkerInfo:
    """Raises InvalidRequest for an unknown role."""
    return WorkerInfo(
        role=role_from_proto(message.role),
        layout=layout_from_proto(message.layout),
        kv_endpoints=kv_endpoints_from_proto(message.ranks),
        tensor_parallel=message.tensor_parallel or 1,
        pipeline_parallel=message.pipeline_parallel or 1,
        adapters=tuple(Adapter(adapter.name, adapter.digest) for adapter in message.adapters),
        **{name: getattr(message, name) for name in _PLAIN_WORKER},
    )


def load_to_proto(load: WorkerLoad) -> worker_pb2.WorkerLoad:
    return worker_pb2.WorkerLoad(**{name: getattr(load, name) for name in _LOAD})


def load_from_proto(message: worker_pb2.WorkerLoad) -> WorkerLoad:
    return WorkerLoad(**{name: getattr(message, name) for name in _LOAD})


def layout_to_proto(layout: KVLayout) -> kvtransfer_pb2.KvLayout:
    return kvtransfer_pb2.KvLayout(windows=layout.windows, **{name: getattr(layout, name) for name in _LAYOUT})


def layout_from_proto(message: kvtransfer_pb2.KvLayout) -> KVLayout:
    return KVLayout(windows=tuple(message.windows), **{name: getattr(message, name) for name in _LAYOUT})


def span_to_proto(span: KVSpan) -> kvtransfer_pb2.KvSpan:
    layers, heads = span.layers, span.heads
    return kvtransfer_pb2.KvSpan(
        first_layer=layers.first, num_layers=layers.count, first_head=heads.first, num_heads=heads.count
    )


def span_from_proto(message: kvtransfer_pb2.KvSpan) -> KVSpan:
    return KVSpan(Span(message.first_layer, message.num_layers), Span(message.first_head, message.num_heads))


def kv_endpoints_to_proto(endpoints: Iterable[KVEndpoint]) -> list[kvtransfer_pb2.KvRank]:
    return [
        kvtransfer_pb2.KvRank(address=endpoint.address, span=span_to_proto(endpoint.span)) for endpoint in endpoints
    ]


def kv_endpoints_from_proto(messages: Iterable[kvtransfer_pb2.KvRank]) -> tuple[KVEndpoint, ...]:
    return tuple(KVEndpoint(message.address, span_from_proto(message.span)) for message in messages)


def state_to_proto(state: WorkerState) -> worker_pb2.WorkerState:
    return _STATE[state]


def state_from_proto(value: worker_pb2.WorkerState) -> WorkerState:
    """Return LOST for a state that this version does not know."""
    return _STATE_BACK.get(value, WorkerState.LOST)
