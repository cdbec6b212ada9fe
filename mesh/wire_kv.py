"""Conversion between protobuf messages and the domain types of KV: layout, span and ranks."""

from collections.abc import Iterable

from mesh.domain.kv import KVLayout
from mesh.domain.shards import KVSpan, Span
from mesh.domain.worker import RankInfo
from mesh.v1 import kvtransfer_pb2


def layout_to_proto(layout: KVLayout) -> kvtransfer_pb2.KvLayout:
    return kvtransfer_pb2.KvLayout(
        model_fingerprint=layout.model_fingerprint,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        dtype=layout.dtype,
    )


def layout_from_proto(message: kvtransfer_pb2.KvLayout) -> KVLayout:
    return KVLayout(
        model_fingerprint=message.model_fingerprint,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        block_size=message.block_size,
        dtype=message.dtype,
    )


def span_to_proto(span: KVSpan) -> kvtransfer_pb2.KvSpan:
    layers, heads = span.layers, span.heads
    return kvtransfer_pb2.KvSpan(
        first_layer=layers.first, num_layers=layers.count, first_head=heads.first, num_heads=heads.count
    )


def span_from_proto(message: kvtransfer_pb2.KvSpan) -> KVSpan:
    return KVSpan(Span(message.first_layer, message.num_layers), Span(message.first_head, message.num_heads))


def ranks_to_proto(ranks: Iterable[RankInfo]) -> list[kvtransfer_pb2.KvRank]:
    return [kvtransfer_pb2.KvRank(address=rank.address, span=span_to_proto(rank.span)) for rank in ranks]


def ranks_from_proto(messages: Iterable[kvtransfer_pb2.KvRank]) -> tuple[RankInfo, ...]:
    return tuple(RankInfo(message.address, span_from_proto(message.span)) for message in messages)
