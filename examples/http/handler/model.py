"""A custom handler with LMI's interface: asks the model, and returns the answer with its confidence.

tandem up --handler examples/http/handler/model.py
"""

from collections.abc import AsyncIterator

import tandem
from djl_python import Input, Output

clients: list[tandem.AsyncClient] = []


async def handle(inputs: Input) -> Output | None:
    """Handle a request. The first call has no content and is for loading."""
    if inputs.is_empty():
        clients.append(tandem.AsyncClient(inputs.get_property("router")))
        return None
    payload, model = inputs.get_as_json(), inputs.get_property("model_name")  # of /predictions/{model}
    if payload.get("stream"):
        return Output().add_stream_content(pieces(payload["question"], model))
    messages = [{"role": "user", "content": payload["question"]}]
    result = await clients[0].generate(messages=messages, model=model, max_new_tokens=60)
    return Output().add_as_json({"answer": result.text, "confidence": round(result.confidence or 0.0, 3)})


async def pieces(question: str, model: str | None) -> AsyncIterator[str]:
    """The texts of the answer as they arrive. Each one becomes a line {"outputs": ...}."""
    messages = [{"role": "user", "content": question}]
    async for event in clients[0].stream(messages=messages, model=model, max_new_tokens=60):
        if event.token is not None and event.token.text:
            yield event.token.text
