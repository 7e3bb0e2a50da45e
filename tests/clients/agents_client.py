"""openai-agents: an agent with a tool and a form, through the responses and the chat completions API, whole and streamed."""

import asyncio
import os
from typing import Literal

import pydantic
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from agents import set_tracing_disabled as disable_tracing
from openai import AsyncOpenAI

MODEL = os.environ["MODEL"]
client = AsyncOpenAI(base_url=os.environ["BASE_URL"] + "/v1", api_key="none")
disable_tracing(True)
asked: list[str] = []


class Report(pydantic.BaseModel):
    """Text that the agent has to say in the end."""

    city: Literal["Paris", "Rome"]
    degrees: int = pydantic.Field(ge=0, le=99)


# Once it has answered it is not offered again: the small model would go on calling it.
@function_tool(is_enabled=lambda *_: not asked)
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather in a city."""
    asked.append(city)
    return f"22 degrees in {city}"


async def main() -> None:
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(model=MODEL, openai_client=client)
        # To this client an answer that is cut is an error, and the small model does not always end where it samples.
        brief = ModelSettings(max_tokens=200, temperature=0)
        plain = Agent(name="geographer", instructions="Be brief.", model=model, model_settings=brief)
        assert (await Runner.run(plain, "What is the capital of France?")).final_output, kind
        # The second turn has the call and its result, and answers in a form, which always ends.
        settings = ModelSettings(tool_choice="weather", max_tokens=200, temperature=0)
        agent = Agent(name="meteorologist", model=model, tools=[weather], model_settings=settings, output_type=Report)
        asked.clear()
        streamed = Runner.run_streamed(agent, "The weather in Rome?")
        async for _ in streamed.stream_events():
            pass
        assert asked, kind
        assert isinstance(streamed.final_output, Report), kind


asyncio.run(main())
