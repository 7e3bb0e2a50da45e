"""Log-probabilities as OpenAI's API and vLLM's additions to it show them: the objects, and what fills them."""

from __future__ import annotations

import msgspec

from server.text.detokenizer import Detokenizer
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
    """Log-probability of one token at one place of the prompt, in vLLM's form."""

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
    """Log-probabilities of one sequence in the shape of text completions, whose offsets go on from chunk to chunk.

    An offset is where in the choice's text a token begins; all tokens of one character are where the character is.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        """skip_special_tokens: whether special tokens leave no text in the answer."""
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens, at_start=False)
        self._decoded = self._sent = 0

    def build(self, entries: list[TokenLogprob], text: str, *, last: bool) -> CompletionLogprobs:
        """The next tokens' log-probabilities; text: what the choice has more; last: whether that is all."""
        return self._extended(CompletionLogprobs([], [], [], []), entries, text, last=last)

    def with_prompt(
        self,
        prompt: tuple[list[int], str],
        scores: list[TokenLogprob],
        entries: list[TokenLogprob],
        text: str,
        *,
        last: bool,
    ) -> CompletionLogprobs:
        """The log-probabilities of the prompt (its ids and text; the first token has none), and after them build()."""
        ids, shown = prompt
        result = CompletionLogprobs(_prompt_offsets(self._tokenizer, ids, shown), [None], [self._text(ids[0])], [None])
        self._add(result, scores)
        self._decoded = self._sent = len(shown)
        return self._extended(result, entries, text, last=last)

    def _extended(
        self, result: CompletionLogprobs, entries: list[TokenLogprob], text: str, *, last: bool
    ) -> CompletionLogprobs:
        self._sent += len(text)
        offsets = []
        for entry in entries:
            offsets.append(self._decoded)
            self._decoded += len(self._detokenizer.push((entry.token_id,)))
        # What a stop string has cut off is beyond the text.
        result.text_offset += [min(offset, self._sent) for offset in offsets] if last else offsets
        self._add(result, entries)
        return result

    def _add(self, result: CompletionLogprobs, entries: list[TokenLogprob]) -> None:
        for entry in entries:
            text = self._text(entry.token_id)
            result.tokens.append(text)
            result.token_logprobs.append(max(entry.logprob, LOWEST_LOGPROB))
            top = {self._text(token_id): max(logprob, LOWEST_LOGPROB) for token_id, logprob in reversed(entry.top)}
            # The sampled token is always among them, as OpenAI's API has it.
            top.setdefault(text, max(entry.logprob, LOWEST_LOGPROB))
            result.top_logprobs.append(dict(sorted(top.items(), key=lambda item: -item[1])))

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _prompt_offsets(tokenizer: Tokenizer, ids: list[int], text: str) -> list[int]:
    """Places in a prompt's text at which its tokens begin. Special tokens are in the text if that was written so."""
    offsets, place = [], 0
    detokenizer: Detokenizer | None = None
    for token_id in ids:
        offsets.append(min(place, len(text)))
        if token_id in tokenizer.vocabulary.special_ids:
            written = tokenizer.token_bytes(token_id).decode()
            place += len(written) if text.startswith(written, place) else 0
        else:
            detokenizer = detokenizer or tokenizer.detokenizer(at_start=place == 0)
            place += len(detokenizer.push((token_id,)))
    return offsets
