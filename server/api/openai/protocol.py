"""OpenAI's response objects. msgspec structs: one is encoded for every token that is streamed."""

from __future__ import annotations

import msgspec

from server.api.openai.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprobs
from server.observability.timeline import RequestTimeline
from server.types import RequestTimings


class PromptTokensDetails(msgspec.Struct):
    """Part of Usage."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Part of Usage."""

    reasoning_tokens: int
    """Tokens of thoughts and of the marks around them."""
    accepted_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """Draft tokens that were accepted (speculation); they are among the completion's tokens. Set if any was verified."""
    rejected_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """Draft tokens that were rejected; they are not among the completion's tokens."""


class Usage(msgspec.Struct):
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET
    """Set for chats only."""

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int) -> Usage:
        """Usage with its sum."""
        return cls(prompt, completion, prompt + completion, PromptTokensDetails(cached))


class FunctionCall(msgspec.Struct, omit_defaults=True):
    """Content of a call, or in a chunk its additions. arguments is JSON as the model wrote it."""

    arguments: str
    name: str | None = None


class ToolCall(msgspec.Struct):
    """A whole call."""

    id: str
    function: FunctionCall
    type: str = "function"


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """Additions of a chunk to a call; id, type and name come with its first chunk."""

    index: int
    function: FunctionCall
    id: str | None = None
    type: str | None = None


class Timings(msgspec.Struct):
    """Times of one answer, in seconds; dequant and linear are its share of the NF4 layers' time.

    draft_tokens and accepted_tokens are no times: draft tokens that were verified, and those that were accepted.
    """

    queue: float
    prefill: float
    decode: float
    dequant_prefill: float
    dequant_decode: float
    linear_prefill: float
    linear_decode: float
    draft_tokens: int
    accepted_tokens: int
    time_to_first_token: float | None
    tokens_per_second: float | None

    @classmethod
    def of(cls, timeline: RequestTimeline) -> Timings:
        """From a sequence's timeline: the engine's own times, and those that the API process measured."""
        known = timeline.timings or RequestTimings()
        return cls(
            **msgspec.structs.asdict(known),
            time_to_first_token=timeline.time_to_first_token,
            tokens_per_second=timeline.tokens_per_second,
        )


class ChatMessage(msgspec.Struct):
    """The assistant's whole answer."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None = None
    timings: Timings | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """Additions of a chunk."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct):
    """Additions of a chunk to one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class FinalChatChunkChoice(ChatChunkChoice):
    """The last chunk of one answer."""

    stop_reason: str | int | None = None
    timings: Timings | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, tag_field="object", tag="chat.completion"):
    """Answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class ChatCompletionChunk(msgspec.Struct, tag_field="object", tag="chat.completion.chunk"):
    """One event of a streamed chat answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class CompletionChoice(msgspec.Struct):
    """One text, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, tag_field="object", tag="text_completion"):
    """Answer of /v1/completions, and one event of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
