"""The tools of a chat request, and which of them the model may or must call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from server.api.http.errors import bad_request, shown

MAX_TOOLS = 128

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,128}$")]

CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "required": ["type", "function"],
            "additionalProperties": False,
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "additionalProperties": False,
                    "properties": {"name": {"type": "string"}},
                },
            },
        },
        {
            "type": "object",
            "required": ["type", "allowed_tools"],
            "properties": {
                "type": {"const": "allowed_tools"},
                "allowed_tools": {
                    "type": "object",
                    "required": ["mode", "tools"],
                    "properties": {"mode": {"enum": ["auto", "required"]}, "tools": {"type": "array"}},
                },
            },
        },
    ]
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _of_object(parameters: dict[str, Any]) -> dict[str, Any]:
    types = parameters.get("type", "object")
    if "object" not in (types if isinstance(types, list) else [types]):
        raise ValueError("arguments are an object, so their schema's type has to be 'object'")
    return parameters


class FunctionSpec(_Strict):
    """A function's name, description and parameters."""

    name: Name
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_of_object)] | None = None
    strict: bool | None = None


class Tool(_Strict):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionSpec

    def document(self) -> dict[str, Any]:
        """As chat templates take it: without what was not given."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        empty = {"type": "object", "properties": {}}
        function["parameters"] = empty if self.function.parameters is None else self.function.parameters
        return {"type": "function", "function": function}


class ToolOptions(BaseModel):
    """tools and what belongs to them."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[Any, WithJsonSchema(CHOICE_SCHEMA)] = None
    parallel_tool_calls: bool | None = None

    def usable_tools(self) -> tuple[list[dict[str, Any]], bool]:
        """(tools the model is told of, whether it has to call one). Raises ApiError."""
        tools = [tool.document() for tool in self.tools or ()]
        names = [tool["function"]["name"] for tool in tools]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise bad_request(f"Invalid 'tools': two functions are called '{twice}'.", "tools", "invalid_value")
        choice = self.tool_choice
        if choice is None or choice == "auto":
            return tools, False
        if choice == "none":
            return [], False
        if not tools:
            raise bad_request("'tool_choice' is only allowed when 'tools' are given.", "tool_choice", "invalid_value")
        if choice == "required":
            return tools, True
        match choice:
            case {"type": "function", "function": {"name": str(name)}} if (
                len(choice) == 2 == 1 + len(choice["function"])
            ):
                allowed, forced = [name], True
            case {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(listed)},
            }:
                allowed, forced = [_named(tool) for tool in listed], mode == "required" and bool(listed)
            case _:
                raise bad_request(
                    "Invalid value for 'tool_choice'. Supported values are: 'none', 'auto', 'required', "
                    '{"type": "function", "function": {"name": ...}} and {"type": "allowed_tools", "allowed_tools": '
                    '{"mode": ..., "tools": [...]}}.',
                    "tool_choice",
                    "invalid_value",
                )
        for name in allowed:
            if name not in names:
                raise bad_request(
                    f"Invalid 'tool_choice': there is no tool '{shown(name)}'.", "tool_choice", "invalid_value"
                )
        return [tool for tool in tools if tool["function"]["name"] in allowed], forced

    @property
    def one_call(self) -> bool:
        """Whether an answer has one call at most; a function that was named is called once, as OpenAI has it."""
        named = isinstance(self.tool_choice, dict) and self.tool_choice.get("type") == "function"
        return self.parallel_tool_calls is False or named


def _named(tool: Any) -> str:
    """The name of an allowed tool. Raises ApiError."""
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise bad_request(
        "Invalid 'tool_choice.allowed_tools.tools': expected objects with 'type' and 'function' (its 'name').",
        "tool_choice",
        "invalid_value",
    )
