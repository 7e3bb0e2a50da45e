"""OpenAI's response objects. msgspec structs: one is encoded for every token that is streamed."""

from __future__ import annotations

import msgspec

from server.observability.timeline import RequestTimeline
from server.text.tokenizer import Tokenizer
from server.types import RequestTimings, TokenLogprob

# JSON has no infinity; this is what vLLM sends for a probability of zero.
LOWEST_LOGPROB = -9999.0


class PromptTokensDetails(msgspec.Struct):
    """Part of Usage."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Part of Usage."""

    reasoning_tokens: int
    """Tokens of thoughts and of the marks around them."""
    accepted_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """Guesses that were checked and right (speculation); they are among the completion's tokens. Set if any was."""
    rejected_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """Guesses that were checked and wrong; they are not among the completion's tokens."""


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


class TopLogprob(msgspec.Struct):
    """One likely token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """One generated token and its likeliest alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """logprobs of a chat choice."""

    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """logprobs of a text completion choice."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct):
    """How likely one token was at one place of the prompt, as vLLM says it."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id, for each token of the prompt: the token itself and the likeliest ones; null for the first token."""


class FunctionCall(msgspec.Struct, omit_defaults=True):
    """What a call says; in a chunk, what it adds. arguments is JSON as the model wrote it."""

    arguments: str
    name: str | None = None


class ToolCall(msgspec.Struct):
    """A whole call."""

    id: str
    function: FunctionCall
    type: str = "function"


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to a call; id, type and name come with its first chunk."""

    index: int
    function: FunctionCall
    id: str | None = None
    type: str | None = None


class Timings(msgspec.Struct):
    """Where the time of one answer went, in seconds; dequant and linear are its share of the NF4 layers' time.

    draft_tokens and accepted_tokens are no times: guesses that were checked, and those that were right.
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
    """What a chunk adds."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct):
    """What a chunk adds to one answer."""

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


def chat_logprobs(tokenizer: Tokenizer, entries: list[TokenLogprob]) -> ChatLogprobs:
    """Log-probabilities in the chat shape."""

    def top(token_id: int, logprob: float) -> TopLogprob:
        data = tokenizer.token_bytes(token_id)
        return TopLogprob(data.decode("utf-8", "replace"), max(logprob, LOWEST_LOGPROB), list(data))

    content = []
    for entry in entries:
        own = top(entry.token_id, entry.logprob)
        content.append(ChatLogprob(own.token, own.logprob, own.bytes, [top(*pair) for pair in entry.top]))
    return ChatLogprobs(content)


def fewer(entry: TokenLogprob, count: int) -> TokenLogprob:
    """The entry with no more than count alternatives."""
    return msgspec.structs.replace(entry, top=entry.top[:count])


def prompt_scores(
    tokenizer: Tokenizer, scores: list[TokenLogprob], count: int | None
) -> PromptLogprobs | msgspec.UnsetType:
    """The prompt's log-probabilities with count alternatives each; unset for None."""
    if count is None:
        return msgspec.UNSET

    def of(token_id: int, logprob: float, rank: int) -> PromptLogprob:
        text = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        return PromptLogprob(max(logprob, LOWEST_LOGPROB), rank, text)

    shown: PromptLogprobs = [None]
    for entry in scores:
        likeliest = {str(token_id): of(token_id, p, i) for i, (token_id, p) in enumerate(entry.top[:count], start=1)}
        shown.append({str(entry.token_id): of(entry.token_id, entry.logprob, entry.rank or 1)} | likeliest)
    return shown


class CompletionLogprobsBuilder:
    """Log-probabilities of one sequence in the shape of text completions, whose offsets go on from chunk to chunk."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def build(self, entries: list[TokenLogprob]) -> CompletionLogprobs:
        """The next tokens' log-probabilities."""
        return self._extended(CompletionLogprobs([], [], [], []), entries)

    def with_prompt(
        self, prompt: list[int], scores: list[TokenLogprob], entries: list[TokenLogprob]
    ) -> CompletionLogprobs:
        """The prompt's log-probabilities (its first token has none), and after them the first tokens'."""
        first = self._text(prompt[0])
        self._offset += len(first)
        return self._extended(CompletionLogprobs([0], [None], [first], [None]), [*scores, *entries])

    def _extended(self, result: CompletionLogprobs, entries: list[TokenLogprob]) -> CompletionLogprobs:
        for entry in entries:
            text = self._text(entry.token_id)
            result.text_offset.append(self._offset)
            result.tokens.append(text)
            result.token_logprobs.append(max(entry.logprob, LOWEST_LOGPROB))
            top = {self._text(token_id): max(logprob, LOWEST_LOGPROB) for token_id, logprob in reversed(entry.top)}
            # The sampled token is always among them, as OpenAI's API has it.
            top.setdefault(text, max(entry.logprob, LOWEST_LOGPROB))
            result.top_logprobs.append(dict(sorted(top.items(), key=lambda item: -item[1])))
            self._offset += len(text)
        return result

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")
