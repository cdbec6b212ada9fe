"""What users of evaluators and of agents' frameworks write, as `asks.py` has it of other clients."""

import asyncio
import runpy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_TOKENIZER = Path(__file__).resolve().parents[2] / "demo_model" / "tandem-small"
_GREETING = "hi"
Ask = tuple[str, Callable[[], object]]


def weather(city: str) -> str:
    """Weather of a city."""
    return f"fine in {city}"


def ask_lm_eval(url: str, calls_url: str) -> Iterator[Ask]:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    options: Any = {"model": "fake", "max_retries": 1, "num_concurrent": 1}
    tokens: Any = {"tokenizer_backend": "huggingface", "tokenizer": str(_TOKENIZER), "tokenized_requests": False}
    texts = LocalCompletionsAPI(base_url=f"{url}/v1/completions", batch_size=2, **tokens, **options)
    afar = LocalCompletionsAPI(base_url=f"{url}/v1/completions", tokenizer_backend="remote", **options)
    chats = LocalChatCompletion(base_url=f"{url}/v1/chat/completions", **options)

    def instances(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
        return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]

    pairs = instances("loglikelihood", ("One fine", " day"), ("One", " fine day"), ("", "One"))
    yield "log-likelihoods", lambda: texts.loglikelihood(pairs, disable_tqdm=True)
    yield "log-likelihoods, with the server's tokenizer", lambda: afar.loglikelihood(pairs, disable_tqdm=True)
    whole = instances("loglikelihood_rolling", ("One fine day",))
    yield "log-likelihood of a text", lambda: texts.loglikelihood_rolling(whole, disable_tqdm=True)
    until = {"until": ["zz", "\nclass", "\ndef", "\n#", "\nif", "\nprint"], "max_gen_toks": 9}
    yield (
        "text until a stop string",
        lambda: texts.generate_until(instances("generate_until", ("One fine", until)), disable_tqdm=True),
    )
    chat = '[{"role": "user", "content": "hi"}]'

    def answered() -> object:
        from lm_eval.models.api_models import JsonChatStr

        return chats.generate_until(instances("generate_until", (JsonChatStr(chat), until)), disable_tqdm=True)

    yield "chat until a stop string", answered


def ask_inspect_ai(url: str, calls_url: str) -> Iterator[Ask]:
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import tool

    @tool(name="weather")
    def tool_of_weather() -> Any:
        async def execute(city: str) -> str:
            """Weather of a city.

            Args:
                city: its name
            """
            return weather(city)

        return execute

    def score(base: str, solver: Any, target: str, **config: Any) -> object:
        model = get_model("openai-api/tandem/fake", base_url=f"{base}/v1", api_key="x")
        with tempfile.TemporaryDirectory() as folder:
            task = Task([Sample(_GREETING, target=target)], solver=solver, scorer=includes())
            [log] = eval(task, model=model, display="none", log_dir=folder, **config)
            assert log.status == "success", log.error
            [sample] = log.samples  # read from the folder only now
        assert sample.scores["includes"].value == "C", sample.output
        return sample.output.completion

    yield "a task", lambda: score(url, generate(), "One", logprobs=True, top_logprobs=2, seed=1, max_tokens=99)
    yield "a task with a tool", lambda: score(calls_url, [use_tools(tool_of_weather()), generate()], "One")


def ask_dspy(url: str, calls_url: str) -> Iterator[Ask]:
    import dspy

    def model(name: str, **options: Any) -> Any:
        return dspy.LM(name, api_base=f"{url}/v1", api_key="x", cache=False, num_retries=0, **options)

    yield "chat", lambda: model("openai/fake")(_GREETING)
    yield "two choices", lambda: model("openai/fake")(_GREETING, n=2, temperature=0.7)
    yield "completion", lambda: model("text-completion-openai/fake")("One fine")
    yield "response", lambda: model("openai/fake", model_type="responses")(_GREETING)


def ask_haystack(url: str, calls_url: str) -> Iterator[Ask]:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    messages = [ChatMessage.from_user(_GREETING)]

    def reply(base: str, **options: Any) -> Any:
        key = Secret.from_token("x")
        generator = OpenAIChatGenerator(api_key=key, model="fake", api_base_url=f"{base}/v1", **options)
        return generator.run(messages)["replies"][0]

    yield "chat", lambda: reply(url).text
    pieces: list[Any] = []

    def streamed() -> str:
        reply(url, streaming_callback=pieces.append)
        return "".join(piece.content for piece in pieces)

    yield "chat, streamed", streamed
    tools = [create_tool_from_function(weather)]
    yield "call of a function", lambda: reply(calls_url, tools=tools).tool_calls[0].arguments
    yield (
        "call of a function, streamed",
        lambda: reply(calls_url, tools=tools, streaming_callback=pieces.append).tool_calls[0].arguments,
    )


