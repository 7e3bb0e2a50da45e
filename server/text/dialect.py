"""Forms in which one model writes tool calls and thoughts, found in its chat template and vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, get_args

from server.text.calls.json_calls import JsonToolParser
from server.text.calls.marked_calls import MarkedToolParser, read_gemma_call, read_python_calls
from server.text.calls.named_calls import APERTUS, DEEPSEEK, DEEPSEEK_R1, MISTRAL, Named, NamedToolParser
from server.text.calls.parser import ToolParser
from server.text.calls.tagged_calls import GLM, MINIMAX, SEED, XML, TaggedToolParser, Tags
from server.text.harmony import CALL, HarmonySplitter
from server.text.harmony import MARKS as HARMONY_MARKS
from server.text.reasoning import MARKS, ReasoningMarks, ReasoningSplitter

Family = Literal[
    "hermes", "nemotron", "phi", "granite", "cohere", "xml", "seed", "minimax", "glm", "lfm2", "llama", "mistral",
    "deepseek", "deepseek_r1", "apertus", "gemma", "gemma4", "harmony", "generic",
]  # fmt: skip
_TAGS: dict[Family, Tags] = {"xml": XML, "seed": SEED, "minimax": MINIMAX, "glm": GLM}
NAMED: dict[Family, Named] = {
    "mistral": MISTRAL, "deepseek": DEEPSEEK, "deepseek_r1": DEEPSEEK_R1, "apertus": APERTUS,
}  # fmt: skip

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much a model thinks, as OpenAI's API says it."""
EFFORTS: tuple[Effort, ...] = get_args(Effort)

MAX_CALLS = 16
"""Calls that a forced answer may hold; a small model would go on for ever."""

_THINKING = re.compile(r"\{%-?\s*(?:el)?if\b[^%]*(?<![\w.'\"])thinking\b(?!['\"(])")
"""A condition on the variable thinking, which is no field of a message."""

# For models whose template knows no tools: the instructions that Hermes and Qwen models are trained on.
_INSTRUCTIONS = """You may call one or more functions to help the user. Here are the available functions:
<tools>
{tools}
</tools>

{how}"""
_IN_JSON = """For each function call, return a JSON object with the function's name and arguments within \
<tool_call></tool_call> tags:
<tool_call>
{"name": "function-name", "arguments": {"argument": "value"}}
</tool_call>"""
_AS_EXAMPLE = "To call functions, write their names and their arguments as JSON in exactly this form:\n{example}"


