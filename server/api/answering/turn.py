"""A chat turn makes the prompt, generates its answers and splits them into thoughts, content and tool calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from server.api.answering.generation import Generation
from server.api.answering.images import TakenImages, give_back, image_parts, take_images
from server.api.answering.limits import admit, check_known, check_length
from server.api.answering.plan import GenerationPlan, start_generation
from server.api.answering.sequence_run import Ending
from server.api.answering.service import Backend, Service
from server.api.http.errors import ApiError, bad_request, own_name
from server.api.http.replies import json_response
from server.api.http.streaming import EventStream, closing, unless_disconnected
from server.api.openai.chat_options import ChatOptions
from server.api.openai.conversation import conversation
from server.api.openai.protocol import CompletionTokensDetails, Usage
from server.api.openai.structured import check_grammar, form_grammar
from server.text.answer import AnswerParser, Part
from server.text.errors import PromptError
from server.text.grammars.grammar import after_thoughts, as_content, either, tools_grammar
from server.types import ImageInput, TokenLogprob


@dataclass(slots=True)
class TurnDelta:
    """Additions of one step to one answer; finish_reason is set on the answer's last delta."""

    index: int
    part: Part
    logprobs: list[TokenLogprob]
    finish_reason: Ending | str | None
    stop_reason: str | int | None


@dataclass(frozen=True)
class EncodedChat:
    """A conversation's prompt."""

    ids: list[int]
    text: str
    images: list[ImageInput]


@dataclass(frozen=True)
class _Prompt:
    chat: EncodedChat
    grammar: str | None
    grammar_param: str
    functions: dict[str, Any]
    """Parameters of the functions that the model may call, by their names."""
    forced: bool


class Turn:
    """One request's answers. The caller reads them to the end or calls close()."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    def usage(self) -> Usage:
        """Tokens so far, how many of them were thoughts, and how draft tokens fared if any were verified."""
        usage = self.generation.usage()
        usage.completion_tokens_details = details = CompletionTokensDetails(
            sum(run.reasoning_tokens for run in self.generation.runs)
        )
        known = [run.timeline.timings for run in self.generation.runs if run.timeline.timings is not None]
        checked = sum(timings.draft_tokens for timings in known)
        if checked:
            details.accepted_prediction_tokens = sum(timings.accepted_tokens for timings in known)
            details.rejected_prediction_tokens = checked - details.accepted_prediction_tokens
        return usage

    async def deltas(self) -> AsyncIterator[TurnDelta]:
        """Deltas of all answers, each when it has been generated. Raises ApiError."""
        ended: set[int] = set()
        async with closing(self.generation.deltas()) as deltas:
            async for delta in deltas:
                if delta.index in ended:
                    continue
                run = self.generation.runs[delta.index]
                repeated, reason = run.text.parser.repeated, delta.finish_reason
                if repeated and reason is None:
                    ended.add(delta.index)
                    run.end()
                called = repeated or (reason == "stop" and run.text.parser.called)
                yield TurnDelta(
                    delta.index, delta.part, delta.logprobs, "tool_calls" if called else reason, delta.stop_reason
                )

    def close(self) -> None:
        """Give up the turn's place among the requests."""
        self.generation.close()


class AnswerForm(Protocol):
    """The form that one endpoint gives a turn's answers."""

    async def whole(self, turn: Turn) -> Any:
        """The JSON document that holds all answers, when they are complete."""

    def events(self, turn: Turn) -> AsyncIterator[bytes]:
        """Server-sent events that give the answers while they are generated."""


async def respond(request: Request, turn: Turn, form: AnswerForm, stream: bool) -> Response:
    """The HTTP answer to request, as events or whole; closes the turn. Raises ApiError."""
    if stream:
        return EventStream(form.events(turn), turn.close)
    try:
        return json_response(await unless_disconnected(request, form.whole(turn)))
    finally:
        turn.close()


