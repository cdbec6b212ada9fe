"""What users of other people's clients write, in a Python that has one: CLIENT, PACKAGE, URL, URL of a calling model.

Prints the package's version, and for each thing that was asked what was answered, as JSON. A client that fails is an
answer, too.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any

USER: Any = [{"role": "user", "content": "hi"}]
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}
_TOKENIZER = Path(__file__).resolve().parents[2] / "demo_model" / "tandem-small"
Ask = tuple[str, Callable[[], object]]


def ask_openai(url: str, calls_url: str) -> Iterator[Ask]:
    import openai

    client, calls = (openai.OpenAI(base_url=f"{each}/v1", api_key="x", max_retries=0) for each in (url, calls_url))
    yield "models", lambda: [model.id for model in client.models.list()]
    chat = client.chat.completions
    yield "chat", lambda: chat.create(model="fake", messages=USER).choices[0].message.content
    yield (
        "chat, streamed",
        lambda: "".join(
            chunk.choices[0].delta.content or "" for chunk in chat.create(model="fake", messages=USER, stream=True)
        ),
    )
    yield "completion", lambda: client.completions.create(model="fake", prompt="One fine").choices[0].text
    yield "response", lambda: client.responses.create(model="fake", input="hi").output_text

    def streamed() -> str:
        with client.responses.stream(model="fake", input="hi") as stream:
            stream.until_done()
            return stream.get_final_response().output_text

    yield "response, streamed", streamed
    yield (
        "call of a function",
        lambda: (
            calls.chat.completions.create(model="fake", messages=USER, tools=[TOOL])
            .choices[0]
            .message.tool_calls[0]
            .function.arguments
        ),
    )
    yield "batch", lambda: batch_of(client)
    yield "embeddings", lambda: client.embeddings.create(model="fake", input="x")


def batch_of(client: Any) -> str:
    """Two requests as a file, and their answers as another."""
    body = {"model": "fake", "messages": USER}
    lines = [{"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body} for name in "ab"]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    until = time.monotonic() + 60
    while batch.status not in ("completed", "failed") and time.monotonic() < until:
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.strip().split("\n")]
    texts = [answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers]
    return f"{batch.status}: {texts}"


def ask_anthropic(url: str, calls_url: str) -> Iterator[Ask]:
    import anthropic

    client, calls = (anthropic.Anthropic(base_url=each, api_key="x", max_retries=0) for each in (url, calls_url))
    ask: Any = {"model": "fake", "max_tokens": 99, "messages": USER}
    tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
    yield "models", lambda: [model.id for model in client.models.list()]
    yield "message", lambda: client.messages.create(**ask).content[0].text

    def streamed() -> str:
        with client.messages.stream(**ask) as stream:
            return "".join(stream.text_stream)

    yield "message, streamed", streamed
    yield "call of a function", lambda: calls.messages.create(**ask, tools=tools).content[-1].input
    yield "tokens", lambda: client.messages.count_tokens(model="fake", messages=USER).input_tokens


def ask_litellm(url: str, calls_url: str) -> Iterator[Ask]:
    import litellm

    litellm.suppress_debug_info = True
    openai: Any = {"model": "openai/fake", "api_base": f"{url}/v1", "api_key": "x", "messages": USER}
    anthropic: Any = {"model": "anthropic/fake", "api_base": url, "api_key": "x", "messages": USER, "max_tokens": 99}
    for name, ask in (("OpenAI", openai), ("Anthropic", anthropic)):
        yield f"chat as {name}", lambda ask=ask: litellm.completion(**ask).choices[0].message.content
        yield (
            f"chat as {name}, streamed",
            lambda ask=ask: "".join(
                chunk.choices[0].delta.content or "" for chunk in litellm.completion(**ask, stream=True)
            ),
        )


def ask_langchain_openai(url: str, calls_url: str) -> Iterator[Ask]:
    from langchain_openai import ChatOpenAI

    def chat(base: str, **options: Any) -> Any:
        return ChatOpenAI(model="fake", base_url=f"{base}/v1", api_key="x", max_retries=0, **options)

    yield "chat", lambda: chat(url).invoke("hi").content
    yield "chat, streamed", lambda: "".join(chunk.content for chunk in chat(url).stream("hi"))
    yield "response", lambda: chat(url, use_responses_api=True).invoke("hi").text
    yield "call of a function", lambda: chat(calls_url).bind_tools([TOOL]).invoke("hi").tool_calls[0]["args"]


def ask_langchain_anthropic(url: str, calls_url: str) -> Iterator[Ask]:
    from langchain_anthropic import ChatAnthropic

    def chat(base: str) -> Any:
        return ChatAnthropic(model="fake", base_url=base, api_key="x", max_retries=0, max_tokens=99)

    yield "chat", lambda: chat(url).invoke("hi").text
    yield "chat, streamed", lambda: "".join(chunk.text for chunk in chat(url).stream("hi"))
    yield "call of a function", lambda: chat(calls_url).bind_tools([TOOL]).invoke("hi").tool_calls[0]["args"]


def ask_llama_index(url: str, calls_url: str) -> Iterator[Ask]:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    def weather(city: str) -> str:
        return city

    def model(base: str) -> Any:
        options: Any = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 1000}
        return OpenAILike(model="fake", api_base=f"{base}/v1", api_key="x", max_retries=0, **options)

    messages = [ChatMessage(role="user", content="hi")]
    yield "chat", lambda: model(url).chat(messages).message.content
    yield "chat, streamed", lambda: "".join(chunk.delta for chunk in model(url).stream_chat(messages))

    def called() -> object:
        answer = model(calls_url).chat_with_tools([FunctionTool.from_defaults(weather)], user_msg="hi")
        return model(calls_url).get_tool_calls_from_response(answer)[0].tool_kwargs

    yield "call of a function", called


def ask_openai_agents(url: str, calls_url: str) -> Iterator[Ask]:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def weather(city: str) -> str:
        """Weather of a city."""
        return f"fine in {city}"

    def agent(base: str, model: Any) -> Any:
        client = AsyncOpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0)
        return agents.Agent(name="a", model=model(model="fake", openai_client=client), tools=[weather])

    async def streamed(model: Any) -> object:
        run = agents.Runner.run_streamed(agent(url, model), "hi")
        async for _ in run.stream_events():
            pass
        return run.final_output

    for name, model in (("chat", agents.OpenAIChatCompletionsModel), ("response", agents.OpenAIResponsesModel)):
        yield name, lambda model=model: agents.Runner.run_sync(agent(url, model), "hi").final_output
        yield f"{name}, streamed", lambda model=model: asyncio.run(streamed(model))

        def called(model: Any = model) -> object:
            run = agents.Runner.run_sync(agent(calls_url, model), "hi", max_turns=2)
            return [*(item.output for item in run.new_items if item.type == "tool_call_output_item"), run.final_output]

        yield f"{name}, with a tool", called


def ask_pydantic_ai(url: str, calls_url: str) -> Iterator[Ask]:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    def agent(base: str, model: Any, **options: Any) -> Any:
        return Agent(model("fake", provider=OpenAIProvider(base_url=f"{base}/v1", api_key="x")), **options)

    def weather(city: str) -> str:
        return f"fine in {city}"

    async def streamed(model: Any) -> object:
        async with agent(url, model).run_stream("hi") as run:
            return await run.get_output()

    for name, model in (("chat", OpenAIChatModel), ("response", OpenAIResponsesModel)):
        yield name, lambda model=model: agent(url, model).run_sync("hi").output
        yield f"{name}, streamed", lambda model=model: asyncio.run(streamed(model))

        def called(model: Any = model) -> object:
            run = agent(calls_url, model, tools=[weather]).run_sync("hi")
            parts = [part for message in run.all_messages() for part in message.parts]
            return [*(part.content for part in parts if part.part_kind == "tool-return"), run.output]

        yield f"{name}, with a tool", called


def ask_instructor(url: str, calls_url: str) -> Iterator[Ask]:
    import instructor
    import openai
    from pydantic import create_model

    weather = create_model("weather", city=(str, ...))
    client = instructor.from_openai(openai.OpenAI(base_url=f"{calls_url}/v1", api_key="x"), mode=instructor.Mode.TOOLS)
    ask: Any = {"model": "fake", "response_model": weather, "messages": USER, "max_retries": 0}
    yield "an object, by a tool", lambda: repr(client.chat.completions.create(**ask))


def ask_smolagents(url: str, calls_url: str) -> Iterator[Ask]:
    import smolagents

    @smolagents.tool
    def weather(city: str) -> str:
        """Weather of a city.

        Args:
            city: its name
        """
        return f"fine in {city}"

    def model(base: str) -> Any:
        return smolagents.OpenAIServerModel(model_id="fake", api_base=f"{base}/v1", api_key="x")

    messages = [smolagents.ChatMessage(role="user", content=[{"type": "text", "text": "hi"}])]
    yield "chat", lambda: model(url).generate(messages).content
    yield "chat, streamed", lambda: "".join(delta.content or "" for delta in model(url).generate_stream(messages))
    agent = smolagents.ToolCallingAgent(tools=[weather], model=model(calls_url), max_steps=1, verbosity_level=-1)
    outputs = smolagents.agents.ToolOutput
    yield "a tool", lambda: [each.output for each in agent.run("hi", stream=True) if isinstance(each, outputs)]


def ask_aider(url: str, calls_url: str) -> Iterator[Ask]:
    def answer() -> str:
        with tempfile.TemporaryDirectory() as folder:
            options = "--model openai/fake --yes-always --no-git --no-check-update --no-show-model-warnings --no-stream"
            command = [sys.executable, "-m", "aider", *options.split(), "--analytics-disable", "--message", "hi"]
            environment = os.environ | {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "x", "HOME": folder}
            run = subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True, text=True)
        return run.stdout.strip()[-120:]

    yield "an answer", answer


def ask_guidellm(url: str, calls_url: str) -> Iterator[Ask]:
    def benchmark() -> object:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            options = "--rate-type concurrent --rate 2 --max-requests 6 --data prompt_tokens=16,output_tokens=8"
            quiet = "--disable-progress --disable-console-outputs"
            files = ["--processor", str(_TOKENIZER), "--output-path", str(report)]
            command = [sys.executable, "-m", "guidellm", "benchmark", "run", "--target", url, *options.split()]
            environment = os.environ | {"HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
            subprocess.run([*command, *quiet.split(), *files], env=environment, check=True, capture_output=True)
            (found,) = json.loads(report.read_text())["benchmarks"]
        totals = found["request_totals"]
        assert totals["successful"] == totals["total"] == 6, totals
        return totals

    yield "benchmark run", benchmark


def ask_huggingface_hub(url: str, calls_url: str) -> Iterator[Ask]:
    from huggingface_hub import InferenceClient

    client = InferenceClient(url)
    yield "text_generation", lambda: client.text_generation("One fine", max_new_tokens=9)
    yield (
        "text_generation, streamed",
        lambda: "".join(client.text_generation("One fine", max_new_tokens=9, stream=True)),
    )
    yield "chat_completion", lambda: client.chat_completion(USER).choices[0].message.content


def ask_text_generation(url: str, calls_url: str) -> Iterator[Ask]:
    from text_generation import Client

    client = Client(url, timeout=30)
    yield "generate", lambda: client.generate("One fine", max_new_tokens=9).generated_text
    yield (
        "generate_stream",
        lambda: "".join(event.token.text for event in client.generate_stream("One fine", max_new_tokens=9)),
    )


def ask_boto3(url: str, calls_url: str) -> Iterator[Ask]:
    import boto3

    names = {"endpoint_url": url, "region_name": "us-east-1"}
    keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x"}
    client = boto3.client("sagemaker-runtime", **names, **keys)
    body = json.dumps({"inputs": "One fine", "parameters": {"max_new_tokens": 9}})
    ask = {"EndpointName": "fake", "ContentType": "application/json", "Body": body}
    yield "invoke_endpoint", lambda: json.loads(client.invoke_endpoint(**ask)["Body"].read())["generated_text"]
    yield (
        "invoke_endpoint_with_response_stream",
        lambda: (
            b"".join(
                event["PayloadPart"]["Bytes"] for event in client.invoke_endpoint_with_response_stream(**ask)["Body"]
            )
            .decode()
            .splitlines()[-1]
        ),
    )


def answer_of(ask: Callable[[], object]) -> tuple[bool, str]:
    try:
        return True, str(ask())
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"


def tell(functions: dict[str, Any]) -> None:
    """Print what the client of the arguments is answered; its function is among these."""
    name, distribution, url, calls_url = sys.argv[1:]
    with redirect_stdout(sys.stderr):  # some print more than they are asked for
        asks = functions[f"ask_{name.replace('-', '_')}"](url, calls_url)
        answers = [(what, *answer_of(ask)) for what, ask in asks]
    sys.stdout.write(json.dumps({"version": version(distribution), "answers": answers}))


if __name__ == "__main__":
    tell(globals())
