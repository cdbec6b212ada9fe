"""KV that lies in other ranks of the worker: transfers are theirs, and the leader tells them which.

    PrefillService ──▶ MultiRankSender    from each rank a shard to each rank of the decode worker that needs its KV
    DecodeService  ──▶ MultiRankReceiver  each rank takes its shards; committed once all ranks have theirs

KV goes from rank to rank, as described in `__init__.py`: a conversation for each shard. Orders to a rank go over
the connection of `protos/mesh/v1/rank.proto`. The worker ends if it loses a rank.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kvtransfer.incoming_transfer import ExpectedTransfer
from kvtransfer.outgoing_conversation import TransferResult, TransferSpec
from kvtransfer.receiver import KVReceiver, ReceiverCallbacks
from kvtransfer.sender import KVSender, OutgoingTransfer
from mesh.domain.errors import LayoutMismatch, MeshError, TransferCorrupt, TransferFailed
from mesh.domain.host import is_loopback
from mesh.domain.kv import KVLayout, KVSpan, Shard, Span, plan_shards
from mesh.domain.worker import KVEndpoint
from mesh.tasks import mark_retrieved
from mesh.v1 import rank_pb2
from mesh.wire import span_to_proto
from tandem.v1.sampling_pb2 import SampledToken


class RankPeer(Protocol):
    """The connection to another rank. Plug point: worker.ranks.connection.RankConnection."""

    @property
    def span(self) -> KVSpan:
        """The part of the model's KV that the rank holds."""
        ...

    @property
    def host(self) -> str:
        """The address of its machine as the leader sees it."""
        ...

    def ask(self, order: rank_pb2.KvOrder) -> "Future[rank_pb2.KvReport]":
        """Number the order and send it. The result raises the MeshError with which it failed, and WorkerLost if the
        rank is lost.
        """
        ...

    def tell(self, order: rank_pb2.KvOrder) -> None:
        """Send an order that has no answer."""
        ...


class RemoteShard:
    """A shard that another rank sends. The methods are those of OutgoingTransfer, on the event loop."""

    def __init__(self, rank: RankPeer, spec: TransferSpec) -> None:
        self._rank = rank
        order = rank_pb2.KvOrder(
            send=rank_pb2.KvSend(
                transfer_id=spec.transfer_id,
                attempt=spec.attempt,
                address=spec.address,
                receiver_incarnation=spec.receiver_incarnation,
                block_ids=spec.block_ids,
                first_block=spec.first_block,
                span=span_to_proto(spec.span),
            )
        )
        self._answer = _answer(rank.ask(order))
        self._number = order.number

    def announce(self, blocks: Span, layers: Span) -> None:
        announced = rank_pb2.KvAnnounce(
            send=self._number,
            first_block=blocks.first,
            num_blocks=blocks.count,
            first_layer=layers.first,
            num_layers=layers.count,
        )
        self._rank.tell(rank_pb2.KvOrder(announce=announced))

    def finish(self, num_tokens: int, first_token_id: int) -> None:
        first_token = SampledToken(id=first_token_id)
        finished = rank_pb2.KvFinish(send=self._number, num_tokens=num_tokens, first_token=first_token)
        self._rank.tell(rank_pb2.KvOrder(finish=finished))

    async def ended(self) -> TransferResult:
        sent = (await asyncio.shield(self._answer)).sent
        return TransferResult(sent.transport, sent.num_bytes, sent.num_chunks)

    async def abort(self) -> None:
        if not self._answer.done():
            await _abort(self._rank, self._number)


AnyShard = OutgoingTransfer | RemoteShard


