"""From checked options and prompts to a running generation, the same for every endpoint that generates."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from server.api.answering.generation import Generation, SequenceRun
from server.api.answering.service import Backend, Service
from server.api.http.admission import Ticket
from server.api.http.deadline import allowed_seconds
from server.api.http.errors import bad_request
from server.api.openai.options import GenerationOptions
from server.logs import request_id
from server.observability.timeline import RequestTimeline
from server.text.output import OutputText
from server.types import GenerateRequest


def admit(service: Service, count: int, param: str) -> Ticket:
    """Room for count sequences. Raises ApiError: 400 if there can never be so much, 429 if there is not now."""
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


def resolve_max_tokens(
    backend: Backend, prompt_tokens: int, requested: int | None, default: int | None, param: str
) -> int:
    """How many tokens may be generated after a prompt. default None takes all that fit.

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


def launch(
    service: Service,
    backend: Backend,
    options: GenerationOptions,
    prompts: Sequence[list[int]],
    ticket: Ticket,
    *,
    model: str,
    answer_id: str,
    arrival: float,
    requested_tokens: int | None,
    default_tokens: int | None,
    logprobs: int | None,
    at_start: bool,
    param: str,
    grammar: str | None = None,
    prompt_logprobs: int | None = None,
    keep_marks: bool = False,
) -> Generation:
    """A generation of n sequences for each prompt, numbered prompt by prompt; it starts when it is read.

    model is the served model's name or an adapter's; param names the prompt in errors.
    at_start: the answer is a text of its own, not one that goes on from the prompt.
    grammar bounds every sequence; keep_marks leaves the marks of tool calls and thoughts in the text.
    Raises ApiError.
    """
    adapter = service.adapter(model)
    timeout_s = allowed_seconds(service.config.http.request_timeout_s)
    runs: list[SequenceRun] = []
    for prompt in prompts:
        max_tokens = resolve_max_tokens(backend, len(prompt), requested_tokens, default_tokens, param)
        vocabulary, defaults = backend.limits.vocab_size, service.sampling_defaults
        for sampling in options.sampling(max_tokens, vocabulary, defaults, logprobs, grammar, prompt_logprobs):
            text = OutputText(
                backend.tokenizer.detokenizer(
                    skip_special_tokens=options.skip_special_tokens is not False,
                    at_start=at_start,
                    keep_marks=keep_marks,
                ),
                options.stop or (),
                include_stop=bool(options.include_stop_str_in_output),
                min_tokens=sampling.min_tokens,
            )
            index = len(runs)
            request = GenerateRequest(f"{answer_id}-{index}", prompt, sampling, adapter, request_id.get())
            runs.append(
                SequenceRun(
                    index,
                    request,
                    text,
                    RequestTimeline(arrival=arrival),
                    include_stop=bool(options.include_stop_str_in_output),
                )
            )
    # Last: a prompt that can never be served is told so, however much is under way.
    ticket.hold_tokens(sum(map(len, prompts)))
    if timeout_s is not None:
        timeout_s = max(0.0, arrival + timeout_s - time.monotonic())
    return Generation(runs, backend.engine, service.metrics, ticket, timeout_s)


def new_id(prefix: str) -> str:
    """An id for an answer or a part of one."""
    return prefix + uuid.uuid4().hex
