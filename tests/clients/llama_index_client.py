"""LlamaIndex's OpenAILike: chats, streams, text completions, tools, structured answers, concurrent requests."""

import asyncio
import os

import pydantic
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

QUESTION = "What is the capital of France?"
ASK = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=QUESTION)]


class Pet(pydantic.BaseModel):
    """A pet."""

    kind: str = pydantic.Field(max_length=10)
    age: int = pydantic.Field(ge=0, le=30)


def weather(city: str) -> str:
    """The weather in a city."""
    return f"22 degrees in {city}"


common = {
    "model": os.environ["MODEL"], "api_base": os.environ["BASE_URL"] + "/v1", "api_key": "none", "temperature": 0,
    "max_tokens": 60,
}  # fmt: skip
model = OpenAILike(is_chat_model=True, is_function_calling_model=True, **common)
whole = model.chat(ASK)
assert "Paris" in whole.message.content, whole
streamed = list(model.stream_chat(ASK))
assert streamed[-1].message.content == whole.message.content, streamed[-1]
assert "".join(part.delta or "" for part in streamed) == whole.message.content
assert "Paris" in model.complete(QUESTION).text
assert "Paris" in OpenAILike(is_chat_model=False, **common).complete("The capital of France is").text

tool = FunctionTool.from_defaults(weather)
called = model.chat_with_tools([tool], user_msg="The weather in Rome?", tool_required=True)
calls = model.get_tool_calls_from_response(called)
assert [call.tool_name for call in calls] == ["weather"], called
assert set(calls[0].tool_kwargs) == {"city"}, called
assert isinstance(model.as_structured_llm(Pet).complete("A pet.").raw, Pet)
formed = OpenAILike(is_chat_model=True, should_use_structured_outputs=True, **common)
assert isinstance(formed.as_structured_llm(Pet).complete("A pet.").raw, Pet)


async def together() -> list[str]:
    """Four answers at once."""
    return [str(answer) for answer in await asyncio.gather(*(model.acomplete(QUESTION) for _ in range(4)))]


assert all("Paris" in answer for answer in asyncio.run(together()))
