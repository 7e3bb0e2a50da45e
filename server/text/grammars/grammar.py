"""Grammars for answers, in llguidance's JSON form: JSON by a schema, a regex, a choice, forced tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from server.text.calls.named_calls import Named
from server.text.dialect import MAX_CALLS, NAMED, Dialect
from server.text.grammars.closing import close_objects
from server.text.grammars.schemas import mend_schema, schema_literals
from server.text.harmony import CHANNEL, CONSTRAIN, MESSAGE, START
from server.types import LITERAL_CHARACTERS

# JSON on one line, with a space after a colon or a comma at most: where more is allowed, a small model gets lost in it.
_JSON_STYLE = {"whitespace_flexible": False, "key_separator": ": ?", "item_separator": ", ?"}

_BASE = "https://parameters.invalid/"
"""Base of references in parameters, if these do not say one."""

_COMMA = '","'
_COHERE_ID = {"tool_call_id": {"type": "string", "pattern": "^[0-9]{1,2}$"}}

MarkId = Callable[[str], int | None]
"""Id of a mark's token; None for a mark that is text to llguidance."""


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


def tools_grammar(dialect: Dialect, tools: Sequence[Mapping[str, Any]], special: MarkId, *, several: bool) -> str:
    """Answers that are nothing but calls of these tools (their "function" objects), as the dialect writes them."""
    functions = [tool["function"] for tool in tools]
    literals = [text for function in functions for text in schema_literals(_parameters(function))]
    mark = _marks(special)
    count = MAX_CALLS if several else 1
    match dialect.family:
        case "deepseek" | "deepseek_r1" | "apertus" | "mistral" if dialect.family != "mistral" or dialect.named_mistral:
            return _lark(_named(NAMED[dialect.family], functions, mark, count), literals)
        case "mistral":
            calls = _repeated("call", count, r'"," " "?')
            start = f'start: {mark("[TOOL_CALLS]")} "[" {calls} "]"'
            return _lark(f"{start}\ncall: {_objects(functions, 'arguments')}", literals)
        case "gemma" | "gemma4":
            return _lark(_gemma(dialect, functions, mark, count), literals)
        case "llama":
            return _lark(f"start: {_objects(functions, 'parameters')}", literals)
        case "cohere":
            opening, closing = map(mark, dialect.marks[:2])
            calls = _repeated("call", count, r'",\n    "')
            start = rf'start: {opening} "[\n    " {calls} "\n]" {closing}'
            return _lark(f"{start}\ncall: {_objects(functions, 'parameters', 'tool_name', _COHERE_ID)}", literals)
        case "lfm2" | "nemotron" | "phi" | "granite":
            # JSON, which LFM2 may write, too: its own notation says nothing about the values' types.
            opening = mark(dialect.marks[0])
            closing = "" if dialect.family == "granite" else mark(dialect.marks[1])
            calls = _repeated("call", count, r'"," " "?')
            lark = f'start: {opening} "[" {calls} "]" {closing}\ncall: {_objects(functions, "arguments")}'
            return _lark(lark, literals)
        case "harmony":
            calls = " | ".join(
                f"{mark(CHANNEL)} {_quoted('commentary to=functions.' + f['name'] + ' ')} {mark(CONSTRAIN)} "
                f'"json" {mark(MESSAGE)} {_inline(_parameters(f))}'
                for f in functions
            )
            return _lark(f"start: {calls}", literals)
        case _:
            opening, closing = map(mark, dialect.marks[:2])
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


def as_content(grammar: str, dialect: Dialect, special: MarkId) -> str:
    """The grammar of an answer in words as the dialect writes it."""
    if dialect.family != "harmony":
        return grammar
    mark = _marks(special)
    return _around(grammar, f'start: {mark(CHANNEL)} "final" {mark(MESSAGE)} @content', "content")


def after_thoughts(grammar: str, dialect: Dialect, special: MarkId, *, opened: bool) -> str:
    """The grammar for the answer that follows a reasoning model's thoughts."""
    mark = _marks(special)
    if dialect.family == "harmony":
        thoughts = _until("<|end|>", special)
        begin, then = f'{mark(CHANNEL)} "analysis" {mark(MESSAGE)}', f'{mark(START)} "assistant"'
        return _around(grammar, f"start: ({begin} thoughts {then})? @answer\n{thoughts}")
    if dialect.reasoning is None:
        return grammar
    first, label = mark(dialect.reasoning.start), dialect.reasoning.label
    whole = "thoughts GAP @answer"
    begun = f"{first} {_quoted(label)} {whole}" if label else f"{first} {whole}"
    start_rule = f"start: {whole}" if opened else f"start: {begun} | @answer"
    return _around(grammar, f"{start_rule}\n{_until(dialect.reasoning.end, special)}\nGAP: /\\n{{0,2}}/")


def _around(grammar: str, lark: str, name: str = "answer") -> str:
    """A grammar that has another one in the place of @name."""
    inner = json.loads(grammar)["grammars"]
    inner[0]["name"] = name
    return json.dumps({"grammars": [{"lark_grammar": lark}, *inner]}, ensure_ascii=False)


def _until(end: str, special: MarkId) -> str:
    """The rule thoughts: any text until a mark, with it."""
    token = special(end)
    by_text, by_token = f"thoughts[suffix={_quoted(end)}]: /(?s:.*)/", f"thoughts: /(?s:.*)/ <[{token}]>"
    return by_text if token is None else by_token


def _marks(special: MarkId) -> Callable[[str], str]:
    """How a grammar writes a mark: as its token, if it has one."""

    def mark(text: str) -> str:
        token = special(text)
        return _quoted(text) if token is None else f"<[{token}]>"

    return mark


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
    # Not null, which a schema may allow besides.
    return {**close_objects(function.get("parameters") or {}), "type": "object"}


def _named(notation: Named, functions: Sequence[Mapping[str, Any]], mark: Callable[[str], str], count: int) -> str:
    def texts(*given: str) -> str:
        return " ".join(map(mark, given))

    calls = " | ".join(
        f"{texts(*notation.before, f['name'], *notation.between)} {_inline(_parameters(f))} {texts(*notation.after)}"
        for f in functions
    )
    several = _repeated("call", count, texts(*notation.separator))
    return f"start: {texts(*notation.start)} {several} {texts(*notation.end)}\ncall: {calls}"


def _objects(
    functions: Sequence[Mapping[str, Any]], arguments: str, name: str = "name", others: Mapping[str, Any] | None = None
) -> str:
    """A call of one of the functions as a JSON object, within Lark text. others: schemas of what it has besides, first.

    Each is a document of its own, and parameters in it are by their $id, so that their $ref and $anchor mean what they mean
    to the client. No part of an object is text of ours: the lexer would prefer it to the JSON of an answer's form.
    """
    calls = [
        {
            "type": "object",
            "properties": {
                **(others or {}),
                name: {"const": function["name"]},
                arguments: {"$id": _BASE, **_parameters(function)},
            },
            "required": [*(others or ()), name, arguments],
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
