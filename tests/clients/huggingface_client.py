"""huggingface_hub's InferenceClient with a URL for a model: chats, streams, tools, both forms of structured answers."""

import json
import os

from huggingface_hub import InferenceClient

BASE, MODEL = os.environ["BASE_URL"], os.environ["MODEL"]
ASK = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {"capital": {"enum": ["Paris", "Rome"]}},
    "required": ["capital"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "capital", "description": "Tell a capital.", "parameters": SCHEMA}}

for client in (InferenceClient(model=BASE), InferenceClient(base_url=f"{BASE}/v1", api_key="none")):
    assert "Paris" in client.chat_completion(ASK, max_tokens=24, temperature=0).choices[0].message.content
    assert "".join(c.choices[0].delta.content or "" for c in client.chat_completion(ASK, max_tokens=8, stream=True))
    for form in (
        {"type": "json_object", "value": SCHEMA},
        {"type": "json", "value": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "capital", "schema": SCHEMA, "strict": True}},
    ):
        written = client.chat_completion(ASK, max_tokens=64, response_format=form).choices[0].message.content
        assert json.loads(written)["capital"] in ("Paris", "Rome"), form
    called = client.chat_completion(ASK, max_tokens=200, tools=[TOOL], tool_choice="required")
    assert called.choices[0].message.tool_calls[0].function.name == "capital"
named = InferenceClient(base_url=BASE, api_key="none").chat.completions.create(model=MODEL, messages=ASK, max_tokens=8)
assert named.choices[0].message.content
