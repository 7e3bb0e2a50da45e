"""Log-probabilities as OpenAI's API and vLLM's additions to it show them: the objects, and what fills them."""

from __future__ import annotations

import msgspec

from server.text.tokenizer import Tokenizer
from server.types import TokenLogprob

# JSON has no infinity; this is what vLLM sends for a probability of zero.
LOWEST_LOGPROB = -9999.0


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
