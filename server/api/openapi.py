"""The OpenAPI document. Bodies are read and answers written by hand, so their schemas are put in here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from server.api.openai.chat_options import ChatOptions
from server.api.openai.protocol import ChatCompletion, ChatCompletionChunk, Completion
from server.api.routes.adapters import LoadAdapterRequest, UnloadAdapterRequest
from server.api.routes.completions import CompletionRequest
from server.api.routes.embeddings import EmbeddingRequest
from server.api.routes.messages import CountRequest, MessageRequest
from server.api.routes.responses import ResponseRequest
from server.api.routes.tokens import Detokenize, TokenizeText

REF = "#/components/schemas/{model}"

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}

_GENERATION_ERRORS = {
    "400": "The request is malformed, or asks for what this server does not do; param names the option",
    "401": "The server wants an API key, and this is none of them",
    "404": "No such model",
    "413": "The body is larger than http.max_body_bytes",
    "415": "The body is not application/json",
    "429": "Too many requests under way; Retry-After says when to come back",
    "500": "The engine could not finish the request",
    "504": "The request took longer than http.request_timeout_s or its X-Request-Timeout",
    "503": "The model is loading, restarting or shutting down",
}

_ENDPOINTS: dict[str, tuple[type[BaseModel], type[msgspec.Struct], type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/chat/completions": (
        ChatOptions,
        ChatCompletion,
        ChatCompletionChunk,
        {
            "model": "smollm2-135m-instruct",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 64,
        },
    ),
    "/v1/completions": (
        CompletionRequest,
        Completion,
        Completion,
        {"model": "smollm2-135m-instruct", "prompt": "The capital of France is", "max_tokens": 8},
    ),
}


# Answers of these are written out by hand in the other servers' shapes, and described by their documentation.
_EXAMPLE = {
    "model": "smollm2-135m-instruct",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}
_OTHERS: dict[str, tuple[type[BaseModel], str, bool, dict[str, Any]]] = {
    "/v1/responses": (
        ResponseRequest,
        "OpenAI's response object; with stream, its events",
        True,
        {"model": "smollm2-135m-instruct", "input": "What is the capital of France?", "max_output_tokens": 64},
    ),
    "/v1/messages": (
        MessageRequest,
        "Anthropic's message; with stream, its events",
        True,
        _EXAMPLE | {"max_tokens": 64},
    ),
    "/v1/messages/count_tokens": (CountRequest, "input_tokens", False, _EXAMPLE),
    "/v1/embeddings": (
        EmbeddingRequest,
        "OpenAI's list of embeddings",
        False,
        {"model": "smollm2-135m-instruct", "input": ["The capital of France", "Paris"]},
    ),
    "/tokenize": (TokenizeText, "count, max_model_len, tokens, token_strs", False, {"prompt": "The capital of France"}),
    "/detokenize": (Detokenize, "prompt", False, {"tokens": [504, 3575, 282, 4649]}),
}

# Answered with a line of text.
_PLAIN: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/load_lora_adapter": (LoadAdapterRequest, {"lora_name": "sql", "lora_path": "/adapters/sql"}),
    "/v1/unload_lora_adapter": (UnloadAdapterRequest, {"lora_name": "sql"}),
}


def describe(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """A replacement for app.openapi that knows the bodies and answers of the generating endpoints."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    return openapi


def _request_body(request: type[BaseModel], example: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """An operation's requestBody; puts the request's schemas among the document's."""
    body = request.model_json_schema(ref_template=REF)
    # Unknown fields are hints (server.api.http.ignored) unless the configuration refuses them.
    for schema in (body, *body.get("$defs", {}).values()):
        schema.pop("additionalProperties", None)
    schemas |= body.pop("$defs", {})
    schemas[request.__name__] = body
    return {
        "required": True,
        "content": {"application/json": {"schema": _ref(request.__name__), "example": example}},
    }


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    structs = [struct for _, whole, chunk, _ in _ENDPOINTS.values() for struct in (whole, chunk)]
    _, answers = msgspec.json.schema_components(structs, ref_template=REF.replace("{model}", "{name}"))
    schemas: dict[str, Any] = {**answers, "Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    for path, (request, whole, chunk, example) in _ENDPOINTS.items():
        operation = document["paths"][path]["post"]
        operation["requestBody"] = _request_body(request, example, schemas)
        operation["responses"] = {
            "200": {
                "description": "The answer; with stream, one event per step",
                "content": {
                    "application/json": {"schema": _ref(whole.__name__)},
                    "text/event-stream": {"schema": _events(f"data: {chunk.__name__}, and [DONE] at the end")},
                },
            },
            **{status: _error(text) for status, text in _GENERATION_ERRORS.items()},
        }
    for path, (request, answer, streams, example) in _OTHERS.items():
        operation = document["paths"][path]["post"]
        operation["requestBody"] = _request_body(request, example, schemas)
        content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
        if streams:
            content["text/event-stream"] = {"schema": _events("event: its type, data: the event")}
        shape = "AnthropicError" if path.startswith("/v1/messages") else "Error"
        operation["responses"] = {
            "200": {"description": answer, "content": content},
            **{status: _error(text, shape) for status, text in _GENERATION_ERRORS.items()},
        }
    for path, (request, example) in _PLAIN.items():
        operation = document["paths"][path]["post"]
        operation["requestBody"] = _request_body(request, example, schemas)
        operation["responses"] = {
            "200": {"description": "Done", "content": {"text/plain": {"schema": {"type": "string"}}}},
            **{status: _error(text) for status, text in _GENERATION_ERRORS.items() if status not in ("500", "504")},
            "404": _error("No such folder or adapter, or engine.allow_runtime_lora is not set"),
        }
    # The validation error that FastAPI would give; ours are 400s of the shape above.
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
    document.setdefault("components", {})["schemas"] = dict(sorted(schemas.items()))
    return document


def _events(description: str) -> dict[str, Any]:
    """One event of a stream."""
    text = {"type": "string"}
    return {"type": "object", "description": description, "properties": {"event": text, "data": text}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": REF.format(model=name)}


def _error(description: str, shape: str = "Error") -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ref(shape)}}}
