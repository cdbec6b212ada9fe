"""A sender of KV in a process of its own, which announces all it has and then waits for ever: tests stop or kill it.

python -m tests.service.sender_program '[SPEC, SETTINGS, KEY]'
"""

import asyncio
import json
import sys

from kvtransfer import KVSender, TransferSettings, TransferSpec
from mesh.domain.kv import Span
from mesh.rpc.credentials import Credentials, MeshKey
from tests.fakes.kv_store import TINY, FakeKVStore


async def main() -> None:
    spec, settings, key = json.loads(sys.argv[1])
    sender = KVSender(FakeKVStore(seed=1), "prefill-0", Credentials(MeshKey(key)), TransferSettings(**settings))
    transfer = sender.open(TransferSpec(**spec, span=TINY.whole))
    transfer.announce(Span(0, 3), Span(0, 2))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
