"""POST /v1/completions through the openai client, against the real server and model."""

from __future__ import annotations

import httpx
import openai

from server.text.tokenizer import Tokenizer
from tests.api.conftest import MODEL

PROMPT = "The capital of France is"


def body(**options: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0} | options


def test_continues_with_its_leading_space(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1, temperature=0)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == " Paris"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 1)


def test_sixteen_tokens_by_default(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Once upon a time", temperature=0, seed=1)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_stream_is_the_whole_text(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0).choices[0].text
    chunks = list(
        client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6


def test_batch_of_prompts_in_order(http: httpx.Client, byte_tokenizer: Tokenizer) -> None:
    texts = ["The capital of Spain is", PROMPT]
    batch = http.post("/v1/completions", json=body(prompt=texts, n=2)).json()
    assert [choice["index"] for choice in batch["choices"]] == [0, 1, 2, 3]
    alone = [http.post("/v1/completions", json=body(prompt=text)).json() for text in texts]
    expected = [answer["choices"][0]["text"] for answer in alone for _ in range(2)]
    assert [choice["text"] for choice in batch["choices"]] == expected
    assert batch["usage"]["prompt_tokens"] == sum(answer["usage"]["prompt_tokens"] for answer in alone)
    assert batch["usage"]["completion_tokens"] == 16
    as_ids = http.post("/v1/completions", json=body(prompt=[byte_tokenizer.encode(text) for text in texts], n=2)).json()
    assert [choice["text"] for choice in as_ids["choices"]] == expected
    one = http.post("/v1/completions", json=body(prompt=byte_tokenizer.encode(PROMPT))).json()
    assert one["choices"][0]["text"] == expected[-1]


def test_logprobs(http: httpx.Client) -> None:
    choice = http.post("/v1/completions", json=body(logprobs=2)).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == [sum(map(len, logprobs["tokens"][:i])) for i in range(4)]
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert len(top) == 2
        assert top[token] == logprob == max(top.values())
    streamed = http.post("/v1/completions", json=body(logprobs=2, stream=True)).text
    assert streamed.count('"text_offset"') >= 1


def test_options_change_the_text(http: httpx.Client) -> None:
    """Each one against what it must do; the samplers' statistics are tested in the engine."""

    def text(**options: object) -> str:
        answer = http.post("/v1/completions", json=body(prompt="a a a a a a a a", max_tokens=8, **options))
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    greedy = text()
    assert text(temperature=2, top_k=1, seed=3) == greedy
    assert text(temperature=2, top_p=0, seed=3) == greedy
    assert text(temperature=2, min_p=1, seed=3) == greedy
    assert text(temperature=2, seed=3) == text(temperature=2, seed=3) != greedy
    assert text(repetition_penalty=3.0) != greedy


def test_penalties_on_generated_tokens_end_a_repetition(http: httpx.Client) -> None:
    def text(**options: object) -> str:
        answer = http.post("/v1/completions", json=body(prompt="1 1 1 1 1 1 1", max_tokens=8, **options))
        return str(answer.json()["choices"][0]["text"])

    assert text() == " 1 1 1 1"
    assert text(frequency_penalty=2).count("1") < 4
    assert text(frequency_penalty=2, presence_penalty=2).count("1") < 3
    assert text(presence_penalty=-2, frequency_penalty=-2) == " 1 1 1 1"
