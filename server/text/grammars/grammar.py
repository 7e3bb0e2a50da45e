"""Grammars for answers, in llguidance's JSON form: JSON by a schema, a regex, a choice, forced tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from server.text.dialect import MAX_CALLS, Dialect
from server.text.grammars.closing import close_objects
from server.text.grammars.schemas import mend_schema, schema_literals
from server.types import LITERAL_CHARACTERS

# JSON on one line, with a space after a colon or a comma at most: where more is allowed, a small model gets lost in it.
_JSON_STYLE = {"whitespace_flexible": False, "key_separator": ": ?", "item_separator": ", ?"}

_BASE = "https://parameters.invalid/"
"""Base of references in parameters, if these do not say one."""

_COMMA = '","'

SpecialId = Callable[[str], int | None]
"""Id of a special token by its text; None for one that is plain text to the tokenizer."""


def json_grammar(schema: Any) -> str:
    """Texts that are JSON documents of a schema."""
    return _lark(f"start: {_inline(schema)}", schema_literals(schema))


def regex_grammar(pattern: str) -> str:
    """Texts that match a regular expression as a whole. \\d, \\w and \\s are ASCII unless it begins with (?u)."""
    ascii_classes = "" if pattern.startswith("(?u") else "dws"
    return _lark(f"start: /{regex_to_lark(pattern, ascii_classes)}/")


def choice_grammar(choices: Sequence[str]) -> str:
    """Exactly one of these texts."""
    return _lark("start: " + " | ".join(_quoted(choice) for choice in choices), choices)


def text_grammar(grammar: str) -> str:
    """A grammar as clients write it: Lark's notation, or GBNF (llama.cpp's). Raises ValueError for neither."""
    try:
        return _lark(any_to_lark(grammar))
    except Exception as e:
        raise ValueError(f"it is no grammar: {e}") from e


def tools_grammar(dialect: Dialect, tools: Sequence[Mapping[str, Any]], special: SpecialId, *, several: bool) -> str:
    """Answers that are nothing but calls of these tools (their "function" objects), as the dialect writes them."""
    functions = [tool["function"] for tool in tools]
    literals = [text for function in functions for text in schema_literals(_parameters(function))]

    def mark(text: str) -> str:
        token = special(text)
        return _quoted(text) if token is None else f"<[{token}]>"

    count = MAX_CALLS if several else 1
    match dialect.family:
        case "mistral" if dialect.named_mistral:
            calls = " | ".join(
                f"{mark('[TOOL_CALLS]')} {_quoted(f['name'])} {mark('[ARGS]')} {_inline(_parameters(f))}"
                for f in functions
            )
            return _lark(f"start: {_repeated('call', count)}\ncall: {calls}", literals)
        case "mistral":
            calls = _repeated("call", count, r'"," " "?')
            start = f'start: {mark("[TOOL_CALLS]")} "[" {calls} "]"'
            return _lark(f"{start}\ncall: {_objects(functions, 'arguments')}", literals)
        case "gemma" | "gemma4":
            return _lark(_gemma(dialect, functions, mark, count), literals)
        case "llama":
            return _lark(f"start: {_objects(functions, 'parameters')}", literals)
        case _:
            opening, closing = mark("<tool_call>"), mark("</tool_call>")
            calls, objects = _repeated("call", count, r'"\n"'), _objects(functions, "arguments")
            lark = f'start: {calls}\ncall: {opening} "\\n" object "\\n" {closing}\nobject: {objects}'
            return _lark(lark, literals)


def either(first: str, second: str) -> str:
    """A grammar for the texts of both grammars."""
    parts = []
    for name, grammar in (("first", first), ("second", second)):
        inner = json.loads(grammar)["grammars"]
        inner[0]["name"] = name
        parts += inner
    return json.dumps({"grammars": [{"lark_grammar": "start: @first | @second"}, *parts]}, ensure_ascii=False)


def after_thoughts(grammar: str, dialect: Dialect, special: SpecialId, *, opened: bool) -> str:
    """The grammar for the answer that follows a reasoning model's thoughts."""
    if dialect.reasoning is None:
        return grammar
    start, end = dialect.reasoning.start, dialect.reasoning.end
    opening, closing = special(start), special(end)
    first = _quoted(start) if opening is None else f"<[{opening}]>"
    by_text, by_token = f"thoughts[suffix={_quoted(end)}]: /(?s:.*)/", f"thoughts: /(?s:.*)/ <[{closing}]>"
    thoughts = by_text if closing is None else by_token
    whole = "thoughts GAP answer"
    start_rule = f"start: {whole}" if opened else f"start: {first} {whole} | answer"
    inner = json.loads(grammar)["grammars"]
    inner[0]["name"] = "answer"
    lark = f"{start_rule}\n{thoughts}\nGAP: /\\n{{0,2}}/\nanswer: @answer"
    return json.dumps({"grammars": [{"lark_grammar": lark}, *inner]}, ensure_ascii=False)


