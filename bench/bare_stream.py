"""A server that does nothing but stream tokens over grpc.aio: what gRPC alone costs a router.

Every 10 ms each stream gets one message, all in the same turn of the event loop, as after a decode step. Messages are
those of the router, and are made once. Started by bench.router.
"""

import asyncio
import json
from collections.abc import AsyncIterator

import grpc

from mesh.interrupts import run_async, run_program
from tandem.v1 import generation_pb2, generation_pb2_grpc, sampling_pb2

_STEP_S = 0.01


class BareGeneration(generation_pb2_grpc.GenerationServicer):
    """Answers each request with as many tokens as it asks for, one in each step."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        token = generation_pb2.Token(id=97, text="a", logprob=-1.5)
        first = generation_pb2.GenerateResponse(
            tokens=[token], prompt=generation_pb2.PromptInfo(request_id="bare", num_tokens=len(request.token_ids.ids))
        )
        middle = generation_pb2.GenerateResponse(tokens=[token])
        last = generation_pb2.GenerateResponse(
            tokens=[token], finish_reason=sampling_pb2.FINISH_REASON_LENGTH, usage=generation_pb2.Usage()
        )
        num_tokens = request.sampling.max_new_tokens
        for number in range(num_tokens):
            step = asyncio.get_running_loop().create_future()
            self._waiting.append(step)
            await step
            yield last if number == num_tokens - 1 else middle if number else first

    async def run_steps(self) -> None:
        """Give each stream a token, for ever."""
        while True:
            await asyncio.sleep(_STEP_S)
            waiting, self._waiting = self._waiting, []
            for step in waiting:
                if not step.done():
                    step.set_result(None)


async def _main() -> None:
    server = grpc.aio.server()
    generation = BareGeneration()
    generation_pb2_grpc.add_GenerationServicer_to_server(generation, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"event": "listening", "address": f"127.0.0.1:{port}"}), flush=True)
    await generation.run_steps()


if __name__ == "__main__":
    run_program(lambda: run_async(_main()))
