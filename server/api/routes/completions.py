"""POST /v1/completions: text that goes on from a prompt."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from pydantic import Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from server.api.answering.generation import Generation
from server.api.answering.limits import admit
from server.api.answering.plan import GenerationPlan, new_id, start_generation
from server.api.answering.prompts import PROMPT_SCHEMA, encode_prompts, prompt_count
from server.api.answering.sequence_run import Delta
from server.api.answering.service import Backend, Service, service_of
from server.api.http.errors import ApiError, bad_request, own_name, renamed
from server.api.http.hints import take_hints
from server.api.http.replies import json_response
from server.api.http.streaming import DONE, EventStream, closing, event, unless_disconnected
from server.api.http.validation import read_json, validate
from server.api.openai.logprobs import CompletionLogprobsBuilder, fewer, prompt_scores
from server.api.openai.options import MAX_TOKEN_COUNT, UNSUPPORTED, GenerationOptions
from server.api.openai.other_names import OTHER_NAMES, take_other_names
from server.api.openai.protocol import Completion, CompletionChoice, Timings, Usage
from server.api.openai.structured import check_grammar, form_grammar
from server.text.answer import Part
from server.types import TokenLogprob

router = APIRouter()

DEFAULT_TOKENS = 16
"""OpenAI's default for max_tokens of /v1/completions."""

UNSUPPORTED_COMPLETION: dict[str, tuple[Any, ...]] = UNSUPPORTED | {
    "suffix": (),
    "prompt_embeds": (),
    "messages": (),
    "max_completion_tokens": (),
    "top_logprobs": (0,),
    "tools": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
}


class CompletionRequest(GenerationOptions):
    """Body of POST /v1/completions. The prompt is checked by encode_prompts."""

    prompt: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN_COUNT)] | None = None

    @property
    def scored_alternatives(self) -> int | None:
        """Alternatives to the prompt's tokens that are wanted; None: the prompt is not scored."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in wanted if count is not None), default=None)

    def check(self) -> None:
        """Raise ApiError for options that contradict each other."""
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise bad_request(
                "Invalid 'max_tokens': 0 is only allowed with 'echo'.", "max_tokens", "value_out_of_range"
            )


@router.post("/v1/completions", summary="Continue a text")
async def completions(request: Request) -> Response:
    """OpenAI's text completions, whole or streamed, for one prompt or many."""
    service = service_of(request)
    document, size = await read_json(request, service.config.http.max_body_bytes)
    arrival = time.monotonic()
    take_hints("completions", document)
    names = take_other_names(document, OTHER_NAMES)
    try:
        options = validate(CompletionRequest, document, UNSUPPORTED_COMPLETION)
        answer, generation = await _start(service, options, size, arrival, names)
    except ApiError as e:
        raise renamed(e, names) from e
    if options.stream:
        return EventStream(answer.events(generation), generation.close)
    try:
        return json_response(await unless_disconnected(request, answer.whole(generation)))
    finally:
        generation.close()


async def _start(
    service: Service, options: CompletionRequest, size: int, arrival: float, names: Mapping[str, str]
) -> tuple[_Answer, Generation]:
    """An answer and its generation, which has been admitted; names as start_turn() has it. Raises ApiError."""
    options.check()
    service.check_model(options.model)
    backend = service.backend()
    count = prompt_count(options.prompt)
    ticket = admit(service, count * (options.n or 1), "n" if count == 1 else "prompt")
    try:
        special = options.add_special_tokens is not False
        encoded = await backend.tokenizer.off_loop(
            size, lambda: encode_prompts(options.prompt, backend, "prompt", add_special_tokens=special)
        )
        grammar, form = None, options.answer_form()
        if form is not None:
            grammar = await backend.tokenizer.off_loop(size, lambda: form_grammar(form))
            await check_grammar(backend.grammars, grammar, form[2])
        answer = _Answer(options, backend)
        plan = GenerationPlan(
            options=options,
            prompts=encoded,
            model=options.model,
            answer_id=answer.id,
            arrival=arrival,
            prompt_param="prompt",
            # Where only the prompt is wanted, one token is generated and not shown.
            requested_tokens=1 if options.max_tokens == 0 else options.max_tokens,
            default_tokens=None if "max_tokens" in names else DEFAULT_TOKENS,  # -1: no limit
            logprobs=options.logprobs,
            prompt_logprobs=options.scored_alternatives,
            grammar=grammar,
            grammar_param=None if form is None else own_name(form[2], names),
        )
        generation = start_generation(service, backend, ticket, plan)
    except BaseException:
        ticket.release()
        raise
    return answer, generation


