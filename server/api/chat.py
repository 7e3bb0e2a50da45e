"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from pydantic import Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from server.api.conversation import MESSAGES_SCHEMA, conversation
from server.api.errors import bad_request
from server.api.generation import Delta, Generation, closing
from server.api.launch import admit, check_length, launch, new_id
from server.api.operations import json_response, service_of
from server.api.options import MAX_TOKEN_COUNT, UNSUPPORTED, GenerationOptions
from server.api.protocol import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FinalChatChunkChoice,
    Usage,
    chat_logprobs,
)
from server.api.service import Backend
from server.api.streaming import DONE, EventStream, event, unless_disconnected
from server.api.validation import read_json, validate
from server.text.errors import PromptError
from server.types import TokenLogprob

router = APIRouter()

UNSUPPORTED_CHAT: dict[str, tuple[Any, ...]] = UNSUPPORTED | {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "reasoning": (),
    "thinking": (),
    "verbosity": (),
    "web_search_options": (),
    "echo": (False,),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": (),
    "add_special_tokens": (False,),
    "suffix": (),
    "prompt": (),
}


class ChatCompletionRequest(GenerationOptions):
    """Body of POST /v1/chat/completions. The messages are checked by server.api.conversation."""

    messages: Annotated[list[Any], Field(min_length=1), WithJsonSchema(MESSAGES_SCHEMA)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_COUNT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """Raise ApiError for options that contradict each other."""
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs", "invalid_value")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise bad_request(
                "'max_tokens' and 'max_completion_tokens' say different things; set one of them.",
                "max_completion_tokens",
                "invalid_value",
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise bad_request(
                "'continue_final_message' and 'add_generation_prompt' exclude each other.",
                "continue_final_message",
                "invalid_value",
            )

    @property
    def requested_tokens(self) -> int | None:
        """Limit of the answer's length, by either of its names."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def encode(self, backend: Backend) -> list[int]:
        """Token ids of the conversation. Raises ApiError."""
        continues = bool(self.continue_final_message)
        try:
            text = backend.tokenizer.chat_template.render(
                conversation(self.messages),
                add_generation_prompt=not continues and self.add_generation_prompt is not False,
                continue_final_message=continues,
                variables=self.chat_template_kwargs,
            )
        except PromptError as e:
            raise bad_request(str(e), "messages", "invalid_prompt") from e
        check_length(backend, text, "messages")
        # The template writes the special tokens itself.
        return backend.tokenizer.encode(text, add_special_tokens=False)


@router.post("/v1/chat/completions", summary="Answer a conversation")
async def chat_completions(request: Request) -> Response:
    """OpenAI's chat completions, whole or streamed."""
    service = service_of(request)
    document, size = await read_json(request, service.config.http.max_body_bytes)
    arrival = time.monotonic()
    options = validate(ChatCompletionRequest, document, UNSUPPORTED_CHAT)
    options.check()
    service.check_model(options.model)
    backend = service.backend()
    ticket = admit(service, options.n or 1, "n")
    try:
        prompt = await backend.tokenizer.off_loop(size, lambda: options.encode(backend))
        answer = _Answer(options, backend, service.model_name)
        generation = launch(
            service,
            backend,
            options,
            [prompt],
            ticket,
            answer_id=answer.id,
            arrival=arrival,
            requested_tokens=options.requested_tokens,
            default_tokens=None,
            logprobs=(options.top_logprobs or 0) if options.logprobs else None,
            at_start=not options.continue_final_message,
            param="messages",
        )
    except BaseException:
        ticket.release()
        raise
    if options.stream:
        return EventStream(answer.events(generation), generation.close)
    try:
        return json_response(await unless_disconnected(request, answer.whole(generation)))
    finally:
        generation.close()


class _Answer:
    """One answer's identity, and its two forms."""

    def __init__(self, options: ChatCompletionRequest, backend: Backend, model: str) -> None:
        self.id = new_id("chatcmpl")
        self._created = int(time.time())
        self._model = model
        self._tokenizer = backend.tokenizer
        self._logprobs = bool(options.logprobs)
        stream = options.stream_options
        self._usage_at_end = bool(stream and stream.include_usage)
        self._usage_always = bool(stream and stream.continuous_usage_stats)

    async def whole(self, generation: Generation) -> ChatCompletion:
        texts: list[list[str]] = [[] for _ in generation.runs]
        logprobs: list[list[TokenLogprob]] = [[] for _ in generation.runs]
        last: dict[int, Delta] = {}
        async with closing(generation.deltas()) as deltas:
            async for delta in deltas:
                texts[delta.index].append(delta.text)
                logprobs[delta.index].extend(delta.logprobs)
                last[delta.index] = delta
        choices = [
            ChatChoice(
                index,
                ChatMessage("".join(texts[index])),
                chat_logprobs(self._tokenizer, logprobs[index]) if self._logprobs else None,
                delta.finish_reason or "stop",
                delta.stop_reason,
            )
            for index, delta in sorted(last.items())
        ]
        return ChatCompletion(self.id, self._created, self._model, choices, generation.usage())

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        begun: set[int] = set()
        async with closing(generation.deltas()) as deltas:
            async for delta in deltas:
                usage = generation.usage() if self._usage_always else None
                data = b""
                if delta.index not in begun:
                    begun.add(delta.index)
                    data = self._chunk(ChatChunkChoice(delta.index, ChatDelta("assistant", "")), usage)
                if delta.text or delta.logprobs:
                    added = ChatChunkChoice(delta.index, ChatDelta(content=delta.text), self._shape(delta.logprobs))
                    data += self._chunk(added, usage)
                if delta.finish_reason is not None:
                    end = FinalChatChunkChoice(delta.index, ChatDelta(), None, delta.finish_reason, delta.stop_reason)
                    data += self._chunk(end, usage)
                yield data
        if self._usage_at_end:
            yield event(ChatCompletionChunk(self.id, self._created, self._model, [], generation.usage()))
        yield DONE

    def _shape(self, entries: list[TokenLogprob]) -> ChatLogprobs | None:
        return chat_logprobs(self._tokenizer, entries) if self._logprobs else None

    def _chunk(self, choice: ChatChunkChoice, usage: Usage | None) -> bytes:
        shown = usage if self._usage_at_end or self._usage_always else msgspec.UNSET
        return event(ChatCompletionChunk(self.id, self._created, self._model, [choice], shown))
