"""Between gRPC and KVReceiver; only translates."""

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc

from kvtransfer.messages import reply_to_proto, requests_from_proto
from kvtransfer.receiver import KVReceiver
from tandem.v1 import kvtransfer_pb2 as pb
from tandem.v1 import kvtransfer_pb2_grpc as pb_grpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["KvTransfer"].full_name


class KvTransferServicer(pb_grpc.KvTransferServicer):
    """Serves `Push` on a decode worker."""

    def __init__(self, receiver: KVReceiver) -> None:
        self._receiver = receiver

    async def Push(
        self, request_iterator: AsyncIterator[pb.PushRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.PushResponse]:
        """One transfer."""
        async with aclosing(self._receiver.push(requests_from_proto(request_iterator))) as replies:
            async for reply in replies:
                yield reply_to_proto(reply)
