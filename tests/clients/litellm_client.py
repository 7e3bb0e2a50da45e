"""litellm: its openai and anthropic providers."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

MODEL, BASE = os.environ["MODEL"], os.environ["BASE_URL"]
ASK = [{"role": "user", "content": "What is the capital of France?"}]
common = {"messages": ASK, "temperature": 0, "max_tokens": 12, "api_key": "none"}
for options in (
    {"model": f"openai/{MODEL}", "api_base": f"{BASE}/v1"},
    {"model": f"anthropic/{MODEL}", "api_base": BASE},
):
    whole = litellm.completion(**options, **common)
    assert "Paris" in whole.choices[0].message.content, whole
    text = "".join(part.choices[0].delta.content or "" for part in litellm.completion(**options, **common, stream=True))
    assert text == whole.choices[0].message.content
schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
formed = litellm.completion(
    model=f"openai/{MODEL}", api_base=f"{BASE}/v1", api_key="none", messages=ASK, max_tokens=60,
    response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
)  # fmt: skip
assert formed.choices[0].message.content.startswith("{")
