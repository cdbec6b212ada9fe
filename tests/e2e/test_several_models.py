"""Two models behind one endpoint, each with a worker and a core of its own."""

from pathlib import Path

import httpx2
import pytest

import tandem
from tests.e2e.mesh_process import mesh, pools_are_whole

QUESTION = [{"role": "user", "content": "What is 27 + 45?"}]


async def test_requests_find_their_model(tmp_path: Path) -> None:
    flags = ("--model=b=tandem-draft", "--colocated", "--http-port=0", "--set=b/decode.max-rolling-batch-size=3")
    async with (
        mesh("a=tandem-small", tmp_path, *flags) as running,
        tandem.AsyncClient(running.address) as client,
        httpx2.AsyncClient(base_url=running.http, timeout=60) as http,
    ):
        assert [(model.name, model.ready) for model in await client.models()] == [("a", True), ("b", True)]
        seats = {worker.worker_id: (worker.model, worker.max_num_seqs) for worker in await client.workers()}
        assert seats == {"a-decode-0": ("a", 64), "b-decode-0": ("b", 3)}
        await check_http(http, client)
        with pytest.raises(tandem.ModelNotFound, match="'c' is not served here; served: a, b"):
            await client.generate(messages=QUESTION, model="c")
        with pytest.raises(tandem.InvalidRequest, match="name one of those served here: a, b"):
            await client.generate(messages=QUESTION)
        await pools_are_whole(client)


async def check_http(http: httpx2.AsyncClient, client: tandem.AsyncClient) -> None:
    """All dialects answer as the SDK does, from the model that is named."""
    assert [model["id"] for model in (await http.get("/v1/models")).json()["data"]] == ["a", "b"]
    confidences = set()
    for model in ("a", "b"):
        answer = await client.generate(messages=QUESTION, model=model, max_new_tokens=20)
        confidences.add(answer.confidence)
        body = {"model": model, "messages": QUESTION, "max_tokens": 20, "temperature": 0}
        chat = (await http.post("/v1/chat/completions", json=body)).json()
        assert (chat["model"], chat["choices"][0]["message"]["content"]) == (model, answer.text)
        prompt = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 5}}
        by_path = (await http.post(f"/predictions/{model}", json=prompt)).json()
        assert by_path == (await http.post("/invocations", json=prompt | {"model": model})).json()
    assert len(confidences) == 2
    assert (await http.post("/predictions/c", json={"inputs": "x"})).status_code == 404
    assert (await http.post("/v1/chat/completions", json={"messages": QUESTION})).status_code == 400
    assert (await http.post("/v1/chat/completions", json={"model": "c", "messages": QUESTION})).status_code == 404
