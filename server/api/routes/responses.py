"""POST /v1/responses: OpenAI's newer form of a chat; responses are kept where the configuration says so."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from server.api.answering.plan import new_id
from server.api.answering.response_store import ResponseStore
from server.api.answering.service import service_of
from server.api.answering.turn import Turn, respond, start_turn
from server.api.http.errors import ApiError, bad_request, renamed
from server.api.http.hints import take_hints
from server.api.http.ignored import rename_options
from server.api.http.streaming import closing, event
from server.api.http.validation import given, read_json, validate
from server.api.openai.chat_options import UNSUPPORTED_CHAT, UNSUPPORTED_ELSEWHERE, ChatOptions
from server.api.openai.options import SamplingDefaults
from server.api.translate.content_blocks import ContentBlock, ContentBlockEvent, ContentBlocks
from server.api.translate.responses import INPUT_SCHEMA, chat_document

router = APIRouter()

UNSUPPORTED_RESPONSE: dict[str, tuple[Any, ...]] = UNSUPPORTED_ELSEWHERE | {
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "include": (),
    "stream_options": ({},),
    "context_management": (),
}

# The chat's names for options, each with the name that /v1/responses has for it.
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tools[].function": "tools[]",
}


class Reasoning(BaseModel):
    """Says how much a reasoning model thinks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    effort: str | None = None