def _lark(text: str, literals: Iterable[str] = ()) -> str:
    """literals: texts that an answer may have to hold, whose characters the engine compares with the model's vocabulary."""
    unusual = sorted({character for literal in literals for character in literal if not " " <= character <= "~"})
    noted = {LITERAL_CHARACTERS: "".join(unusual)} if unusual else {}
    return json.dumps({"grammars": [{"lark_grammar": text, **noted}]}, ensure_ascii=False)


def _inline(schema: Any) -> str:
    """A schema within Lark text."""
    mended = mend_schema(schema)
    styled = {"x-guidance": _JSON_STYLE, **mended} if isinstance(mended, dict) else mended
    return f"%json {json.dumps(styled, ensure_ascii=False)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _repeated(item: str, most: int, separator: str = "") -> str:
    """One to most items. A count of its own for each number of items: llguidance refuses {0,0}."""
    return item if most == 1 else f"{item} ({separator} {item}){{0,{most - 1}}}"


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", **close_objects(function.get("parameters") or {})}


def _objects(functions: Sequence[Mapping[str, Any]], arguments: str) -> str:
    """A call of one of the functions as a JSON object, within Lark text.

    Each is a document of its own, and parameters in it are by their $id, so that their $ref and $anchor mean what they mean
    to the client. No part of an object is text of ours: the lexer would prefer it to the JSON of an answer's form.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, arguments: {"$id": _BASE, **_parameters(function)}},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for function in functions
    ]
    return " | ".join(map(_inline, calls))


def _gemma(dialect: Dialect, functions: Sequence[Mapping[str, Any]], mark: Callable[[str], str], count: int) -> str:
    """Gemma's notation is no JSON: names of functions and arguments are held to the schema, values to their syntax."""
    opening, closing, quote = dialect.marks[:3]
    calls = []
    for function in functions:
        properties = (function.get("parameters") or {}).get("properties")
        names = list(properties) if isinstance(properties, dict) else []
        key = " | ".join(_quoted(f"{name}:") for name in names)
        arguments = f"({_repeated(f'({key}) value', len(names), _COMMA)})?" if names else ""
        calls.append(f'{_quoted("call:" + function["name"])} "{{" {arguments} "}}"')
    return "\n".join(
        [
            f"start: {_repeated('call', count)}",
            f"call: {mark(opening)} ({' | '.join(calls)}) {mark(closing)}",
            'value: string | NUMBER | "true" | "false" | "null" | list | object',
            f'list: "[" ({_repeated("value", 64, _COMMA)})? "]"',
            f'object: "{{" ({_repeated("KEY value", 64, _COMMA)})? "}}"',
            f"string: {mark(quote)} /[^<]*/ {mark(quote)}",
            r"NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,18})?/",
            "KEY: /[A-Za-z_][A-Za-z0-9_]{0,63}:/",
        ]
    )
