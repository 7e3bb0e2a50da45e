"""Grammars of forced calls: what a dialect writes passes, what it reads back is the call, for any number of things."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from server.text.answer import AnswerParser
from server.text.dialect import Dialect
from server.text.grammars.grammar import either, json_grammar, tools_grammar
from tests.text.texts import takes

DIALECTS = {
    "hermes": Dialect("hermes", None, None),
    "llama": Dialect("llama", None, None),
    "mistral": Dialect("mistral", None, None),
    "named mistral": Dialect("mistral", None, None, named_mistral=True),
    "deepseek": Dialect("deepseek", None, None),
    "deepseek_r1": Dialect("deepseek_r1", None, None),
    "apertus": Dialect("apertus", None, None),
    "cohere": Dialect("cohere", None, None),
    "gemma": Dialect("gemma", None, None),
    "gemma4": Dialect("gemma4", None, None),
    "xml": Dialect("xml", None, None),
    "seed": Dialect("seed", None, None),
    "nemotron": Dialect("nemotron", None, None),
    "granite": Dialect("granite", None, None),
    "lfm2": Dialect("lfm2", None, None),
    "harmony": Dialect("harmony", None, None),
}

Calls = list[tuple[str, dict[str, Any]]]


def tool(name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | ({} if parameters is None else {"parameters": parameters})}


def written(dialect: Dialect, calls: Calls) -> str:
    """Calls as a model of this dialect writes them."""
    match dialect.family:
        case "gemma" | "gemma4":
            start, end, quote = dialect.marks[:3]

            def value(given: Any) -> str:
                match given:
                    case str():
                        return f"{quote}{given}{quote}"
                    case list():
                        return "[" + ",".join(map(value, given)) + "]"
                    case dict():
                        return "{" + ",".join(f"{key}:{value(inner)}" for key, inner in given.items()) + "}"
                return json.dumps(given)

            return "".join(f"{start}call:{name}{value(given)}{end}" for name, given in calls)
        case "mistral" if dialect.named_mistral:
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}" for name, given in calls)
        case "mistral":
            return "[TOOL_CALLS]" + json.dumps([{"name": name, "arguments": given} for name, given in calls])
        case "deepseek":
            each = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(a)}<｜tool▁call▁end｜>" for name, a in calls]
            return f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"
        case "deepseek_r1":
            head, tail = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```<｜tool▁call▁end｜>"
            listed = "\n".join(f"{head}{name}\n```json\n{json.dumps(given)}{tail}" for name, given in calls)
            return f"<｜tool▁calls▁begin｜>{listed}<｜tool▁calls▁end｜>"
        case "apertus":
            return f"<|tools_prefix|>{json.dumps([{name: given} for name, given in calls])}<|tools_suffix|>"
        case "cohere":
            objects = [
                json.dumps({"tool_call_id": str(i), "tool_name": name, "parameters": given})
                for i, (name, given) in enumerate(calls)
            ]
            return "<|START_ACTION|>[\n    " + ",\n    ".join(objects) + "\n]<|END_ACTION|>"
        case "llama":
            return "".join(json.dumps({"name": name, "parameters": given}) for name, given in calls)
        case "lfm2" | "nemotron" | "granite":
            listed = json.dumps([{"name": name, "arguments": given} for name, given in calls])
            return listed.join(dialect.marks) if len(dialect.marks) > 1 else dialect.marks[0] + listed
        case "harmony":
            head = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"
            return "<|call|>".join(head.format(name, json.dumps(given)) for name, given in calls)
    bodies = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
    return "\n".join(f"{dialect.marks[0]}\n{body}\n{dialect.marks[1]}" for body in bodies)


def read(dialect: Dialect, text: str) -> Calls:
    """The calls that are read from an answer that is nothing else."""
    functions = dict.fromkeys(["f", *(f"f{i}" for i in range(5))])
    parser = AnswerParser(dialect.splitter("", functions), dialect.tool_parser(functions))
    part = parser.push(text)
    part.add(parser.finish())
    assert part.content + part.reasoning == ""
    calls: dict[int, list[str]] = {}
    for delta in part.calls:
        calls.setdefault(delta.index, [delta.name or "", ""])[1] += delta.arguments
    return [(name, json.loads(arguments)) for name, arguments in calls.values()]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("tools", [1, 2, 5])
@pytest.mark.parametrize("parameters", [None, 0, 1, 2, 7])
@pytest.mark.parametrize("name", DIALECTS)
def test_any_number_of_tools_and_parameters(
    tokenizer: LLTokenizer, name: str, parameters: int | None, tools: int, several: bool
) -> None:
    dialect = DIALECTS[name]
    given: dict[str, Any] = {f"p{i}": "x" if i % 2 else i * 10 for i in range(parameters or 0)}
    schema = {"type": "object", "properties": {key: {"enum": [value]} for key, value in given.items()}}
    offered = [tool(f"f{i}", None if parameters is None else schema) for i in range(tools)]
    grammar = tools_grammar(dialect, offered, lambda _: None, several=several)
    for i in range(tools):
        text = written(dialect, [(f"f{i}", given)])
        assert takes(tokenizer, grammar, text), text
        assert read(dialect, text) == [(f"f{i}", given)]
    assert not takes(tokenizer, grammar, written(dialect, [("other", given)]))
    if given:  # and without some of them
        assert takes(tokenizer, grammar, written(dialect, [("f0", {"p0": 0})]))
        assert not takes(tokenizer, grammar, written(dialect, [("f0", {"other": 0})]))
    if dialect.family in ("llama", "harmony"):
        return  # write one call only
    for count in (2, 3, 16, 17):
        calls = [(f"f{i % tools}", given) for i in range(count)]
        allowed = several and count <= 16
        assert takes(tokenizer, grammar, written(dialect, calls)) == allowed
        if allowed:
            assert read(dialect, written(dialect, calls)) == calls


@pytest.mark.parametrize("name", ["gemma", "gemma4"])
def test_gemma_reads_what_its_grammar_allows(tokenizer: LLTokenizer, name: str) -> None:
    dialect = DIALECTS[name]
    names = ("$ref", "@type", "first name", "1st", "page[size]", "x-y.z", "größe", "back\\slash")
    offered = [tool("f", {"type": "object", "properties": {key: {} for key in names}})]
    grammar = tools_grammar(dialect, offered, lambda _: None, several=False)
    for given in ({key: [i, {"k": "v, k: {1}"}] for i, key in enumerate(names)}, {"1st": [[-0.5, 2], [], {}]}):
        text = written(dialect, [("f", given)])
        assert takes(tokenizer, grammar, text), text
        assert read(dialect, text) == [("f", given)]
    number = written(dialect, [("f", {"1st": 7})])
    assert takes(tokenizer, grammar, number)
    assert not takes(tokenizer, grammar, number.replace("7", "007"))


REFERENCES: dict[str, tuple[dict[str, Any], Any]] = {
    "definitions": ({"properties": {"a": {"$ref": "#/definitions/I"}}, "definitions": {"I": {"enum": ["VALUE"]}}}, "VALUE"),
    "$defs": ({"properties": {"a": {"$ref": "#/$defs/I"}}, "$defs": {"I": {"enum": ["VALUE"]}}}, "VALUE"),
    "a definition of a definition": (
        {"properties": {"a": {"$ref": "#/$defs/J"}},
         "$defs": {"I": {"enum": ["VALUE"]}, "J": {"type": "array", "items": {"$ref": "#/$defs/I"}}}},
        ["VALUE", "VALUE"],
    ),
    "a property": ({"properties": {"b": {"enum": ["VALUE"]}, "a": {"$ref": "#/properties/b"}}}, "VALUE"),
    "escapes": ({"properties": {"a": {"$ref": "#/$defs/x~1y~0z%25"}}, "$defs": {"x/y~z%": {"enum": ["VALUE"]}}}, "VALUE"),
    "the root": (
        {"properties": {"a": {"anyOf": [{"enum": ["VALUE"]}, {"$ref": "#"}]}}, "additionalProperties": False},
        {"a": {"a": "VALUE"}},
    ),
    "an anchor": ({"properties": {"a": {"$ref": "#item"}}, "$defs": {"I": {"$anchor": "item", "enum": ["VALUE"]}}}, "VALUE"),
    "an id": (
        {"$id": "https://example.com/f", "properties": {"a": {"$ref": "item"}},
         "$defs": {"I": {"$id": "item", "$ref": "#/$defs/J", "$defs": {"J": {"enum": ["VALUE"]}}}}},
        "VALUE",
    ),
    "its own id": (
        {"$id": "https://example.com/f", "properties": {"a": {"$ref": "https://example.com/f#/$defs/I"}},
         "$defs": {"I": {"enum": ["VALUE"]}}},
        "VALUE",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFERENCES)
@pytest.mark.parametrize("name", ["hermes", "llama", "mistral", "named mistral", "apertus", "cohere"])
def test_a_schema_means_the_same_beside_others(tokenizer: LLTokenizer, name: str, kind: str) -> None:
    """Schemas of several tools that name their parts alike, alone and with a form of the answer."""
    dialect, (schema, value) = DIALECTS[name], REFERENCES[kind]

    def filled(given: Any, text: str) -> Any:
        return json.loads(json.dumps(given).replace("VALUE", text))

    offered = [tool(f"f{i}", {"type": "object"} | filled(schema, f"v{i}")) for i in range(3)]
    calls = tools_grammar(dialect, offered, lambda _: None, several=True)
    both = either(json_grammar(filled(schema, "form") | {"additionalProperties": False}), calls)
    for grammar in (calls, both):
        for i in range(3):
            for j in range(3):
                text = written(dialect, [(f"f{i}", {"a": filled(value, f"v{j}")})])
                assert takes(tokenizer, grammar, text) == (i == j), text
    assert takes(tokenizer, both, json.dumps({"a": filled(value, "form")}))


def test_arguments_are_never_null(tokenizer: LLTokenizer) -> None:
    grammar = tools_grammar(
        DIALECTS["hermes"], [tool("f", {"type": ["object", "null"]})], lambda _: None, several=False
    )
    assert takes(tokenizer, grammar, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    assert not takes(tokenizer, grammar, '<tool_call>\n{"name": "f", "arguments": null}\n</tool_call>')
