"""Endpoints that SGLang's router asks besides /health: the model that is served, and the load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.answering.service import Service, service_of
from server.api.http.replies import json_response
from server.version import running_version

router = APIRouter(include_in_schema=False)


@router.get("/model_info")
@router.get("/get_model_info")
async def model_info(request: Request) -> Response:
    """The model's name; its folder, where there is one, has the tokenizer."""
    service = service_of(request)
    return json_response({"served_model_name": service.model_name, "is_generation": True} | _folder(service))


@router.get("/server_info")
@router.get("/get_server_info")
async def server_info(request: Request) -> Response:
    """The model's name and limits, and that there is one engine behind this address."""
    service = service_of(request)
    limits = service.status.ready
    return json_response(
        {
            "version": running_version(),
            "served_model_name": service.model_name,
            "dp_size": 1,
            "max_total_num_tokens": limits.num_blocks * limits.block_size if limits else None,
            "context_length": limits.max_model_len if limits else None,
        }
        | _folder(service)
    )


@router.get("/get_load")
async def load(request: Request) -> Response:
    """Sequences in the batch and waiting, and tokens in the KV cache; one entry, as there is one engine."""
    service = service_of(request)
    running = waiting = tokens = 0
    if service.engine is not None and (limits := service.status.ready) is not None:
        stats = service.engine.stats
        running, waiting, tokens = stats.running, stats.waiting, stats.kv_blocks_used * limits.block_size
    entry = {"dp_rank": 0, "num_reqs": running + waiting, "num_waiting_reqs": waiting, "num_tokens": tokens}
    return json_response([entry])


def _folder(service: Service) -> dict[str, Any]:
    folder = Path(service.config.model).expanduser()
    return {"model_path": str(folder), "tokenizer_path": str(folder)} if folder.is_dir() else {}
