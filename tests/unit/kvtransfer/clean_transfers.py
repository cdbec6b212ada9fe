"""Honest transfers of random shape through one receiver, to see whether it ever raises a false alarm."""

import random

from kvtransfer import ExpectedTransfer, KVReceiver, TransferSettings
from kvtransfer.messages import Committed
from mesh.domain.errors import MeshError
from tests.evidence import Evidence
from tests.fakes.kv_store import TINY, FakeKVStore, box
from tests.fakes.transfers import (
    FIRST_TOKEN,
    INCARNATION,
    Conversation,
    Outcomes,
    make_chunk,
    make_commit,
    open_message,
)

NUM_BLOCKS = 8


async def false_alarms(count: int) -> int:
    """How many of `count` clean transfers did not commit, or left something else than was sent."""
    rng = random.Random(count)
    outcomes = Outcomes()
    target = FakeKVStore(num_blocks=NUM_BLOCKS)
    receiver = KVReceiver(target, INCARNATION, outcomes.callbacks(), TransferSettings(transports=("grpc",)))
    sources = [FakeKVStore(num_blocks=NUM_BLOCKS, seed=seed) for seed in range(8)]
    alarms = 0
    for number in range(count):
        source = rng.choice(sources)
        num_tokens = rng.randint(1, NUM_BLOCKS * TINY.block_size)
        num_blocks = TINY.num_blocks_for(num_tokens)
        source_ids, target_ids = (tuple(rng.sample(range(NUM_BLOCKS), num_blocks)) for _ in range(2))
        first = rng.randrange(num_blocks + 1)
        reservation = ExpectedTransfer(f"t{number}", rng.randrange(4), target_ids, first, num_tokens)
        places = [box(first, num_blocks - first, layer, 1) for layer in range(TINY.num_layers)]
        if first == num_blocks:
            places = []
        chunks = [make_chunk(source, reservation, source_ids, n, place) for n, place in enumerate(places)]
        receiver.expect(reservation)
        messages = [open_message(source, reservation), *chunks, make_commit(reservation, chunks)]
        conversation = Conversation(receiver, messages)
        try:
            await conversation.run()
        except MeshError:
            alarms += 1
            continue
        told = outcomes.committed[-1:] == [(reservation.transfer_id, FIRST_TOKEN)]
        same = target.blocks(target_ids[first:]) == source.blocks(source_ids[first:])
        alarms += not (told and same and isinstance(conversation.replies[-1], Committed))
    await receiver.close()
    return alarms + len(outcomes.failed)


async def check_no_false_alarms(count: int, evidence: Evidence) -> None:
    """State the figure."""
    alarms = await false_alarms(count)
    evidence("R3", f"false alarms in {count} clean transfers", alarms, target="0", ok=alarms == 0)
