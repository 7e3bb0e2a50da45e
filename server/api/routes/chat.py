"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.answering.plan import new_id
from server.api.answering.service import service_of
from server.api.answering.turn import Turn, TurnDelta, respond, start_turn
from server.api.http.errors import ApiError, renamed
from server.api.http.hints import take_hints
from server.api.http.ignored import rename_options
from server.api.http.streaming import DONE, closing, event
from server.api.http.validation import read_json, validate
from server.api.openai.chat_options import UNSUPPORTED_CHAT, ChatOptions
from server.api.openai.logprobs import ChatLogprobs, chat_logprobs, prompt_scores
from server.api.openai.other_names import OTHER_NAMES_CHAT, take_other_names
from server.api.openai.protocol import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
    FinalChatChunkChoice,
    FunctionCall,
    Timings,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from server.api.translate.content_blocks import ContentBlocks
from server.text.answer import Part
from server.text.calls.parser import CallDelta
from server.text.tokenizer import Tokenizer
from server.types import TokenLogprob

router = APIRouter()


@router.post("/v1/chat/completions", summary="Answer a conversation")
async def chat_completions(request: Request) -> Response:
    """OpenAI's chat completions, whole or streamed."""
    service = service_of(request)
    document, size = await read_json(request, service.max_chat_bytes)
    arrival = time.monotonic()
    take_hints("chat", document)
    names = take_other_names(document, OTHER_NAMES_CHAT)
    rename_options(names)
    answer_id = new_id("chatcmpl-")
    try:
        options = validate(ChatOptions, document, UNSUPPORTED_CHAT)
        turn = await start_turn(service, options, size, arrival, answer_id, names)
    except ApiError as e:
        raise renamed(e, names) from e
    answer = _Answer(answer_id, options, service.backend().tokenizer)
    return await respond(request, turn, answer, bool(options.stream))


class WholeAnswer:
    """One answer, put together from its deltas."""

    def __init__(self) -> None:
        self._blocks = ContentBlocks()
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason = "stop"
        self.stop_reason: str | int | None = None

    def add(self, delta: TurnDelta) -> None:
        """Take a delta."""
        self._blocks.push(delta.part)
        self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def message(self, *, with_reasoning: bool) -> ChatMessage:
        """The answer as OpenAI's message object."""
        blocks = self._blocks.all
        reasoning, content = (
            "".join(block.text for block in blocks if block.kind == kind) for kind in ("reasoning", "text")
        )
        reasoning = reasoning if with_reasoning else ""
        calls = [ToolCall(one.call_id, FunctionCall(one.text, one.name)) for one in blocks if one.kind == "call"]
        return ChatMessage(
            content or (None if calls else ""),
            reasoning_content=reasoning or msgspec.UNSET,
            reasoning=reasoning or msgspec.UNSET,
            tool_calls=calls or msgspec.UNSET,
        )


async def whole_answers(turn: Turn) -> list[WholeAnswer]:
    """All answers of a turn, in order. Raises ApiError."""
    answers = [WholeAnswer() for _ in turn.generation.runs]
    async with closing(turn.deltas()) as deltas:
        async for delta in deltas:
            answers[delta.index].add(delta)
    return answers


class _Answer:
    """One response: its identity, and how it is written whole and as events."""

    def __init__(self, answer_id: str, options: ChatOptions, tokenizer: Tokenizer) -> None:
        self._id = answer_id
        self._created = int(time.time())
        self._model = options.model
        self._tokenizer = tokenizer
        self._logprobs = bool(options.logprobs)
        self._prompt_logprobs = options.prompt_logprobs
        self._reasoning = options.include_reasoning is not False
        self._timings = bool(options.timings)
        stream = options.stream_options
        self._usage_at_end = bool(stream and stream.include_usage)
        self._usage_always = bool(stream and stream.continuous_usage_stats)

    async def whole(self, turn: Turn) -> ChatCompletion:
        choices = [
            ChatChoice(
                index,
                answer.message(with_reasoning=self._reasoning),
                self._shape(answer.logprobs),
                answer.finish_reason,
                answer.stop_reason,
                self._timings_of(turn, index),
            )
            for index, answer in enumerate(await whole_answers(turn))
        ]
        scores = prompt_scores(self._tokenizer, turn.generation.runs[0].prompt_logprobs, self._prompt_logprobs)
        return ChatCompletion(self._id, self._created, self._model, choices, turn.usage(), scores)

    async def events(self, turn: Turn) -> AsyncIterator[bytes]:
        begun: set[int] = set()
        async with closing(turn.deltas()) as deltas:
            async for delta in deltas:
                usage = turn.usage() if self._usage_always else None
                data = b""
                if delta.index not in begun:
                    begun.add(delta.index)
                    data = self._chunk(ChatChunkChoice(delta.index, ChatDelta("assistant", "")), usage)
                logprobs = self._shape(delta.logprobs)
                for added in self._added(delta.part, has_logprobs=bool(delta.logprobs)):
                    data += self._chunk(ChatChunkChoice(delta.index, added, logprobs), usage)
                    logprobs = None
                if delta.finish_reason is not None:
                    timings = self._timings_of(turn, delta.index)
                    end = FinalChatChunkChoice(
                        delta.index, ChatDelta(), None, delta.finish_reason, delta.stop_reason, timings
                    )
                    data += self._chunk(end, usage)
                yield data
        if self._usage_at_end:
            yield event(ChatCompletionChunk(self._id, self._created, self._model, [], turn.usage()))
        yield DONE

    def _added(self, part: Part, *, has_logprobs: bool) -> Iterable[ChatDelta]:
        """A part as deltas; an empty delta carries log-probabilities that came without text."""
        deltas = []
        if part.reasoning and self._reasoning:
            deltas.append(ChatDelta(reasoning_content=part.reasoning, reasoning=part.reasoning))
        if part.content:
            deltas.append(ChatDelta(content=part.content))
        if part.calls:
            deltas.append(ChatDelta(tool_calls=[_call_delta(call) for call in part.calls]))
        if not deltas and has_logprobs and self._logprobs:
            deltas.append(ChatDelta(content=""))
        return deltas

    def _shape(self, entries: list[TokenLogprob]) -> ChatLogprobs | None:
        return chat_logprobs(self._tokenizer, entries) if self._logprobs else None

    def _timings_of(self, turn: Turn, index: int) -> Timings | msgspec.UnsetType:
        return Timings.of(turn.generation.runs[index].timeline) if self._timings else msgspec.UNSET

    def _chunk(self, choice: ChatChunkChoice, usage: Usage | None) -> bytes:
        shown = usage if self._usage_at_end or self._usage_always else msgspec.UNSET
        return event(ChatCompletionChunk(self._id, self._created, self._model, [choice], shown))


def _call_delta(call: CallDelta) -> ToolCallDelta:
    kind = None if call.id is None else "function"
    return ToolCallDelta(call.index, FunctionCall(call.arguments, call.name), call.id, kind)
