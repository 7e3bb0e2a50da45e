"""pydantic-ai: runs, streams, structured output through tools and natively."""

import os

import pydantic
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Pet(pydantic.BaseModel):
    kind: str = pydantic.Field(max_length=10)
    age: int = pydantic.Field(ge=0, le=30)


provider = OpenAIProvider(base_url=os.environ["BASE_URL"] + "/v1", api_key="none")
model = OpenAIChatModel(os.environ["MODEL"], provider=provider)
settings = {"temperature": 0.0, "max_tokens": 100}
assert "Paris" in Agent(model, model_settings=settings).run_sync("What is the capital of France?").output
for output in (Pet, NativeOutput(Pet)):
    assert isinstance(Agent(model, output_type=output, model_settings=settings).run_sync("A pet.").output, Pet)