@dataclass(frozen=True)
class Dialect:
    """One model's way of writing. family is generic where the template has no place for tools and shows no notation."""

    family: Family
    reasoning: ReasoningMarks | None
    effort: str | None
    """The template's variable that sets how much the model thinks."""
    switch: str | None = None
    """The template's variable that switches thinking on and off, which may be beside reasoning_effort."""
    named_mistral: bool = False
    shows_tools: bool = True
    """Whether the template has a place for tools."""

    @classmethod
    def of(cls, template: str | None, tokens: Sequence[str]) -> Dialect:
        """The dialect of a chat template and the added tokens of its vocabulary."""
        source, added = template or "", frozenset(tokens)
        # A base model has no template; its vocabulary may still hold its family's marks.
        reasoning = next((m for m in MARKS if m.end in source or (m.start in added and m.end in added)), None)
        # Granite 3 and DeepSeek V3.1 look at thinking.
        switch = "enable_thinking" if "enable_thinking" in source else "thinking" if _THINKING.search(source) else None
        effort = "reasoning_effort" if "reasoning_effort" in source else switch
        family = _family(source)
        shows_tools = "tools" in source or family not in ("generic", "deepseek", "deepseek_r1")
        return cls(family, reasoning, effort, switch, "[ARGS]" in added, shows_tools)

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that must not be dropped from an answer that is parsed, special tokens or not."""
        calls: dict[Family, tuple[str, ...]] = {
            **dict.fromkeys(("hermes", "generic"), ("<tool_call>", "</tool_call>")),
            **{family: (tags.start, tags.end) for family, tags in _TAGS.items()},
            **{family: named.marks for family, named in NAMED.items()},
            "glm": (GLM.start, GLM.end, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            "nemotron": ("<TOOLCALL>", "</TOOLCALL>"),
            "phi": ("<|tool_call|>", "<|/tool_call|>"),
            "granite": ("<|tool_call|>",),
            "cohere": ("<|START_ACTION|>", "<|END_ACTION|>"),
            "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
            "harmony": HARMONY_MARKS,
            "llama": ("<|python_tag|>",),
            "mistral": (*MISTRAL.marks, "[CALL_ID]"),
            "gemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
            "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
        }
        thoughts = (self.reasoning.start, self.reasoning.end) if self.reasoning else ()
        return (*calls[self.family], *thoughts)

    @property
    def ends(self) -> tuple[str, ...]:
        """Marks that end an answer, which older generation_config.json of gpt-oss do not name."""
        return ("<|return|>", "<|call|>") if self.family == "harmony" else ()

    @property
    def splits(self) -> bool:
        """Whether answers have parts besides content that no request asks for."""
        return self.reasoning is not None or self.family == "harmony"

    def tool_parser(self, functions: Mapping[str, Any]) -> ToolParser:
        """A parser for one answer to a request with functions of these names and parameters."""
        match self.family:
            case "granite":
                return JsonToolParser("<|tool_call|>", None)
            case "llama":
                return JsonToolParser("<|python_tag|>", None, bare=functions)
            case "xml" | "seed" | "minimax" | "glm":
                return TaggedToolParser(_TAGS[self.family], functions)
            case "lfm2":
                return MarkedToolParser("<|tool_call_start|>", "<|tool_call_end|>", read_python_calls)
            case "harmony":
                return JsonToolParser(CALL, None)
            case "mistral" | "deepseek" | "deepseek_r1" | "apertus":
                return NamedToolParser(NAMED[self.family])
            case "gemma":
                return MarkedToolParser(
                    "<start_function_call>", "<end_function_call>", lambda body: read_gemma_call(body, "<escape>")
                )
            case "gemma4":
                return MarkedToolParser("<|tool_call>", "<tool_call|>", lambda body: read_gemma_call(body, '<|"|>'))
            case _:
                return JsonToolParser(*self.marks[:2])

    def splitter(self, prompt: str, functions: Mapping[str, Any]) -> ReasoningSplitter | HarmonySplitter | None:
        """What takes the thoughts out of the answer to this prompt; None if the model writes none."""
        if self.family == "harmony":
            return HarmonySplitter(prompt, functions)
        if self.reasoning is None:
            return None
        # No thoughts have these by chance.
        calls = {
            "hermes": '<tool_call>\n{"name": "',
            "xml": "<tool_call>\n<function=",
            "apertus": '<|tools_prefix|>[{"',
        }
        call = calls.get(self.family) if functions else None
        return ReasoningSplitter(self.reasoning, opened=self.thinks_on(prompt), call=call)

    def thinks_on(self, prompt: str) -> bool:
        """Whether the prompt ends inside the thoughts."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.opening.rstrip())

    def has_thought(self, prompt: str) -> bool:
        """Whether the prompt ends behind thoughts, which templates write for models that are told not to think."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.end)

    def with_tools(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
        """Messages for a template that knows no tools: instructions first, calls and results as text unless it has them."""
        result: list[dict[str, Any]] = []
        if tools:
            leading = list(takewhile(lambda message: message["role"] in ("system", "developer"), messages))
            listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            texts = [
                *(message.get("content") or "" for message in leading),
                _INSTRUCTIONS.format(tools=listed, how=self._how),
            ]
            result.append({"role": "system", "content": "\n\n".join(texts)})
            messages = messages[len(leading) :]
        if self.family != "generic":
            return [*result, *map(dict, messages)]
        for message in messages:
            content = message.get("content") or ""
            if message["role"] == "tool":
                response = f"<tool_response>\n{content}\n</tool_response>"
                if result and result[-1]["role"] == "user" and result[-1]["content"].startswith("<tool_response>"):
                    result[-1]["content"] += f"\n{response}"
                else:
                    result.append({"role": "user", "content": response})
            elif message.get("tool_calls"):
                calls = [
                    json.dumps(
                        {"name": c["function"]["name"], "arguments": c["function"]["arguments"]}, ensure_ascii=False
                    )
                    for c in message["tool_calls"]
                ]
                written = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
                result.append({"role": "assistant", "content": f"{content}\n{written}" if content else written})
            else:
                result.append(dict(message))
        return result

    @property
    def _how(self) -> str:
        """Instructions for a call."""
        if self.family not in NAMED:
            return _IN_JSON
        return _AS_EXAMPLE.format(example=NAMED[self.family].written([("function-name", {"argument": "value"})]))


def _family(source: str) -> Family:
    for mark, family in _SIGNS:
        if mark in source:
            return "deepseek_r1" if family == "deepseek" and "```json" in source else family
    return "hermes" if "tools" in source else "generic"


_SIGNS: tuple[tuple[str, Family], ...] = (
    ("[TOOL_CALLS]", "mistral"),
    ("<|START_ACTION|>", "cohere"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("<|tools_prefix|>", "apertus"),
    ("<start_function_call>", "gemma"),
    ("<|tool_call>", "gemma4"),
    ("<|channel|>", "harmony"),
    ("<seed:tool_call>", "seed"),
    ("<minimax:tool_call>", "minimax"),
    ("<parameter=", "xml"),
    ("<arg_key>", "glm"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_list_start|>", "lfm2"),
    ("<TOOLCALL>", "nemotron"),
    ("<|/tool_call|>", "phi"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama"),
    ('"parameters": ', "llama"),
)
