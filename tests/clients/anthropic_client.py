"""The anthropic package: messages, streams, tools, counting, errors."""

import os
from typing import Literal

import anthropic
import pydantic

MODEL = os.environ["MODEL"]
ASK = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Answer(pydantic.BaseModel):
    """A form."""

    country: Literal["France", "Spain"]
    capital: Literal["Paris", "Madrid"]


client = anthropic.Anthropic(base_url=os.environ["BASE_URL"], api_key="none")
whole = client.messages.create(
    model=MODEL, max_tokens=12, messages=ASK, system="Be brief.", extra_body={"temperature": 0}
)
assert whole.content[0].text
with client.messages.stream(
    model=MODEL, max_tokens=12, messages=ASK, system="Be brief.", extra_body={"temperature": 0}
) as stream:
    assert "".join(stream.text_stream) == whole.content[0].text
    assert stream.get_final_message().usage.output_tokens == 12
called = client.messages.create(
    model=MODEL, max_tokens=100, messages=ASK, tools=[TOOL], tool_choice={"type": "any"}, extra_body={"temperature": 0}
)
block = next(block for block in called.content if block.type == "tool_use")
assert set(block.input) == {"city"}
with client.messages.stream(
    model=MODEL, max_tokens=100, messages=ASK, tools=[TOOL], tool_choice={"type": "any"}, extra_body={"temperature": 0}
) as stream:
    assert any(block.type == "tool_use" for block in stream.get_final_message().content)
parsed = client.messages.parse(
    model=MODEL, max_tokens=100, messages=ASK, output_format=Answer, extra_body={"temperature": 0}
)
assert isinstance(parsed.parsed_output, Answer), parsed
assert client.messages.count_tokens(model=MODEL, messages=ASK).input_tokens > 10
try:
    client.messages.create(model="missing", max_tokens=1, messages=ASK)
except anthropic.NotFoundError:
    pass
else:
    raise AssertionError("an unknown model was served")
