"""Whether a request fits: into the server's queue, and into the model's context."""

from __future__ import annotations

from collections.abc import Sequence

from server.api.answering.service import Backend, Service
from server.api.http.admission import Ticket
from server.api.http.errors import bad_request


def admit(service: Service, count: int, param: str) -> Ticket:
    """Reserve room for count sequences.

    Raises ApiError: 400 if there can never be enough, 429 if there is not enough now.
    """
    limit = service.admission.limit
    if count > limit:
        raise bad_request(
            f"The request asks for {count} sequences; this server takes at most {limit} at a time.",
            param,
            "value_out_of_range",
        )
    return service.admission.acquire(count)


def check_length(backend: Backend, text: str, param: str) -> None:
    """Raise ApiError (context_length_exceeded) for a text that is too long whatever its tokens are."""
    limit = backend.limits.max_model_len
    fewest = backend.tokenizer.fewest_tokens(text)
    if fewest >= limit:
        raise bad_request(
            f"This model's maximum context length is {limit} tokens, and the prompt alone has at least {fewest}. "
            f"Reduce the length of the {param}.",
            param,
            "context_length_exceeded",
        )


def check_known(backend: Backend, ids: Sequence[int], param: str) -> None:
    """Raise ApiError for a prompt's token that the tokenizer has and the model has no row for.

    Fine-tunes that add a padding token and leave the model as it was have such tokenizers.
    """
    known = backend.limits.vocab_size
    unknown = next((token_id for token_id in ids if token_id >= known), None)
    if unknown is not None:
        text = backend.tokenizer.token_bytes(unknown).decode("utf-8", "replace")
        raise bad_request(
            f"Invalid '{param}': {text!r} is token {unknown} of the tokenizer; the model's vocabulary has {known} tokens.",
            param,
            "value_out_of_range",
        )


def resolve_max_tokens(
    backend: Backend, prompt_tokens: int, requested: int | None, default: int | None, param: str
) -> int:
    """The most tokens that may be generated after a prompt: those requested, else default, else all that fit beside it.

    Raises ApiError (context_length_exceeded) when the prompt, or what was requested with it, is too long.
    """
    limit = backend.limits.max_model_len
    room = limit - prompt_tokens
    if room < 1:
        raise bad_request(
            f"This model's maximum context length is {limit} tokens, and the prompt alone has {prompt_tokens}. "
            f"Reduce the length of the {param}.",
            param,
            "context_length_exceeded",
        )
    if requested is None:
        return room if default is None else min(room, default)
    if requested > room:
        raise bad_request(
            f"This model's maximum context length is {limit} tokens. However, {prompt_tokens + requested} tokens were "
            f"requested ({prompt_tokens} in the {param}, {requested} in the completion). Reduce one of them.",
            param,
            "context_length_exceeded",
        )
    return requested
