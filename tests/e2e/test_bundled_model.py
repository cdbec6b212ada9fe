"""The bundled model, asked as a new user would ask it."""

from itertools import islice
from pathlib import Path

import grpc
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

import tandem
from demo_model.claims import questions, wrong_of_mesh
from tests.e2e.mesh_process import mesh

QUESTIONS = {
    "2 + 5": "7",
    "What is 27 + 45?": "72",
    "What is 20 - 8?": "12",
    "What is 6 times 7?": "42",
    "Spell tandem.": "t-a-n-d-e-m",
    "What is the opposite of hot?": "cold",
    "Is 14 even or odd?": "even",
}
MOST_WRONG = 0.01
BEYOND_IT = "What is 869 x 671?"
EVERY = 127  # of the questions that README.md claims: about five hundred, over all wordings and chats
EVERY_INT8 = 199


async def test_it_answers_stops_and_any_grpc_client_can_ask(tmp_path: Path) -> None:
    async with mesh("tandem-small", tmp_path) as running, tandem.AsyncClient(running.address) as client:
        await check_answers(client)
        await check_chained_requests(client)
        check_without_our_stubs(running.address)
        await check_arithmetic(running.address, EVERY)


async def test_arithmetic_in_int8_is_nearly_always_right(tmp_path: Path) -> None:
    async with mesh("tandem-small", tmp_path, "--quantize", "int8") as running:
        await check_arithmetic(running.address, EVERY_INT8)


async def check_arithmetic(address: str, every: int) -> None:
    asked = list(islice(questions(), 0, None, every))
    wrong = await wrong_of_mesh(address, asked)
    assert len(wrong) < MOST_WRONG * len(asked), wrong


async def check_answers(client: tandem.AsyncClient) -> None:
    """Right, ends by itself, and says how sure it is."""
    for question, answer in QUESTIONS.items():
        result = await client.generate(messages=[{"role": "user", "content": question}], max_new_tokens=60)
        assert result.finish_reason == "eos_token"
        assert 0 < result.confidence <= 1
        assert result.text == "".join(token.text for token in result.tokens)
        assert answer in result.text.lower()
        assert result.confidence > 0.8
    wrong = await client.generate(messages=[{"role": "user", "content": BEYOND_IT}], max_new_tokens=60)
    assert wrong.confidence < 0.75


async def check_chained_requests(client: tandem.AsyncClient) -> None:
    """generate_until_done gives what one long request gives."""
    messages = [{"role": "user", "content": "Write the times table of 12."}]
    whole = await client.generate(messages=messages, max_new_tokens=300)
    chained = await client.generate_until_done(messages=messages, max_new_tokens=20)
    assert chained.text == whole.text
    assert [token.id for token in chained.tokens] == [token.id for token in whole.tokens]
    assert chained.finish_reason == whole.finish_reason == "eos_token"
    least = await client.generate_until_done(messages=messages, max_new_tokens=20, min_new_tokens=30, max_rounds=2)
    assert [token.id for token in least.tokens] == [token.id for token in whole.tokens[:40]]
    [model] = await client.models()
    prompt = [7] * (model.max_total_tokens - 50)
    full = await client.generate_until_done(token_ids=prompt, max_new_tokens=30, ignore_eos=True)
    assert (len(full.tokens), full.finish_reason) == (50, "length")


def check_without_our_stubs(address: str) -> None:
    """Health and reflection serve clients that know nothing but gRPC."""
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=""))
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "tandem.v1.Generation" in database.get_services()
        pool = descriptor_pool.DescriptorPool(database)
        method = pool.FindServiceByName("tandem.v1.Generation").FindMethodByName("Generate")
        request = message_factory.GetMessageClass(method.input_type)(prompt="What is 1 + 1?")
        responses = channel.unary_stream(
            "/tandem.v1.Generation/Generate",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )(request, timeout=30)
        assert sum(len(response.tokens) for response in responses) > 0
