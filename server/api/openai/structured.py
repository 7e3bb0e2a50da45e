"""What an answer has to look like: response_format, structured_outputs and vLLM's older guided_ options."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from server.api.http.errors import ApiError, bad_request
from server.engine.grammar import GrammarError, Grammars
from server.text import grammar as grammars

MAX_GRAMMAR_CHARACTERS = 256 * 1024
MAX_CHOICES = 1024
COMPILE_TIMEOUT_S = 10.0

_SCHEMA = WithJsonSchema({"type": ["object", "boolean"]})


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), populate_by_name=True)


class JsonSchemaFormat(_Strict):
    """response_format.json_schema. The schema is kept to whether strict is set or not."""

    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    description: str | None = None
    document: Annotated[Any, _SCHEMA] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """OpenAI's response_format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(_Strict):
    """vLLM's structured_outputs: one of its fields says what the answer is."""

    document: Annotated[Any, _SCHEMA] = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: str | None = None


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
        wanted = self.response_format
        if wanted is not None and wanted.type == "json_object":
            forms.append(("json", {"type": "object"}, "response_format"))
        elif wanted is not None and wanted.type == "json_schema":
            if wanted.json_schema is None:
                param = "response_format.json_schema"
                raise bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
            forms.append(("json", wanted.json_schema.document, "response_format.json_schema.schema"))
        structured = self.structured_outputs or StructuredOutputs()
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
    """400: the answer's form cannot be kept to."""
    short = " ".join(reason.split())
    # A message may quote the whole grammar; its beginning says what is wrong.
    return bad_request(f"Invalid '{param}': {short[:300]}.", param, "invalid_grammar")
