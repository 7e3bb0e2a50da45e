"""langchain-openai: invoke, stream, batch, tools, structured output."""

import os

import pydantic
from langchain_openai import ChatOpenAI


class Pet(pydantic.BaseModel):
    """A pet."""

    kind: str = pydantic.Field(max_length=10)
    age: int = pydantic.Field(ge=0, le=30)


def weather(city: str) -> str:
    """The weather in a city."""
    return f"{city}: 20 degrees"


model = ChatOpenAI(
    model=os.environ["MODEL"], base_url=os.environ["BASE_URL"] + "/v1", api_key="none", temperature=0, max_tokens=150
)
assert "Paris" in model.invoke("What is the capital of France?").content
assert "".join(str(part.content) for part in model.stream("What is the capital of France?"))
assert len(model.batch(["Say a.", "Say b."])) == 2
for method in ("json_schema", "function_calling"):
    assert isinstance(model.with_structured_output(Pet, method=method).invoke("A pet."), Pet)
called = model.bind_tools([weather], tool_choice="weather", parallel_tool_calls=False).invoke("The weather in Rome?")
assert called.tool_calls[0]["name"] == "weather"