class ShardedTransfer:
    """A transfer of several shards. The methods are those of OutgoingTransfer, on the event loop. If one shard fails,
    all are aborted.
    """

    def __init__(self, shards: Sequence[tuple[KVSpan, AnyShard]]) -> None:
        self._shards = shards
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(mark_retrieved)

    def announce(self, blocks: Span, layers: Span) -> None:
        for span, shard in self._shards:
            if (of_shard := layers.intersection(span.layers)) is not None:
                shard.announce(blocks, of_shard)

    async def commit(self, num_tokens: int, first_token_id: int) -> TransferResult:
        for _, shard in self._shards:
            shard.finish(num_tokens, first_token_id)
        return await self.ended()

    async def ended(self) -> TransferResult:
        return await asyncio.shield(self._task)

    async def abort(self) -> None:
        await asyncio.gather(*(shard.abort() for _, shard in self._shards))
        await asyncio.wait([self._task])

    async def _run(self) -> TransferResult:
        try:
            results = await asyncio.gather(*(shard.ended() for _, shard in self._shards))
        except MeshError:
            await asyncio.gather(*(shard.abort() for _, shard in self._shards))
            raise
        return TransferResult(
            "+".join(sorted({result.transport for result in results})),
            sum(result.num_bytes for result in results),
            sum(result.num_chunks for result in results),
        )


class MultiRankSender:
    """Sends the KV of all ranks. `own` sends that of this process."""

    def __init__(self, own: KVSender, ranks: Sequence[RankPeer] = ()) -> None:
        self._own = own
        self._ranks = ranks

    @property
    def layout(self) -> KVLayout:
        """The shape of the whole model's KV."""
        return self._own.layout

    def receivers(self, address: str, endpoints: Sequence[KVEndpoint]) -> tuple[KVEndpoint, ...]:
        """The ranks of a decode worker that take KV: these, or, if there are none, the process at `address` takes all.
        Raises LayoutMismatch if the ranks here lack KV that one of them needs, or cannot reach it.
        """
        receivers = tuple(endpoints) or (KVEndpoint(address, self.layout.whole),)
        for shard in self._shards_to(receivers):
            to = receivers[shard.target].address
            host = self._ranks[shard.source - 1].host if shard.source else ""
            if host and not is_loopback(host) and is_loopback(to.rpartition(":")[0]):
                raise LayoutMismatch(
                    f"the rank at {host} sends its KV by itself and cannot reach the decode worker's {to}: give that "
                    "worker a host that other machines reach"
                )
        return receivers

    def open(self, spec: TransferSpec, receivers: Sequence[KVEndpoint]) -> "AnyOutgoingTransfer":
        """Start a transfer of `spec` to the ranks of a decode worker, each of which gets its part. Later errors are
        raised by `commit`.
        """
        opened: list[tuple[KVSpan, AnyShard]] = []
        shards = self._shards_to(receivers)
        for shard in shards:
            shard_spec = replace(spec, address=receivers[shard.target].address, span=shard.span)
            own = self._own.open(shard_spec) if shard.source == 0 else None
            if own is not None and len(shards) == 1:
                return own
            opened.append((shard.span, own or RemoteShard(self._ranks[shard.source - 1], shard_spec)))
        return ShardedTransfer(opened)

    async def close(self) -> None:
        await self._own.close()

    def _shards_to(self, receivers: Sequence[KVEndpoint]) -> tuple[Shard, ...]:
        spans = (self._own.span, *(rank.span for rank in self._ranks))
        return plan_shards(spans, [receiver.span for receiver in receivers])


AnyOutgoingTransfer = OutgoingTransfer | ShardedTransfer


@dataclass(slots=True)
class _Expected:
    """A transfer that comes to several ranks. `own_token`: the first token, as it came with this process's part.
    `orders`: the other ranks, with the number of the order to each.
    """

    own_token: "asyncio.Future[int]"
    orders: list[tuple[RankPeer, int]] = field(default_factory=list)
    is_aborted: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None


