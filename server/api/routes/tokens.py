"""POST /tokenize and /detokenize, as vLLM has them: what a text or a conversation is in tokens."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from server.api.answering.service import Backend, service_of
from server.api.answering.turn import count_chat
from server.api.http.errors import bad_request
from server.api.http.hints import take_hints
from server.api.http.replies import json_response
from server.api.http.validation import read_json, validate
from server.api.openai.chat_options import UNSUPPORTED_CHAT, ChatOptions
from server.api.openai.other_names import OTHER_NAMES_CHAT, take_other_names

router = APIRouter()


class TokenizeText(BaseModel):
    """Body of POST /tokenize with a text. With messages instead, it takes what /v1/chat/completions takes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class Detokenize(BaseModel):
    """Body of POST /detokenize."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None
    tokens: Annotated[list[Any], WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}})]
    skip_special_tokens: Annotated[bool, Field()] | None = None


@router.post("/tokenize", summary="A text or a conversation in tokens")
async def tokenize(request: Request) -> Response:
    """count, max_model_len, tokens, and with return_token_strs each token's text."""
    service = service_of(request)
    document, size = await read_json(request, service.max_chat_bytes)
    with_strings = document.get("return_token_strs")
    if "messages" in document:
        chat = {key: value for key, value in document.items() if key != "return_token_strs"}
        take_hints("chat", chat)
        take_other_names(chat, OTHER_NAMES_CHAT)
        options = validate(ChatOptions, {"model": service.model_name, **chat}, UNSUPPORTED_CHAT)
        backend = service.backend()
        ids = await count_chat(service, options, size)
    else:
        text = validate(TokenizeText, document, {})
        service.check_model(text.model or service.model_name)
        backend = service.backend()
        special = text.add_special_tokens is not False
        ids = await backend.tokenizer.off_loop(
            size, lambda: backend.tokenizer.encode(text.prompt, add_special_tokens=special)
        )
    strings = [_string(backend, i) for i in ids] if with_strings is True else None
    limit = backend.limits.max_model_len
    return json_response({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})


@router.post("/detokenize", summary="Tokens as text")
async def detokenize(request: Request) -> Response:
    """prompt: the text of the tokens."""
    service = service_of(request)
    document, size = await read_json(request, service.config.http.max_body_bytes)
    options = validate(Detokenize, document, {})
    service.check_model(options.model or service.model_name)
    backend = service.backend()
    known = max(backend.limits.vocab_size, backend.tokenizer.vocabulary.size)
    for i, token in enumerate(options.tokens):
        if type(token) is not int or not 0 <= token < known:
            raise bad_request(f"Invalid 'tokens[{i}]': it is no token id.", f"tokens[{i}]", "value_out_of_range")
    skip = bool(options.skip_special_tokens)
    text = await backend.tokenizer.off_loop(
        size, lambda: backend.tokenizer.decode(options.tokens, skip_special_tokens=skip)
    )
    return json_response({"prompt": text})


def _string(backend: Backend, token_id: int) -> str:
    return backend.tokenizer.token_bytes(token_id).decode("utf-8", "replace")
