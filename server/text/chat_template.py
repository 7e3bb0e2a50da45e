"""Messages to the model's prompt format, through the checkpoint's own template in transformers' sandbox."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from server.text.dialect import EFFORTS, NAMED, Dialect, Effort
from server.text.errors import PromptError
from server.text.guard import SpecialTextGuard
from server.text.histories import (
    one_call_each,
    python_calls,
    with_argument_texts,
    with_descriptions,
    with_thought_content,
    with_written_calls,
)
from server.text.image_marks import IMAGE, in_parts

# Names that transformers or the template's sandbox give a meaning of their own.
RESERVED_VARIABLES = frozenset(
    {
        "messages", "conversation", "conversations", "tools", "documents", "chat_template", "tokenize",
        "add_generation_prompt", "continue_final_message", "sanitize_control_tokens", "padding", "truncation",
        "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "self",
    }
)  # fmt: skip

_PROBE = "zqxprobe"


class ChatTemplate:
    """The chat template of one tokenizer; has none for base models."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        with_tools = None
        if isinstance(template, dict):
            with_tools = template.get("tool_use")
            template = template.get("default")
        self.source: str | None = template
        self._source_with_tools: str | None = with_tools or template
        added = tokenizer.added_tokens_decoder.values()
        self.dialect = Dialect.of(self._source_with_tools, [token.content for token in added])
        self.guard = SpecialTextGuard(
            {*(token.content for token in added if token.special), *tokenizer.all_special_tokens},
            {token.content for token in added}.intersection(self.dialect.marks),
        )
        source = self._source_with_tools or ""
        self._thoughts = [name for name in ("thinking", "tool_plan") if f"message.{name}" in source]
        """Names that the template has for what others call reasoning_content (gpt-oss', Cohere's)."""
        self._knows_developer = self._takes_system = self._takes_late_system = self._takes_any_id = True
        self._wants_parts, self._takes_arguments = False, True
        self._written_calls: Callable[[Sequence[tuple[str, Any]]], str] | None = None
        """What writes calls that the template does not show."""
        self._wants_parts = self.source is not None and self._only_takes_parts()
        self._knows_developer = self.source is not None and "developer" in self.source
        if self.source is not None:
            known, another = "abc123456", "call_abc-0123456789"
            self._takes_arguments = self._takes_call(known) or not self._takes_call(known, as_text=True)
            self._takes_system = self._shows("system", "user", in_order=False)
            self._takes_late_system = self._shows("system", "system", "user", "system", "assistant", "user", "system")
            self._takes_any_id = self._takes_call(another) or not self._takes_call(known)
            if not self._takes_call(known, shown=True):
                self._written_calls = self._call_writer()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        images_in_parts: bool = True,
    ) -> str:
        """The prompt text, in which special tokens from messages and tools are marked (see server.text.guard).

        So are the marks of thoughts and calls in what users and tools say.

        A message's content is a string; variables are extra names the template may look at. images_in_parts: whether the
        template gets a content with images (see server.text.image_marks) as parts.

        Raises PromptError when the model has no template or the template refuses the messages.
        """
        if self.source is None:
            raise PromptError("this model has no chat template; use /v1/completions")
        reserved = RESERVED_VARIABLES.intersection(variables or {})
        if reserved:
            raise PromptError(f"{sorted(reserved)[0]!r} cannot be set through chat_template_kwargs")
        messages = [self._prepared(message) for message in messages]
        tools = self.guard.mark(list(tools))
        if not self.dialect.shows_tools:
            messages, tools = self.dialect.with_tools(messages, tools), ()
        if self._written_calls is not None:
            messages = [with_written_calls(message, self._written_calls) for message in messages]
        elif self.dialect.family == "harmony":
            messages, tools = one_call_each(messages), with_descriptions(tools)
        elif self.dialect.family == "gemma4":
            messages = list(map(with_thought_content, messages))
        if not self._takes_arguments:
            messages = list(map(with_argument_texts, messages))
        if not self._takes_late_system:
            messages = _with_early_system(messages)
        if not self._takes_system:
            messages = _without_system(messages)
        try:
            text = self._tokenizer.apply_chat_template(
                [self._in_parts(message, images=images_in_parts) for message in messages],
                tools=tools or None,
                chat_template=self._source_with_tools if tools else self.source,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **self.guard.mark(dict(variables or {})),
            )
        except Exception as e:  # the template is the checkpoint's code: whatever it raises is about these messages
            reason = " ".join(str(e).split()) or type(e).__name__
            raise PromptError(f"the model's chat template does not take these messages: {reason[:300]}") from e
        return str(text)

    def effort_variables(self, effort: Effort) -> dict[str, Any]:
        """The template's variables for this much thinking; none if it has no such."""
        found: dict[str, Any] = {self.dialect.switch: effort != "none"} if self.dialect.switch else {}
        if self.dialect.effort == "reasoning_effort" and (effort != "none" or not found):
            at = EFFORTS.index(effort)
            found["reasoning_effort"] = min(
                self._efforts, key=lambda known: abs(EFFORTS.index(known) - at), default=effort
            )
        return found

    @functools.cached_property
    def _efforts(self) -> tuple[Effort, ...]:
        """Values of reasoning_effort that the model is trained on, as far as that can be told; templates refuse others."""
        if self.dialect.family == "harmony":
            return ("low", "medium", "high")
        return tuple(effort for effort in EFFORTS if self._takes_effort(effort))

    def _takes_effort(self, effort: Effort) -> bool:
        try:
            self.render([{"role": "user", "content": _PROBE}], variables={"reasoning_effort": effort})
        except PromptError:
            return False
        return True

    def render_with_images(
        self, messages: Sequence[Mapping[str, Any]], placeholder: str, texts: Sequence[str], **options: Any
    ) -> str:
        """render() of messages with images, marked in their contents, with texts in the places of the images.

        placeholder: what templates of this model write for an image. Raises PromptError where the template does not show
        the images one after another.
        """
        text = self.render(messages, **options)
        if self.guard.places(text, placeholder) == len(texts):
            return self.guard.replaced(text, placeholder, texts)
        # A template that knows no parts: the placeholders stand in the text.
        text = self.render(messages, images_in_parts=False, **options)
        if text.count(IMAGE) != len(texts) or self.guard.places(text, placeholder):
            raise PromptError("the model's chat template does not show each image once")
        return self.guard.replaced(text, IMAGE, texts)

    def _prepared(self, message: Mapping[str, Any]) -> dict[str, Any]:
        # What the model has written has its marks, and so has what says how to write them.
        prepared = dict(self.guard.mark(message, marks=message["role"] in ("user", "tool")))
        if prepared["role"] == "developer" and not self._knows_developer:
            prepared["role"] = "system"  # its older name, with the same meaning
        if "reasoning_content" in prepared:
            prepared |= dict.fromkeys(self._thoughts, prepared["reasoning_content"])
        if not self._takes_any_id:
            calls = [{**call, "id": _short_id(call["id"])} for call in prepared.get("tool_calls", ())]
            prepared |= {"tool_calls": calls} if calls else {}
            prepared |= {"tool_call_id": _short_id(prepared["tool_call_id"])} if "tool_call_id" in prepared else {}
        return prepared

    def _in_parts(self, message: Mapping[str, Any], *, images: bool) -> dict[str, Any]:
        prepared = dict(message)
        content = prepared.get("content")
        if isinstance(content, str) and images and IMAGE in content:
            prepared["content"] = in_parts(content)
        elif isinstance(content, str) and self._wants_parts:
            prepared["content"] = [{"type": "text", "text": content}]
        return prepared

    def _only_takes_parts(self) -> bool:
        """Whether the template drops a content that is a string, and shows one that is a list of parts."""
        if self._shows("user"):
            return False
        self._wants_parts = True
        return self._shows("user")

    def _shows(self, *roles: str, in_order: bool = True) -> bool:
        """Whether the template takes messages of these roles and shows all of them (in their order)."""
        probes = [f"{_PROBE}{i}" for i in range(len(roles))]
        try:
            text = self.render([{"role": role, "content": probe} for role, probe in zip(roles, probes, strict=True)])
        except PromptError:
            return False
        places = [text.find(probe) for probe in probes]
        return -1 not in places and (not in_order or places == sorted(places))

    def _call_writer(self) -> Callable[[Sequence[tuple[str, Any]]], str] | None:
        if self.dialect.family == "lfm2":
            return python_calls
        notation = NAMED.get(self.dialect.family)
        return None if notation is None else notation.written

    def _takes_call(self, call_id: str, *, as_text: bool = False, shown: bool = False) -> bool:
        """Whether the template takes a conversation with a call of this id, and shows its name.

        as_text: with arguments that are a text, not an object.
        """
        call = {
            "id": call_id,
            "type": "function",
            "function": {"name": f"{_PROBE}f", "arguments": "{}" if as_text else {}},
        }
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": _PROBE},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": _PROBE, "tool_call_id": call_id, "name": "f"},
        ]
        try:
            text = self.render(messages)
        except PromptError:
            return False
        return f"{_PROBE}f" in text or not shown


def _short_id(call_id: str) -> str:
    """The id of a call for a template that takes nine letters and digits only (Mistral's); the same for the same id."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _with_early_system(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a template that takes one system message, the first: later ones are part of what the user says."""
    result: list[dict[str, Any]] = []
    for message in map(dict, messages):
        if message["role"] != "system" or not result:
            result.append(message)
        elif all(earlier["role"] == "system" for earlier in result):
            result[0]["content"] = f"{result[0]['content']}\n\n{message['content']}"
        elif result[-1]["role"] == "user":
            result[-1]["content"] = f"{result[-1]['content']}\n\n{message['content']}"
        else:
            result.append({"role": "user", "content": message["content"]})
    return result


def _without_system(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a template that takes no system message: it is the beginning of what the user says first."""
    result = [dict(message) for message in messages]
    if not result or result[0]["role"] != "system":
        return result
    if len(result) == 1 or result[1]["role"] != "user":
        result[0]["role"] = "user"
        return result
    system = result.pop(0)
    result[0]["content"] = f"{system['content']}\n\n{result[0]['content']}"
    return result
