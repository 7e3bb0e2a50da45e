"""The openai package: chat, streams, tools, parsed answers, text completions, responses, models, errors."""

import asyncio
import os

import openai
import pydantic

MODEL, BASE = os.environ["MODEL"], os.environ["BASE_URL"] + "/v1"
ASK = [{"role": "user", "content": "What is the capital of France?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


class Pet(pydantic.BaseModel):
    kind: str = pydantic.Field(max_length=10)
    age: int = pydantic.Field(ge=0, le=30)


client = openai.OpenAI(base_url=BASE, api_key="none")
whole = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=12)
assert "Paris" in whole.choices[0].message.content
parts = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=12, stream=True)
assert "".join(p.choices[0].delta.content or "" for p in parts) == whole.choices[0].message.content
called = client.chat.completions.create(
    model=MODEL, messages=ASK, tools=TOOLS, tool_choice="required", temperature=0, max_tokens=100,
    parallel_tool_calls=False,
)  # fmt: skip
assert called.choices[0].message.tool_calls[0].function.name == "weather"
assert called.choices[0].finish_reason == "tool_calls"
with client.chat.completions.stream(
    model=MODEL, messages=ASK, tools=TOOLS, tool_choice="required", temperature=0, max_tokens=100,
    parallel_tool_calls=False,
) as stream:  # fmt: skip
    kinds = {event.type for event in stream}
    final = stream.get_final_completion()
assert "tool_calls.function.arguments.delta" in kinds
assert final.choices[0].message.tool_calls[0].function.arguments
parsed = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Pet, temperature=0)
assert isinstance(parsed.choices[0].message.parsed, Pet)
assert client.completions.create(model=MODEL, prompt="1, 2, 3,", max_tokens=4).choices[0].text
assert "Paris" in client.responses.create(model=MODEL, input=ASK, temperature=0, max_output_tokens=12).output_text
assert client.models.retrieve(MODEL).id == MODEL
try:
    client.chat.completions.create(model="missing", messages=ASK)
except openai.NotFoundError:
    pass
else:
    raise AssertionError("an unknown model was served")


async def at_once() -> None:
    async with openai.AsyncOpenAI(base_url=BASE, api_key="none") as many:
        answers = await asyncio.gather(
            *(many.chat.completions.create(model=MODEL, messages=ASK, max_tokens=8) for _ in range(8))
        )
    assert all(answer.choices[0].message.content for answer in answers)


asyncio.run(at_once())