class TextOptions(BaseModel):
    """Says what form the text has; format is checked as response_format is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: dict[str, Any] | None = None


class ResponseRequest(BaseModel):
    """Body of POST /v1/responses."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str
    input: Annotated[Any, WithJsonSchema(INPUT_SCHEMA)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = Field(default=None, max_length=16)
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    speculation: bool | None = None


@router.post("/v1/responses", summary="Answer, in OpenAI's newer form")
async def responses(request: Request) -> Response:
    """OpenAI's responses: text, function tools, structured text, reasoning; whole or as events."""
    service = service_of(request)
    document, size = await read_json(request, service.max_chat_bytes)
    arrival = time.monotonic()
    store, key = service.responses, getattr(request.state, "api_key", None)
    take_hints("responses", document, frozenset() if store is None else frozenset({"store"}))
    rename_options(_NAMES)
    asked = validate(ResponseRequest, document, UNSUPPORTED_RESPONSE)
    answer_id = new_id("resp_")
    try:
        chat = given(ResponseRequest, document)
        chat["input"] = _items(store, key, asked)
        options = validate(ChatOptions, chat_document(chat), UNSUPPORTED_CHAT)
        turn = await start_turn(service, options, size, arrival, answer_id, _NAMES)
    except ApiError as e:
        raise renamed(e, _NAMES) from e
    keep = None
    if store is not None and asked.store is not False:
        keep = partial(store.keep, key, chat["input"])
    answer = _Answer(answer_id, asked, service.sampling_defaults, keep)
    return await respond(request, turn, answer, bool(asked.stream))


def _items(store: ResponseStore | None, key: int | None, asked: ResponseRequest) -> Any:
    """The request's input, after the items of the response that it goes on from. Raises ApiError (400)."""
    name = asked.previous_response_id
    if store is None:
        if name is not None:
            raise bad_request(
                "'previous_response_id' is not supported by this server, which keeps no responses "
                "(http.response_store); send the items of earlier turns instead.",
                "previous_response_id",
                "unsupported_parameter",
            )
        return asked.input
    own = [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input
    if name is None or not isinstance(own, list):
        return own
    return [*store.find(key, name, "previous_response_id").items, *own]


class _Answer:
    """One response, and how it is written whole and as events."""

    def __init__(
        self,
        answer_id: str,
        asked: ResponseRequest,
        defaults: SamplingDefaults,
        keep: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        self._keep = keep
        self._id = answer_id
        self._asked = asked
        self._defaults = defaults
        self._created = int(time.time())
        self._number = 0
        self._ids: dict[int, str] = {}

    async def whole(self, turn: Turn) -> dict[str, Any]:
        blocks, reason = ContentBlocks(), "stop"
        async with closing(turn.deltas()) as deltas:
            async for delta in deltas:
                blocks.push(delta.part)
                reason = delta.finish_reason or reason
        return self._ended(blocks, reason, turn)

    async def events(self, turn: Turn) -> AsyncIterator[bytes]:
        blocks, reason = ContentBlocks(), "stop"
        begun = self._response(blocks, None, None)
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        try:
            async with closing(turn.deltas()) as deltas:
                async for delta in deltas:
                    for happened in blocks.push(delta.part):
                        yield self._block_event(happened)
                    reason = delta.finish_reason or reason
        except ApiError as e:
            failed = begun | {"status": "failed", "error": {"code": "server_error", "message": e.message}}
            yield self._event("response.failed", response=failed)
            return
        for happened in blocks.finish():
            yield self._block_event(happened, "incomplete" if reason == "length" else "completed")
        end = "response.incomplete" if reason == "length" else "response.completed"
        yield self._event(end, response=self._ended(blocks, reason, turn))

    def _ended(self, blocks: ContentBlocks, reason: str, turn: Turn) -> dict[str, Any]:
        """The response when it is complete, which may be kept."""
        response = self._response(blocks, reason, turn)
        if self._keep is not None:
            self._keep(response)
        return response

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        document = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event(document, kind)

    def _block_event(self, happened: ContentBlockEvent, status: str = "completed") -> bytes:
        """The events of what happened; status is a block's when it ends."""
        block = happened.block
        where = {"item_id": self._item_id(block), "output_index": block.index}
        part = {**where, "content_index": 0}
        text = {"text": "response.output_text", "reasoning": "response.reasoning_text"}.get(block.kind)
        extra: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        match happened.action:
            case "start":
                # The first delta may be in the block already; it is an event of its own.
                started = self._item(block.empty(), "in_progress")
                content = started.get("content", [])
                started = {**started, "content": []} if "content" in started else started
                data = self._event("response.output_item.added", output_index=block.index, item=started)
                if text is not None:
                    data += self._event("response.content_part.added", **part, part=content[0])
                return data
            case "delta" if text is not None:
                return self._event(f"{text}.delta", **part, delta=happened.delta, **extra)
            case "delta":
                return self._event("response.function_call_arguments.delta", **where, delta=happened.delta)
        item = self._item(block, status)
        if text is not None:
            data = self._event(f"{text}.done", **part, text=block.text, **extra)
            data += self._event("response.content_part.done", **part, part=item["content"][0])
        else:
            data = self._event("response.function_call_arguments.done", **where, name=block.name, arguments=block.text)
        return data + self._event("response.output_item.done", output_index=block.index, item=item)

    def _item_id(self, block: ContentBlock) -> str:
        prefix = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}[block.kind]
        return self._ids.setdefault(block.index, new_id(prefix))

    def _item(self, block: ContentBlock, status: str) -> dict[str, Any]:
        item_id = self._item_id(block)
        match block.kind:
            case "text":
                content = {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
                return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": [content]}
            case "reasoning":
                thoughts = {"type": "reasoning_text", "text": block.text}
                return {"id": item_id, "type": "reasoning", "summary": [], "content": [thoughts], "status": status}
            case _:
                return {
                    "id": item_id, "type": "function_call", "status": status, "call_id": block.call_id,
                    "name": block.name, "arguments": block.text,
                }  # fmt: skip

    def _response(self, blocks: ContentBlocks, reason: str | None, turn: Turn | None) -> dict[str, Any]:
        asked = self._asked
        status = "in_progress" if reason is None else "incomplete" if reason == "length" else "completed"
        usage = None
        if turn is not None:
            spent = turn.usage()
            usage = {
                "input_tokens": spent.prompt_tokens,
                "input_tokens_details": {"cached_tokens": spent.prompt_tokens_details.cached_tokens},
                "output_tokens": spent.completion_tokens,
                "output_tokens_details": spent.completion_tokens_details,
                "total_tokens": spent.total_tokens,
            }
        last = blocks.all[-1].index if blocks.all else -1
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": asked.model,
            "output": [
                self._item(b, "incomplete" if reason == "length" and b.index == last else "completed")
                for b in blocks.all
            ],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None},
            "store": self._keep is not None,
            "temperature": self._defaults.temperature if asked.temperature is None else asked.temperature,
            "text": {"format": (asked.text and asked.text.format) or {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": self._defaults.top_p if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": asked.user,
            "metadata": asked.metadata or {},
        }
