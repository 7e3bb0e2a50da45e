"""GET /health, /metrics and /v1/models: what operators and clients ask before they generate."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from server.api.answering.service import Service, service_of
from server.api.http.replies import json_response
from server.engine.supervisor.steps import STEPS
from server.version import running_version

router = APIRouter()
_REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"description": "The server wants an API key, and this is none of them"},
    429: {"description": "The key has too many requests under way"},
}


@router.get("/health", summary="Whether the server can generate", responses={503: {"description": "Not now"}})
async def health(request: Request) -> Response:
    """200 when the server can generate; 503 while the model loads (step, stage, seconds), or the engine is gone (error)."""
    service = service_of(request)
    status = service.health
    document: dict[str, Any] = {"status": "draining" if service.draining else status.state, "model": service.model_name}
    if status.ready is not None:
        ready = status.ready
        document |= {
            "device": ready.device,
            "dtype": ready.dtype,
            "kernels": ready.kernels,
            "expanded_weight_bytes": ready.expanded_weight_bytes,
            "max_model_len": ready.max_model_len,
            "kv_cache_tokens": ready.num_blocks * ready.block_size,
        }
    else:
        steps = service.steps
        document |= {"stage": status.stage, "step": steps.number, "steps": STEPS, "seconds": round(steps.seconds, 1)}
    if status.message:
        document["error"] = status.message
    if service.engine is not None:
        document["engine_restarts"] = service.engine.restarts
    return json_response(document, 200 if document["status"] == "ready" else 503)


@router.get(
    "/ping",
    summary="Whether the server can generate",
    response_class=Response,
    responses={503: {"description": "Not now"}},
)
@router.post("/ping", include_in_schema=False)
async def ping(request: Request) -> Response:
    """An empty 200 or 503, for load balancers that look at nothing else."""
    service = service_of(request)
    return Response(status_code=200 if service.health.state == "ready" and not service.draining else 503)


@router.get("/version", summary="The server's version")
async def show_version() -> Response:
    """{"version": ...}."""
    return json_response({"version": running_version()})


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=PlainTextResponse,
    responses={200: {"content": {"application/openmetrics-text": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request) -> Response:
    """All metrics in the text format that the Accept header asks for."""
    body, content_type = service_of(request).metrics.exposition(request.headers.get("accept", ""))
    return Response(body, media_type=content_type)


def _model(service: Service, name: str) -> dict[str, Any]:
    """OpenAI's model object of the model, or of one of its adapters: root is its folder, parent the model's name."""
    limits = service.status.ready
    adapter = service.adapter(name)
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "nf4-server",
        "root": service.config.model if adapter is None else service.adapters[adapter],
        "parent": None if adapter is None else service.model_name,
        "max_model_len": limits.max_model_len if limits else None,
        "input_modalities": ["text"] if isinstance(service.images, str) else ["text", "image"],
    }


@router.get("/v1/models", summary="The models served", responses=_REFUSALS)
async def list_models(request: Request) -> Response:
    """OpenAI's list object: the model under each of its names, then its LoRA adapters."""
    service = service_of(request)
    names = [*service.config.model_names, *service.adapters]
    return json_response({"object": "list", "data": [_model(service, name) for name in names]})


@router.get("/v1/models/{name:path}", summary="One model", responses=_REFUSALS | {404: {"description": "Not served"}})
async def get_model(request: Request, name: str) -> Response:
    """OpenAI's model object."""
    return json_response(_model(service_of(request), name))