class _Answer:
    """One answer: its identity, and how it is written whole and as events."""

    def __init__(self, options: CompletionRequest, backend: Backend) -> None:
        self.id = new_id("cmpl-")
        self._created = int(time.time())
        self._model = options.model
        self._tokenizer = backend.tokenizer
        self._logprobs = options.logprobs
        self._prompt_logprobs = options.prompt_logprobs
        self._timings = bool(options.timings)
        self._skip_special_tokens = options.skip_special_tokens is not False
        self._echo = bool(options.echo)
        self._only_echo = options.max_tokens == 0
        self._prompt = options.prompt
        stream = options.stream_options
        self._usage_at_end = bool(stream and stream.include_usage)
        self._usage_always = bool(stream and stream.continuous_usage_stats)

    async def whole(self, generation: Generation) -> Completion:
        texts: list[list[str]] = [[] for _ in generation.runs]
        logprobs: list[list[TokenLogprob]] = [[] for _ in generation.runs]
        last: dict[int, Delta] = {}
        async with closing(generation.deltas()) as deltas:
            async for delta in deltas:
                texts[delta.index].append(delta.part.content)
                logprobs[delta.index].extend(delta.logprobs)
                last[delta.index] = delta
        choices = [
            self._choice(
                generation,
                replace(delta, part=Part(content="".join(texts[index])), logprobs=logprobs[index]),
                self._builder(),
                first=True,
            )
            for index, delta in sorted(last.items())
        ]
        return Completion(self.id, self._created, self._model, choices, self._usage(generation))

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        builders = [self._builder() for _ in generation.runs]
        begun: set[int] = set()
        async with closing(generation.deltas()) as deltas:
            async for delta in deltas:
                first = delta.index not in begun
                begun.add(delta.index)
                choice = self._choice(generation, delta, builders[delta.index], first=first)
                usage = self._usage(generation) if self._usage_always else None
                shown = usage if self._usage_at_end or self._usage_always else msgspec.UNSET
                yield event(Completion(self.id, self._created, self._model, [choice], shown))
        if self._usage_at_end:
            yield event(Completion(self.id, self._created, self._model, [], self._usage(generation)))
        yield DONE

    def _choice(
        self, generation: Generation, delta: Delta, builder: CompletionLogprobsBuilder, *, first: bool
    ) -> CompletionChoice:
        """A delta as a choice; the first one of a sequence begins with the prompt where that is echoed."""
        if self._only_echo:
            ended = delta.finish_reason and "length"
            delta = replace(delta, part=Part(), logprobs=[], finish_reason=ended, stop_reason=None)
        run = generation.runs[delta.index]
        ids = run.request.prompt_token_ids
        text, logprobs = delta.part.content, None
        last = delta.finish_reason is not None
        if first and self._echo:
            prompt = self._prompt_text(delta.index, len(generation.runs), ids)
            if self._logprobs is not None:
                scores = [fewer(entry, self._logprobs) for entry in run.prompt_logprobs]
                logprobs = builder.with_prompt((ids, prompt), scores, delta.logprobs, text, last=last)
            text = prompt + text
        elif self._logprobs is not None:
            logprobs = builder.build(delta.logprobs, text, last=last)
        timings = self._timings_of(generation, delta)
        scored = prompt_scores(self._tokenizer, run.prompt_logprobs, self._prompt_logprobs)
        return CompletionChoice(delta.index, text, logprobs, delta.finish_reason, delta.stop_reason, timings, scored)

    def _builder(self) -> CompletionLogprobsBuilder:
        return CompletionLogprobsBuilder(self._tokenizer, skip_special_tokens=self._skip_special_tokens)

    def _prompt_text(self, index: int, count: int, ids: list[int]) -> str:
        """The prompt as it was given, or the text of its ids."""
        several = isinstance(self._prompt, list) and type(self._prompt[0]) is not int
        prompts = self._prompt if several else [self._prompt]
        prompt = prompts[index // (count // len(prompts))]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(ids, skip_special_tokens=False)

    def _usage(self, generation: Generation) -> Usage:
        usage = generation.usage()
        if not self._only_echo:
            return usage
        return Usage.of(usage.prompt_tokens, 0, usage.prompt_tokens_details.cached_tokens)

    def _timings_of(self, generation: Generation, delta: Delta) -> Timings | msgspec.UnsetType:
        wanted = self._timings and delta.finish_reason is not None
        return Timings.of(generation.runs[delta.index].timeline) if wanted else msgspec.UNSET