async def start_turn(
    service: Service,
    options: ChatOptions,
    size: int,
    arrival: float,
    answer_id: str,
    names: Mapping[str, str],
    *,
    cut_to_fit: bool = False,
) -> Turn:
    """A turn that has been admitted; its sequences go to the engine when it is read. Raises ApiError.

    names: the request's own names for options, in errors of the turn that come later, by the chat's.
    cut_to_fit: whether a limit of the answer's length that does not fit beside the prompt is reduced to what fits.
    """
    options.check()
    service.check_model(options.model)
    backend = service.backend()
    ticket = admit(service, options.n or 1, "n")
    try:
        parts = image_parts(service)
        messages = await backend.tokenizer.off_loop(size, lambda: conversation(options.messages, parts))
        taken = await take_images(service, parts.found)
        ticket.on_release(lambda: give_back(service, taken))
        prompt = await backend.tokenizer.off_loop(size, lambda: _prompt(options, backend, messages, taken))
        if prompt.grammar is not None:
            await check_grammar(backend.grammars, prompt.grammar, prompt.grammar_param)
        dialect = backend.tokenizer.dialect
        plan = GenerationPlan(
            options=options,
            prompts=[prompt.chat.ids],
            images=prompt.chat.images,
            model=options.model,
            answer_id=answer_id,
            arrival=arrival,
            prompt_param="messages",
            requested_tokens=options.requested_tokens,
            cut_to_fit=cut_to_fit,
            logprobs=(options.top_logprobs or 0) if options.logprobs else None,
            prompt_logprobs=options.prompt_logprobs,
            at_start=not options.continues,
            grammar=prompt.grammar,
            grammar_param=own_name(prompt.grammar_param, names),
            end_ids=tuple(i for mark in dialect.ends if (i := backend.tokenizer.special_id(mark)) is not None),
            keep_marks=bool(prompt.functions) or dialect.splits,
            parser=lambda: AnswerParser(
                dialect.splitter(prompt.chat.text, prompt.functions),
                dialect.tool_parser(prompt.functions) if prompt.functions else None,
                single_call=options.parallel_tool_calls is False,
                forced=prompt.forced,
            ),
        )
        generation = start_generation(service, backend, ticket, plan)
    except BaseException:
        ticket.release()
        raise
    return Turn(generation)


async def count_chat(service: Service, options: ChatOptions, size: int) -> list[int]:
    """Token ids of the prompt that a turn would have. Raises ApiError."""
    options.check()
    service.check_model(options.model)
    backend, parts = service.backend(), image_parts(service)
    messages = await backend.tokenizer.off_loop(size, lambda: conversation(options.messages, parts))
    taken = await take_images(service, parts.found)
    try:
        return (await backend.tokenizer.off_loop(size, lambda: _encode_chat(options, backend, messages, taken))).ids
    finally:
        give_back(service, taken)


def _encode_chat(
    options: ChatOptions, backend: Backend, messages: list[dict[str, Any]], taken: TakenImages
) -> EncodedChat:
    """The prompt of a conversation with these messages and images. Raises ApiError."""
    tools, _ = options.usable_tools()
    continues = options.continues
    tokenizer = backend.tokenizer
    template = tokenizer.chat_template
    form: dict[str, Any] = {
        "add_generation_prompt": not continues and options.add_generation_prompt is not False,
        "continue_final_message": continues,
        "tools": tools,
        "variables": options.template_variables(template),
    }
    try:
        if taken.images:
            texts = [image.text for image in taken.images]
            text = template.render_with_images(messages, taken.placeholder, texts, **form)
        else:
            text = template.render(messages, **form)
    except PromptError as e:
        raise _refused(messages, str(e)) from e
    check_length(backend, template.guard.plain(text), "messages")
    ids = tokenizer.encode_chat(text)
    if not ids:
        raise bad_request("the model's chat template makes no text of these messages", "messages", "invalid_prompt")
    return EncodedChat(ids, text, taken.placed(ids))


def _refused(messages: list[dict[str, Any]], reason: str) -> ApiError:
    """400: why a conversation is no prompt. Templates that go through the arguments of calls do not say what is wrong."""
    for i, message in enumerate(messages):
        for j, call in enumerate(message.get("tool_calls", ())):
            if not isinstance(call["function"]["arguments"], dict):
                where = f"messages[{i}].tool_calls[{j}].function.arguments"
                text = f"Invalid '{where}': it is no JSON object, which this model's chat template needs."
                return bad_request(text, where, "invalid_value")
    return bad_request(reason, "messages", "invalid_prompt")


def _prompt(options: ChatOptions, backend: Backend, messages: list[dict[str, Any]], taken: TakenImages) -> _Prompt:
    chat = _encode_chat(options, backend, messages, taken)
    check_known(backend, chat.ids, "messages")
    tokenizer, dialect = backend.tokenizer, backend.tokenizer.dialect
    tools, forced = options.usable_tools()
    form = options.answer_form()
    grammar, param = None, "tools"
    if form is not None:
        if forced and not form[2].startswith("response_format"):
            raise bad_request(
                f"'tool_choice' asks for a call, '{form[2]}' for something else.", "tool_choice", "invalid_value"
            )
        grammar, param = as_content(form_grammar(form), dialect, tokenizer.mark_id), form[2]
        if forced:  # OpenAI's form is of answers in words, and agents send both: a call now, the form after its result
            grammar, param = None, "tools"
    if tools and (forced or grammar is not None):
        calls = tools_grammar(dialect, tools, tokenizer.mark_id, several=not options.one_call)
        grammar = calls if grammar is None else either(grammar, calls)
    if grammar is not None and not dialect.has_thought(chat.text):
        grammar = after_thoughts(grammar, dialect, tokenizer.mark_id, opened=dialect.thinks_on(chat.text))
    functions = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    return _Prompt(chat, grammar, param, functions, forced)
