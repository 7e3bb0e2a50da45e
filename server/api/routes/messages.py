"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's form of a chat."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from server.api.answering.plan import new_id
from server.api.answering.service import Service, service_of
from server.api.answering.turn import Turn, count_chat, respond, start_turn
from server.api.http.errors import ApiError, renamed
from server.api.http.hints import take_hints
from server.api.http.replies import json_response
from server.api.http.streaming import closing, error_event, event
from server.api.http.validation import given, read_json, validate
from server.api.openai.chat_options import UNSUPPORTED_CHAT, UNSUPPORTED_ELSEWHERE, ChatOptions
from server.api.openai.message_schemas import ANTHROPIC_MESSAGES, ANTHROPIC_SYSTEM
from server.api.translate.anthropic import chat_document, take_older_names
from server.api.translate.content_blocks import ContentBlock, ContentBlockEvent, ContentBlocks

router = APIRouter()

UNSUPPORTED_MESSAGE: dict[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": (),
    "inference_geo": ("global",),
}
_NAMES = {
    "stop": "stop_sequences",
    "reasoning_effort": "thinking",
    "tools[].function.parameters": "tools[].input_schema",
    "tools[].function": "tools[]",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
}
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class Thinking(BaseModel):
    """Says whether a reasoning model thinks. Its budget_tokens and display are hints."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str


class OutputConfig(BaseModel):
    """The form of the answer (type json_schema and a schema), and how much the model thinks, if it can be told."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: dict[str, Any] | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Metadata(BaseModel):
    """Service fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    user_id: str | None = None


class CountRequest(BaseModel):
    """Body of POST /v1/messages/count_tokens. The messages are checked as a chat's are."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str
    messages: Annotated[list[Any], Field(min_length=1), WithJsonSchema(ANTHROPIC_MESSAGES)]
    system: Annotated[Any, WithJsonSchema(ANTHROPIC_SYSTEM)] = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    """Accepted, and of no effect: what prompts share is found anyway."""


class MessageRequest(CountRequest):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    metadata: Metadata | None = None


def _options(asked: dict[str, Any], service: Service) -> ChatOptions:
    tokenizer = service.tokenizer
    effort = tokenizer.dialect.effort if tokenizer is not None else None
    chat = chat_document(asked, can_think=effort is not None)
    return validate(ChatOptions, chat, UNSUPPORTED_CHAT)


@router.post("/v1/messages", summary="Answer, in Anthropic's form")
async def messages(request: Request) -> Response:
    """Anthropic's messages: text, tools, thinking; whole or as events."""
    service = service_of(request)
    document, size = await read_json(request, service.max_chat_bytes)
    arrival = time.monotonic()
    take_hints("messages", document)
    take_older_names(document)
    asked = validate(MessageRequest, document, UNSUPPORTED_ELSEWHERE | UNSUPPORTED_MESSAGE)
    answer = _Answer(asked)
    try:
        options = _options(given(MessageRequest, document), service)
        turn = await start_turn(service, options, size, arrival, answer.id, _NAMES, cut_to_fit=True)
    except ApiError as e:
        raise renamed(e, _NAMES) from e
    return await respond(request, turn, answer, bool(asked.stream))


@router.post("/v1/messages/count_tokens", summary="What a conversation is in tokens, in Anthropic's form")
async def count_tokens(request: Request) -> Response:
    """input_tokens of the prompt that /v1/messages would make."""
    service = service_of(request)
    document, size = await read_json(request, service.max_chat_bytes)
    take_hints("messages", document)
    take_older_names(document)
    validate(CountRequest, document, UNSUPPORTED_MESSAGE)
    try:
        options = _options(given(CountRequest, document), service)
        ids = await count_chat(service, options, size)
    except ApiError as e:
        raise renamed(e, _NAMES) from e
    return json_response({"input_tokens": len(ids)})


class _Answer:
    """One message, and how it is written whole and as events."""

    def __init__(self, asked: MessageRequest) -> None:
        self.id = new_id("msg_")
        self._model = asked.model

    async def whole(self, turn: Turn) -> dict[str, Any]:
        blocks, reason, stop = ContentBlocks(), "stop", None
        async with closing(turn.deltas()) as deltas:
            async for delta in deltas:
                blocks.push(delta.part)
                reason, stop = delta.finish_reason or reason, delta.stop_reason
        shown = blocks.all[:-1] if reason == "length" and blocks.all and _is_cut(blocks.all[-1]) else blocks.all
        return self._message([_content(block) for block in shown], reason, stop, turn)

    async def events(self, turn: Turn) -> AsyncIterator[bytes]:
        blocks, reason, stop = ContentBlocks(), "stop", None
        yield _event("message_start", message=self._message([], None, None, turn))
        try:
            async with closing(turn.deltas()) as deltas:
                async for delta in deltas:
                    for happened in blocks.push(delta.part):
                        yield _block_event(happened)
                    reason, stop = delta.finish_reason or reason, delta.stop_reason
        except ApiError as e:
            yield error_event(e, anthropic=True)
            return
        for happened in blocks.finish():
            yield _block_event(happened)
        end = _stop(reason, stop)
        yield _event("message_delta", delta=end, usage=_usage(turn))
        yield _event("message_stop")

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, stop: str | int | None, turn: Turn
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **_stop(reason, stop),
            "usage": _usage(turn),
        }


def _stop(reason: str | None, stop: str | int | None) -> dict[str, Any]:
    if reason == "stop" and isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": None if reason is None else _REASONS.get(reason, "end_turn"), "stop_sequence": None}


def _usage(turn: Turn) -> dict[str, int]:
    """Anthropic counts tokens from the cache apart from the rest of the prompt."""
    spent = turn.usage()
    cached = spent.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": spent.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": spent.completion_tokens,
    }


def _is_cut(block: ContentBlock) -> bool:
    """Whether a block is a call whose arguments are not complete; its input would be another one."""
    if block.kind != "call":
        return False
    try:
        msgspec.json.decode(block.text)
    except msgspec.DecodeError:
        return True
    return False


def _content(block: ContentBlock) -> dict[str, Any]:
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case _:
            try:
                written = msgspec.json.decode(block.text)
            except msgspec.DecodeError:  # a model that cannot write JSON
                written = {}
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": written}


def _block_event(happened: ContentBlockEvent) -> bytes:
    block = happened.block
    match happened.action:
        case "start":
            return _event("content_block_start", index=block.index, content_block=_content(block.empty()))
        case "delta":
            kind, field = {
                "text": ("text_delta", "text"),
                "reasoning": ("thinking_delta", "thinking"),
                "call": ("input_json_delta", "partial_json"),
            }[block.kind]
            return _event("content_block_delta", index=block.index, delta={"type": kind, field: happened.delta})
    return _event("content_block_stop", index=block.index)


def _event(kind: str, /, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
