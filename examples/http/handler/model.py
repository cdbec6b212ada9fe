"""A handler of your own, under LMI's contract: it asks the model, and says how sure the answer is.

tandem up --http-port 8080 --handler examples/http/handler/model.py
"""

from collections.abc import AsyncIterator

import tandem
from djl_python import Input, Output

clients: list[tandem.AsyncClient] = []


async def handle(inputs: Input) -> Output | None:
    """The first call is empty: it is for loading. All others are requests."""
    if inputs.is_empty():
        clients.append(tandem.AsyncClient(inputs.get_property("router")))
        return None
    asked, model = inputs.get_as_json(), inputs.get_property("model_name")  # of /predictions/{model}
    if asked.get("stream"):
        return Output().add_stream_content(pieces(asked["question"], model))
    messages = [{"role": "user", "content": asked["question"]}]
    result = await clients[0].generate(messages=messages, model=model, max_new_tokens=60)
    return Output().add_as_json({"answer": result.text, "confidence": round(result.confidence or 0.0, 3)})


async def pieces(question: str, model: str | None) -> AsyncIterator[str]:
    """The answer as it is made; each piece becomes a line {"outputs": ...}."""
    messages = [{"role": "user", "content": question}]
    async for event in clients[0].stream(messages=messages, model=model, max_new_tokens=60):
        if event.token is not None and event.token.text:
            yield event.token.text
