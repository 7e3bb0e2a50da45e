"""instructor: answers as pydantic models, by tools and by JSON schema."""

import os

import instructor
import openai
import pydantic


class Pet(pydantic.BaseModel, extra="forbid"):
    kind: str = pydantic.Field(max_length=10)
    age: int = pydantic.Field(ge=0, le=30)


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    plain = openai.OpenAI(base_url=os.environ["BASE_URL"] + "/v1", api_key="none")
    client = instructor.from_openai(plain, mode=mode)
    pet = client.chat.completions.create(
        model=os.environ["MODEL"], messages=[{"role": "user", "content": "A pet."}], response_model=Pet,
        temperature=0, max_tokens=100,
    )  # fmt: skip
    assert isinstance(pet, Pet)