def ask_langgraph(url: str, calls_url: str) -> Iterator[Ask]:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    def agent(base: str) -> Any:
        return create_agent(ChatOpenAI(model="fake", base_url=f"{base}/v1", api_key="x", max_retries=0), [weather])

    asked = {"messages": [("user", _GREETING)]}
    yield "an agent", lambda: agent(url).invoke(asked)["messages"][-1].content
    yield (
        "an agent, streamed",
        lambda: "".join(piece.content for piece, _ in agent(url).stream(asked, stream_mode="messages")),
    )
    yield "an agent with a tool", lambda: [turn.content for turn in agent(calls_url).invoke(asked)["messages"]][-2:]


def ask_autogen(url: str, calls_url: str) -> Iterator[Ask]:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core.models import UserMessage
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    can = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
    info = {**can, "family": "unknown"}

    def client(base: str) -> Any:
        return OpenAIChatCompletionClient(model="fake", base_url=f"{base}/v1", api_key="x", model_info=info)

    async def run(base: str) -> object:
        agent = AssistantAgent("a", model_client=client(base), tools=[weather])
        return [turn.content for turn in (await agent.run(task=_GREETING)).messages][-1]

    async def streamed() -> str:
        message = UserMessage(content=_GREETING, source="user")
        return "".join([piece async for piece in client(url).create_stream([message]) if isinstance(piece, str)])

    yield "an agent", lambda: asyncio.run(run(url))
    yield "chat, streamed", lambda: asyncio.run(streamed())
    yield "an agent with a tool", lambda: asyncio.run(run(calls_url))


def ask_agent_framework(url: str, calls_url: str) -> Iterator[Ask]:
    from agent_framework import Agent
    from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient

    def agent(client: Any, base: str) -> Any:
        made = client(model="fake", base_url=f"{base}/v1", api_key="x")
        # Else it leaves earlier turns to the server that it believes to store them.
        return Agent(client=made, tools=[weather], default_options={"store": False})

    async def run(client: Any, base: str) -> str:
        return str((await agent(client, base).run(_GREETING)).text)

    async def streamed(client: Any) -> str:
        stream = agent(client, url).run(_GREETING, stream=True)
        return str((await stream.get_final_response()).text)  # some pieces replace earlier ones

    for name, client in (("chat", OpenAIChatCompletionClient), ("response", OpenAIChatClient)):
        yield name, lambda client=client: asyncio.run(run(client, url))
        yield f"{name}, streamed", lambda client=client: asyncio.run(streamed(client))
        yield f"{name}, with a tool", lambda client=client: asyncio.run(run(client, calls_url))


def ask_semantic_kernel(url: str, calls_url: str) -> Iterator[Ask]:
    from openai import AsyncOpenAI
    from semantic_kernel.connectors.ai import open_ai
    from semantic_kernel.contents import ChatHistory

    def service(make: Any) -> Any:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        return make(ai_model_id="fake", async_client=client)

    def history() -> Any:
        asked = ChatHistory()
        asked.add_user_message(_GREETING)
        return asked

    async def chat() -> str:
        settings = open_ai.OpenAIChatPromptExecutionSettings()
        return str(await service(open_ai.OpenAIChatCompletion).get_chat_message_content(history(), settings))

    async def streamed() -> str:
        settings = open_ai.OpenAIChatPromptExecutionSettings()
        pieces = service(open_ai.OpenAIChatCompletion).get_streaming_chat_message_contents(history(), settings)
        return "".join([str(piece) async for [piece] in pieces])

    async def completion() -> str:
        settings = open_ai.OpenAITextPromptExecutionSettings(max_tokens=9)
        return str(await service(open_ai.OpenAITextCompletion).get_text_content("One fine", settings))

    yield "chat", lambda: asyncio.run(chat())
    yield "chat, streamed", lambda: asyncio.run(streamed())
    yield "completion", lambda: asyncio.run(completion())


if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("asks.py")))["tell"](globals())
