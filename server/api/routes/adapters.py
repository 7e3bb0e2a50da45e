"""LoRA adapters that come and go at run time: POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from server.api.answering.service import Service, service_of
from server.api.http.errors import ApiError, bad_request, shown, unavailable
from server.api.http.validation import read_json, validate
from server.engine.supervisor.adapters import AdapterError
from server.engine.supervisor.base import EngineUnavailableError
from server.engine.supervisor.client import EngineClient

logger = logging.getLogger(__name__)

router = APIRouter()
_Name = Annotated[str, Field(min_length=1, max_length=256)]


class LoadAdapterRequest(BaseModel):
    """Adapter to load, and its name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lora_name: _Name
    """Name that requests give as their model."""
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """A folder of the server's machine with adapter_config.json and adapter_model.safetensors."""
    load_inplace: bool | None = None
    """Replace an adapter of this name. Requests that run with the old one end with it."""


class UnloadAdapterRequest(BaseModel):
    """Adapter to forget."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lora_name: _Name
    lora_int_id: int | None = None
    """Accepted, as by vLLM, without effect."""


@router.post("/v1/load_lora_adapter", summary="Serve a LoRA adapter from a folder of the server's machine")
async def load_adapter(request: Request) -> Response:
    """200 once requests can name it; other requests go on meanwhile."""
    service = service_of(request)
    document, _ = await read_json(request, service.config.http.max_body_bytes)
    asked = validate(LoadAdapterRequest, document, {})
    engine = _engine(service)
    name, path = asked.lora_name, asked.lora_path
    if name == service.model_name:
        raise bad_request(f"{name!r} is the model itself.", "lora_name", "invalid_value")
    if name in engine.adapters and not asked.load_inplace:
        raise bad_request(
            f"The lora adapter {shown(name)!r} has already been loaded; 'load_inplace': true replaces it.",
            "lora_name",
            "already_loaded",
        )
    if not await asyncio.to_thread(_is_adapter, path):
        raise ApiError(
            404,
            f"There is no adapter_config.json in {shown(path)!r} on the server's machine.",
            param="lora_path",
            code="adapter_not_found",
        )
    try:
        await engine.load_adapter(name, path)
    except AdapterError as e:
        raise bad_request(f"The adapter cannot be loaded: {e}", "lora_path", "invalid_adapter") from e
    except EngineUnavailableError as e:
        raise unavailable(f"The adapter cannot be loaded now: {e}.", "engine_unavailable") from e
    await service.spread()
    logger.info("adapter %s loaded from %s", name, path)
    return Response(f"Success: LoRA adapter '{name}' added successfully.", media_type="text/plain")


@router.post("/v1/unload_lora_adapter", summary="Forget a LoRA adapter")
async def unload_adapter(request: Request) -> Response:
    """200 at once: new requests cannot name it, and those that run with it go on to their end."""
    service = service_of(request)
    document, _ = await read_json(request, service.config.http.max_body_bytes)
    name = validate(UnloadAdapterRequest, document, {}).lora_name
    if not _engine(service).unload_adapter(name):
        raise ApiError(
            404, f"The lora adapter {shown(name)!r} cannot be found.", param="lora_name", code="adapter_not_found"
        )
    await service.spread()
    logger.info("adapter %s unloaded", name)
    return Response(f"Success: LoRA adapter '{name}' removed successfully.", media_type="text/plain")


def _engine(service: Service) -> EngineClient:
    """The engine. Raises ApiError: 404 where the configuration does not allow this, 503 while the model loads."""
    if not service.config.engine.allow_runtime_lora:
        raise ApiError(
            404,
            "This server loads no adapters at run time; engine.allow_runtime_lora in its configuration says so.",
            code="runtime_lora_disabled",
        )
    engine = service.backend().engine
    assert isinstance(engine, EngineClient)  # other API processes pass such requests on
    return engine


def _is_adapter(path: str) -> bool:
    try:
        return (Path(path) / "adapter_config.json").is_file()
    except (OSError, ValueError):  # too long, a NUL in it
        return False