class MultiRankReceiver:
    """Receives KV into all ranks; methods and callbacks are those of KVReceiver. `open_own` makes the receiver of this
    process.
    """

    def __init__(
        self,
        open_own: Callable[[ReceiverCallbacks], KVReceiver],
        ranks: Sequence[RankPeer],
        callbacks: ReceiverCallbacks,
    ) -> None:
        own_callbacks = ReceiverCallbacks(self._on_own_committed, self._on_own_failed)
        self.own = open_own(own_callbacks if ranks else callbacks)
        self._ranks = ranks
        self._callbacks = callbacks
        self._expected: dict[str, _Expected] = {}

    async def expect(self, expected: ExpectedTransfer) -> None:
        """Returns when all ranks let the transfer come. Raises ValueError like KVReceiver, and WorkerLost."""
        if expected.transfer_id in self._expected:
            raise ValueError(f"transfer {expected.transfer_id} is expected already")
        self.own.expect(expected)
        if not self._ranks:
            return
        transfer = _Expected(asyncio.get_running_loop().create_future())
        self._expected[expected.transfer_id] = transfer
        registered, tokens = [], [transfer.own_token]
        for rank in self._ranks:
            order = rank_pb2.KvOrder(expect=_expect_to_proto(expected))
            registered.append(_answer(rank.ask(order)))
            transfer.orders.append((rank, order.number))
            collected = rank.ask(rank_pb2.KvOrder(collect=rank_pb2.KvCollect(expect=order.number)))
            tokens.append(asyncio.ensure_future(_first_token_id(_answer(collected))))
        transfer.task = asyncio.create_task(self._follow(expected.transfer_id, transfer, tokens))
        await asyncio.gather(*registered)

    async def abort(self, transfer_id: str) -> None:
        transfer = self._expected.get(transfer_id)
        if transfer is None or transfer.task is None:
            await self.own.abort(transfer_id)
            return
        transfer.is_aborted.set()
        await asyncio.wait([transfer.task])

    async def close(self) -> None:
        try:
            await asyncio.gather(*(self.abort(transfer_id) for transfer_id in list(self._expected)))
        finally:
            await self.own.close()

    async def _follow(self, transfer_id: str, transfer: _Expected, tokens: "Sequence[asyncio.Future[int]]") -> None:
        """Report the transfer once all parts are committed, or, if one fails, once nothing writes to any."""
        parts = asyncio.gather(*tokens)
        parts.add_done_callback(mark_retrieved)
        aborted = asyncio.create_task(transfer.is_aborted.wait())
        either: list[asyncio.Future[Any]] = [parts, aborted]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            aborted.cancel()
        outcome: int | MeshError = TransferFailed("the transfer was aborted by its receiver")
        if not transfer.is_aborted.is_set():
            try:
                outcome = _agreed(await parts)
            except MeshError as error:
                outcome = error
        if isinstance(outcome, MeshError):
            stops = (_abort(rank, number) for rank, number in transfer.orders)
            await asyncio.gather(self.own.abort(transfer_id), *stops)
        transfer.own_token.cancel()
        del self._expected[transfer_id]
        if transfer.is_aborted.is_set():
            return
        if isinstance(outcome, MeshError):
            self._callbacks.on_failed(transfer_id, outcome)
        else:
            self._callbacks.on_committed(transfer_id, outcome)

    def _on_own_committed(self, transfer_id: str, first_token_id: int) -> None:
        self._expected[transfer_id].own_token.set_result(first_token_id)

    def _on_own_failed(self, transfer_id: str, error: MeshError) -> None:
        self._expected[transfer_id].own_token.set_exception(error)


def _expect_to_proto(expected: ExpectedTransfer) -> rank_pb2.KvExpect:
    return rank_pb2.KvExpect(
        transfer_id=expected.transfer_id,
        attempt=expected.attempt,
        block_ids=expected.block_ids,
        first_block=expected.first_block,
        num_tokens=expected.num_tokens,
    )


def _agreed(first_token_ids: Sequence[int]) -> int:
    """The token that came with all parts. Raises TransferCorrupt."""
    if len(different := set(first_token_ids)) > 1:
        raise TransferCorrupt(f"the parts of the transfer bring first tokens {sorted(different)}")
    return first_token_ids[0]


async def _first_token_id(answer: "asyncio.Future[rank_pb2.KvReport]") -> int:
    return (await answer).first_token.id


def _answer(future: "Future[rank_pb2.KvReport]") -> "asyncio.Future[rank_pb2.KvReport]":
    answer = asyncio.wrap_future(future)
    answer.add_done_callback(mark_retrieved)
    return answer


async def _abort(rank: RankPeer, number: int) -> None:
    """End what was asked. Returns when no thread of the rank touches its blocks; a lost rank touches none."""
    with suppress(MeshError):
        await asyncio.wrap_future(rank.ask(rank_pb2.KvOrder(abort=rank_pb2.KvAbort(request=number))))
