"""What users of more agents' frameworks write, and of tools that hold answers to a form, as `asks.py` has it."""

import asyncio
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_GREETING = "hi"
USER: Any = [{"role": "user", "content": _GREETING}]
Ask = tuple[str, Callable[[], object]]


def weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: its name
    """
    return f"fine in {city}"


def ask_outlines(url: str, calls_url: str) -> Iterator[Ask]:
    import openai
    import outlines
    from pydantic import create_model

    def model() -> Any:
        return outlines.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0), "fake")

    def vllm() -> Any:
        return outlines.from_vllm(openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0), "fake")

    weather_of = create_model("Weather", city=(str, ...))
    yield "chat", lambda: model()(_GREETING)
    yield "chat, streamed", lambda: "".join(model().stream(_GREETING))
    yield "an object", lambda: model()(_GREETING, weather_of)
    yield "as vLLM: an object", lambda: vllm()(_GREETING, weather_of)
    yield "as vLLM: a regular expression", lambda: vllm()(_GREETING, outlines.regex("[a-z]+"))


def ask_strands(url: str, calls_url: str) -> Iterator[Ask]:
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel
    from strands.models.openai_responses import OpenAIResponsesModel

    def agent(made: Any, base: str) -> Any:
        client = {"base_url": f"{base}/v1", "api_key": "x", "max_retries": 0}
        return Agent(model=made(client_args=client, model_id="fake"), tools=[tool(weather)], callback_handler=None)

    for name, made in (("chat", OpenAIModel), ("response", OpenAIResponsesModel)):
        yield f"{name}, streamed", lambda made=made: str(agent(made, url)(_GREETING))
        yield f"{name}, with a tool", lambda made=made: str(agent(made, calls_url)(_GREETING))


def ask_crewai(url: str, calls_url: str) -> Iterator[Ask]:
    from crewai import LLM, Agent, Crew, Task
    from crewai.tools import tool

    def model(base: str, **options: Any) -> Any:
        return LLM(model="openai/fake", base_url=f"{base}/v1", api_key="x", **options)

    def run(base: str) -> str:
        agent = Agent(role="guide", goal="help", backstory="old", llm=model(base), tools=[tool(weather)])
        task = Task(description=_GREETING, expected_output="an answer", agent=agent)
        return str(Crew(agents=[agent], tasks=[task], verbose=False).kickoff())

    yield "chat", lambda: model(url).call(_GREETING)
    yield "chat, streamed", lambda: model(url, stream=True).call(_GREETING)
    yield "a crew", lambda: run(url)
    yield "a crew with a tool", lambda: run(calls_url)


def ask_agno(url: str, calls_url: str) -> Iterator[Ask]:
    from agno.agent import Agent
    from agno.models.openai import OpenAIResponses
    from agno.models.openai.like import OpenAILike

    def agent(made: Any, base: str) -> Any:
        return Agent(model=made(id="fake", base_url=f"{base}/v1", api_key="x"), tools=[weather], telemetry=False)

    def streamed(made: Any) -> str:
        return "".join(str(piece.content or "") for piece in agent(made, url).run(_GREETING, stream=True))

    def called(made: Any) -> object:
        run = agent(made, calls_url).run(_GREETING)
        return [*(each.result for each in run.tools), run.content]

    for name, made in (("chat", OpenAILike), ("response", OpenAIResponses)):
        yield name, lambda made=made: agent(made, url).run(_GREETING).content
        yield f"{name}, streamed", lambda made=made: streamed(made)
        yield f"{name}, with a tool", lambda made=made: called(made)


def ask_google_adk(url: str, calls_url: str) -> Iterator[Ask]:
    from google.adk.agents import Agent
    from google.adk.agents.run_config import RunConfig, StreamingMode
    from google.adk.models.lite_llm import LiteLlm
    from google.adk.runners import InMemoryRunner

    async def run(base: str, mode: Any) -> list[str]:
        model = LiteLlm(model="openai/fake", api_base=f"{base}/v1", api_key="x")
        runner = InMemoryRunner(agent=Agent(name="a", model=model, tools=[weather]))
        events = await runner.run_debug(_GREETING, run_config=RunConfig(streaming_mode=mode), quiet=True)
        parts = [part for event in events for part in event.content.parts]
        return [part.text or str(part.function_response and part.function_response.response) for part in parts]

    yield "an agent", lambda: asyncio.run(run(url, StreamingMode.NONE))
    yield "an agent, streamed", lambda: asyncio.run(run(url, StreamingMode.SSE))
    yield "an agent with a tool", lambda: asyncio.run(run(calls_url, StreamingMode.NONE))


def ask_guardrails(url: str, calls_url: str) -> Iterator[Ask]:
    import guardrails
    from pydantic import create_model

    options: Any = {"model": "openai/fake", "api_base": f"{url}/v1", "api_key": "x", "messages": USER}

    def held() -> object:
        guard = guardrails.Guard.for_pydantic(create_model("Weather", city=(str, ...)))
        format_: Any = {"type": "json_schema", "json_schema": guard.response_format_json_schema()["json_schema"]}
        return guard(**options, response_format=format_).raw_llm_output

    yield "chat", lambda: guardrails.Guard()(**options).raw_llm_output
    yield (
        "chat, streamed",
        lambda: "".join(piece.raw_llm_output for piece in guardrails.Guard()(**options, stream=True)),
    )
    yield "an object", held


def ask_deepeval(url: str, calls_url: str) -> Iterator[Ask]:
    from deepeval.models import LocalModel

    yield "chat", lambda: LocalModel(model="fake", base_url=f"{url}/v1", api_key="x").generate(_GREETING)[0]


def ask_magentic(url: str, calls_url: str) -> Iterator[Ask]:
    from magentic import FunctionCall, OpenaiChatModel, StreamedStr, prompt

    def model(base: str) -> Any:
        return OpenaiChatModel("fake", base_url=f"{base}/v1", api_key="x")

    def asked(base: str, kind: Any, **options: Any) -> Any:
        def hello() -> Any: ...

        hello.__annotations__["return"] = kind
        return prompt(_GREETING, model=model(base), **options)(hello)()

    yield "chat", lambda: asked(url, str)
    yield "chat, streamed", lambda: "".join(asked(url, StreamedStr))
    yield "call of a function", lambda: asked(calls_url, FunctionCall[str], functions=[weather])()


if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("asks.py")))["tell"](globals())
