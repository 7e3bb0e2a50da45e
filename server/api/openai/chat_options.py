"""The options of a chat, whichever endpoint they came through."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from server.api.http.errors import bad_request
from server.api.http.hints import HINTS, ignore_thinking
from server.api.openai.message_schemas import MESSAGES_SCHEMA
from server.api.openai.options import MAX_TOKEN_COUNT, UNSUPPORTED, GenerationOptions
from server.api.openai.other_names import OTHER_NAMES_CHAT
from server.api.openai.tools import ToolOptions
from server.text.chat_template import ChatTemplate
from server.text.dialect import Effort

UNSUPPORTED_CHAT: dict[str, tuple[Any, ...]] = UNSUPPORTED | {
    "functions": (),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "echo": (False,),
    "documents": (),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "add_special_tokens": (False,),
    "suffix": (),
    "prompt": (),
}


class ChatOptions(GenerationOptions, ToolOptions):
    """Body of POST /v1/chat/completions. The messages are checked by server.api.openai.conversation."""

    messages: Annotated[list[Any], Field(min_length=1), WithJsonSchema(MESSAGES_SCHEMA)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_COUNT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None

    def check(self) -> None:
        """Raise ApiError for options that contradict each other."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise bad_request("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs", "invalid_value")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise bad_request(
                "'max_tokens' and 'max_completion_tokens' say different things; set one of them.",
                "max_tokens",
                "invalid_value",
            )
        if self.continues and self.add_generation_prompt:
            raise bad_request(
                "'continue_final_message' and 'add_generation_prompt' exclude each other.",
                "continue_final_message",
                "invalid_value",
            )
        self.answer_form()
        self.usable_tools()

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message, by that option or by DeepSeek's and Mistral's mark in it."""
        last = self.messages[-1]
        marked = isinstance(last, dict) and last.get("role") == "assistant" and last.get("prefix") is True
        return marked if self.continue_final_message is None else self.continue_final_message

    @property
    def requested_tokens(self) -> int | None:
        """Limit of the answer's length, by either of its names."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def template_variables(self, template: ChatTemplate) -> dict[str, Any]:
        """Variables that the chat template may look at; an effort that the model cannot be told is noted as ignored."""
        found: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            found = template.effort_variables(self.reasoning_effort)
            if not found and self.reasoning_effort != "none":
                ignore_thinking("reasoning_effort")
        return found | (self.chat_template_kwargs or {})


_ASKING_NOTHING: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "max_tokens": (-1, -2),
    "max_completion_tokens": (-1, -2),
    "seed": (-1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "repeat_last_n": (-1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "top_k": (0, -1),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "timings": (False,),
    "speculation": (True, False),
    "response_format": ({"type": "text"},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
    "include_reasoning": (True,),
    "stream_options": ({},),
}
_HINTS = {hint.path for hint in HINTS if not hint.unless_thinking}
UNSUPPORTED_ELSEWHERE: dict[str, tuple[Any, ...]] = (
    UNSUPPORTED_CHAT
    | {other: _ASKING_NOTHING.get(own, ()) for other, (own, _) in OTHER_NAMES_CHAT.items()}
    | {name: _ASKING_NOTHING.get(name, ()) for name in ChatOptions.model_fields if name not in _HINTS}
)
"""A chat's options and their other names, for endpoints that have others; with the values that ask for nothing."""
