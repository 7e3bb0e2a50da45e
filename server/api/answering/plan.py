"""A generation is planned by an endpoint and started here, in the same way for every endpoint that generates."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from server.api.answering.generation import Generation
from server.api.answering.limits import resolve_max_tokens
from server.api.answering.sequence_run import SequenceRun
from server.api.answering.service import Backend, Service
from server.api.http.admission import Ticket
from server.api.http.deadline import allowed_seconds
from server.api.openai.options import GenerationOptions
from server.logs import request_id
from server.observability.timeline import RequestTimeline
from server.text.answer import AnswerParser
from server.text.output import OutputText
from server.types import GenerateRequest, ImageInput, SamplingParams


@dataclass(frozen=True, kw_only=True)
class GenerationPlan:
    """Generation of one HTTP request: n sequences for each prompt, numbered prompt by prompt."""

    options: GenerationOptions
    prompts: Sequence[list[int]]
    model: str
    """The served model's name, or an adapter's."""
    answer_id: str
    arrival: float
    """When the request came, in seconds of time.monotonic()."""
    prompt_param: str
    """Name of the prompt in errors."""
    requested_tokens: int | None
    cut_to_fit: bool = False
    """Whether a requested limit that does not fit beside the prompt is cut to what does; else it is refused."""
    default_tokens: int | None = None
    """The limit where the client asks for none; None: all that fits into the context."""
    logprobs: int | None = None
    """Alternatives that each generated token is returned with; None: no log-probabilities."""
    prompt_logprobs: int | None = None
    at_start: bool = False
    """Whether the answer is a text of its own, not one that goes on from the prompt."""
    grammar: str | None = None
    """The grammar that bounds every sequence, in llguidance's JSON form."""
    grammar_param: str | None = None
    """Name of the option that the grammar comes from, in errors."""
    images: Sequence[ImageInput] = ()
    end_ids: tuple[int, ...] = ()
    """Tokens that end an answer besides those that the checkpoint names."""
    keep_marks: bool = False
    """Whether the marks of tool calls and thoughts stay in the text."""
    parser: Callable[[], AnswerParser] = AnswerParser
    """Splits one sequence's text into thoughts, content and calls."""


def start_generation(service: Service, backend: Backend, ticket: Ticket, plan: GenerationPlan) -> Generation:
    """The planned generation; its sequences go to the engine when it is read. Raises ApiError."""
    adapter = service.adapter(plan.model)
    timeout_s = allowed_seconds(service.config.http.request_timeout_s)
    runs: list[SequenceRun] = []
    for prompt in plan.prompts:
        for sampling in _sampling(service, backend, plan, len(prompt)):
            name = f"{plan.answer_id}-{len(runs)}"
            request = GenerateRequest(name, prompt, sampling, adapter, request_id.get(), list(plan.images))
            runs.append(
                SequenceRun(
                    len(runs),
                    request,
                    _output_text(backend, plan, sampling.min_tokens),
                    RequestTimeline(arrival=plan.arrival),
                    include_stop=bool(plan.options.include_stop_str_in_output),
                    grammar_param=plan.grammar_param,
                )
            )
    # Admission comes last, so that a prompt that can never be served is refused as such however much is under way.
    ticket.hold_tokens(sum(map(len, plan.prompts)))
    if timeout_s is not None:
        timeout_s = max(0.0, plan.arrival + timeout_s - time.monotonic())
    return Generation(runs, backend.engine, service.metrics, ticket, timeout_s)


def _sampling(service: Service, backend: Backend, plan: GenerationPlan, prompt_tokens: int) -> list[SamplingParams]:
    """Parameters of each of one prompt's n sequences. Raises ApiError."""
    requested = plan.requested_tokens
    if requested is not None and plan.cut_to_fit:
        requested = min(requested, max(1, backend.limits.max_model_len - prompt_tokens))
    max_tokens = resolve_max_tokens(backend, prompt_tokens, requested, plan.default_tokens, plan.prompt_param)
    found = plan.options.sampling(
        max_tokens,
        backend.limits.vocab_size,
        service.sampling_defaults,
        plan.logprobs,
        plan.grammar,
        plan.prompt_logprobs,
    )
    return [msgspec.structs.replace(one, stop_token_ids=(*one.stop_token_ids, *plan.end_ids)) for one in found]


def _output_text(backend: Backend, plan: GenerationPlan, min_tokens: int) -> OutputText:
    options = plan.options
    skip = options.skip_special_tokens is not False
    detokenizer = backend.tokenizer.detokenizer(
        skip_special_tokens=skip, at_start=plan.at_start, keep_marks=plan.keep_marks
    )
    return OutputText(
        detokenizer,
        options.stop or (),
        include_stop=bool(options.include_stop_str_in_output),
        min_tokens=min_tokens,
        parser=plan.parser(),
        hidden=backend.tokenizer.hidden(keep_marks=plan.keep_marks) if skip and options.stop else {},
    )


def new_id(prefix: str) -> str:
    """An id for an answer or a part of one."""
    return prefix + uuid.uuid4().hex
