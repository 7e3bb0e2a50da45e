"""Forms of answers: response_format, structured_outputs and vLLM's older guided_ options."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from server.api.http.errors import ApiError, bad_request, not_supported
from server.engine.grammar import GrammarError, Grammars
from server.text.grammars import grammar as grammars

MAX_GRAMMAR_CHARACTERS = 256 * 1024
MAX_CHOICES = 1024
COMPILE_TIMEOUT_S = 10.0

_SCHEMA = WithJsonSchema({"type": ["object", "boolean"]})


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), populate_by_name=True)


class JsonSchemaFormat(_Strict):
    """response_format.json_schema. The schema is enforced whether strict is set or not."""

    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    description: str | None = None
    document: Annotated[Any, _SCHEMA] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """OpenAI's response_format, and the forms that TGI and llama.cpp have for it."""

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: JsonSchemaFormat | None = None
    value: Annotated[Any, _SCHEMA] = None
    """TGI's and huggingface_hub's place for a schema (type json_object or json) or a regex (type regex)."""
    document: Annotated[Any, _SCHEMA] = Field(default=None, alias="schema")
    """llama.cpp's place for a schema (type json_object)."""

    def form(self) -> tuple[str, Any, str] | None:
        """(kind, value, the option that says so), None for a text. Raises ApiError for what does not go together."""
        places = {"value": self.value, "schema": self.document, "json_schema": self.json_schema}
        given = [place for place, value in places.items() if value is not None]
        allowed = {"json_object": ["value", "schema"], "json_schema": ["json_schema"], "json": ["value"]}
        allowed |= {"regex": ["value"], "text": []}
        wrong = next((place for place in given if place not in allowed[self.type]), None)
        wrong = wrong or next(iter(given[1:]), None)
        if wrong is not None:
            param = f"response_format.{wrong}"
            raise bad_request(f"'{param}' does not belong here beside the rest.", param, "invalid_value")
        if not given:
            if self.type == "text":
                return None
            if self.type == "json_object":
                return "json", {"type": "object"}, "response_format"
            param = f"response_format.{allowed[self.type][0]}"
            raise bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
        if self.json_schema is not None:
            return "json", self.json_schema.document, "response_format.json_schema.schema"
        param, value = f"response_format.{given[0]}", places[given[0]]
        if self.type != "regex":
            return "json", value, param
        if not isinstance(value, str):
            raise bad_request(f"Invalid type for '{param}': expected a string.", param, "invalid_type")
        return "regex", value, param


class StructuredOutputs(_Strict):
    """vLLM's structured_outputs: one of its fields says what the answer is."""

    document: Annotated[Any, _SCHEMA] = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: str | None = None
    # Those that are not offered.
    structural_tag: Any = None
    whitespace_pattern: Any = None
    disable_additional_properties: bool | None = None

    def refuse(self) -> None:
        """Raise ApiError (400) for what is not offered."""
        for name in ("structural_tag", "whitespace_pattern", "disable_additional_properties"):
            if getattr(self, name):
                raise not_supported(f"structured_outputs.{name}", f"'{name}'")


class StructuredOptions(BaseModel):
    """The options that bound an answer's form; at most one of them may be given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Annotated[Any, _SCHEMA] = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    guided_grammar: str | None = None

    def answer_form(self) -> tuple[str, Any, str] | None:
        """(kind, value, the option that says so): the one form that was asked for. Raises ApiError for several."""
        forms: list[tuple[str, Any, str]] = []
        form = None if self.response_format is None else self.response_format.form()
        if form is not None:
            forms.append(form)
        structured = self.structured_outputs or StructuredOutputs()
        structured.refuse()
        if structured.json_object:
            forms.append(("json", {"type": "object"}, "structured_outputs.json_object"))
        given = {
            "structured_outputs.json": ("json", structured.document),
            "structured_outputs.regex": ("regex", structured.regex),
            "structured_outputs.choice": ("choice", structured.choice),
            "structured_outputs.grammar": ("grammar", structured.grammar),
            "guided_json": ("json", self.guided_json),
            "guided_regex": ("regex", self.guided_regex),
            "guided_choice": ("choice", self.guided_choice),
            "guided_grammar": ("grammar", self.guided_grammar),
        }
        forms += [(kind, value, param) for param, (kind, value) in given.items() if value is not None]
        if len(forms) > 1:
            raise bad_request(
                f"'{forms[0][2]}' and '{forms[1][2]}' both say what the answer is; set one of them.",
                forms[1][2],
                "invalid_value",
            )
        if self.structured_outputs is not None and not any(f[2].startswith("structured_outputs") for f in forms):
            raise bad_request("'structured_outputs' sets none of its fields.", "structured_outputs", "invalid_value")
        return forms[0] if forms else None


def form_grammar(form: tuple[str, Any, str]) -> str:
    """The grammar of an answer's form. Raises ApiError (400)."""
    kind, value, param = form
    try:
        match kind:
            case "json":
                if isinstance(value, str):  # as vLLM's and SGLang's clients may send it
                    value = json.loads(value)
                if not isinstance(value, dict | bool):
                    raise ValueError("a JSON schema is an object or a boolean")
                grammar = grammars.json_grammar(value)
            case "regex":
                grammar = grammars.regex_grammar(value)
            case "choice":
                grammar = grammars.choice_grammar(value)
            case _:
                if len(value) > MAX_GRAMMAR_CHARACTERS:
                    raise ValueError("it is too long")
                grammar = grammars.text_grammar(value)
    except (ValueError, RecursionError) as e:
        raise bad_grammar(str(e), param) from e
    return grammar


async def check_grammar(compiler: Grammars, grammar: str, param: str) -> None:
    """Compile a grammar beside the event loop. Raises ApiError (400) for one that cannot be used."""
    if len(grammar) > MAX_GRAMMAR_CHARACTERS:
        raise bad_grammar(f"it is longer than {MAX_GRAMMAR_CHARACTERS} characters", param)
    try:
        await asyncio.wait_for(asyncio.wrap_future(compiler.compile(grammar)), COMPILE_TIMEOUT_S)
    except GrammarError as e:
        raise bad_grammar(str(e), param) from e
    except TimeoutError as e:
        raise bad_grammar(f"it was not compiled within {COMPILE_TIMEOUT_S:.0f} s", param) from e


def bad_grammar(reason: str, param: str) -> ApiError:
    """400: the answer's form cannot be enforced."""
    short = " ".join(reason.split())
    # A message may quote the whole grammar; its beginning says what is wrong.
    return bad_request(f"Invalid '{param}': {short[:300]}.", param, "invalid_grammar")
