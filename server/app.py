"""Composition root: puts configuration, checkpoint, engine, tokenizer and routes together into one ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from server.api.answering.service import Service
from server.api.http.access import AccessLayer
from server.api.http.errors import ApiError, answer_api_error, answer_http_exception
from server.api.http.head import HeadLayer
from server.api.http.middleware import RequestLayer
from server.api.openai.sampling_defaults import read_defaults
from server.api.openapi import describe
from server.api.routes import (
    adapters,
    chat,
    completions,
    embeddings,
    messages,
    operations,
    pages,
    responses,
    sglang,
    stored_responses,
    tokens,
)
from server.api_processes.alone import Alone
from server.api_processes.member import Member
from server.api_processes.relay import RelayLayer
from server.checkpoint.base import CheckpointError
from server.checkpoint.embedding import embedding_kind
from server.checkpoint.images import without_images
from server.config import Config, ConfigError
from server.engine.grammar import Grammars
from server.engine.supervisor.base import EngineStatus
from server.engine.supervisor.client import EngineClient
from server.images.client import ImagesUnavailableError
from server.images.service import Images
from server.objects import freeze_objects
from server.observability.tracing import Tracing, TracingError
from server.text.errors import TokenizerError
from server.text.tokenizer import Tokenizer
from server.threads import in_thread
from server.version import running_version

logger = logging.getLogger(__name__)

StatusListener = Callable[[EngineStatus], None]

_ROUTES = (
    chat,
    completions,
    responses,
    stored_responses,
    messages,
    embeddings,
    adapters,
    tokens,
    operations,
    sglang,
    pages,
)


def create_app(config: Config, on_status: StatusListener | None = None, part: Alone | None = None) -> FastAPI:
    """The application. Its lifespan starts the model in the background, so /health answers 503 while it loads.

    on_status is called in the event loop with every change of the server's status. part: this process' among several.
    """
    part = part or Alone(config)
    service = Service(config, part.counts, part.processes)
    tracing = _tracing(config)
    lifespan = _lifespan(service, part, tracing, on_status or (lambda status: None))
    app = FastAPI(title="NF4 server", version=running_version(), lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.openapi = describe(app)  # type: ignore[method-assign]
    for module in _ROUTES:
        app.include_router(module.router)
    app.add_exception_handler(ApiError, answer_api_error)
    app.add_exception_handler(HTTPException, answer_http_exception)
    _add_layers(app, service, part, tracing)
    return app


def _lifespan(
    service: Service, part: Alone, tracing: Tracing | None, on_status: StatusListener
) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    """Start the model in the background; at the end stop everything that has been started."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await part.begin(service, app)
        starter = asyncio.create_task(_start(service, part, on_status), name="start-model")
        if isinstance(part, Member):
            await part.prepared()  # until then connections go to others
        try:
            yield
        finally:
            service.draining = True
            starter.cancel()
            await asyncio.gather(starter, return_exceptions=True)
            await part.end()
            if service.engine is not None:
                await service.engine.stop()
            if service.tokenizer is not None:
                service.tokenizer.close()
            if service.grammars is not None:
                service.grammars.close()
            if not isinstance(service.images, str):
                await service.images.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    return lifespan


def _add_layers(app: FastAPI, service: Service, part: Alone, tracing: Tracing | None) -> None:
    """Add what every request passes, from the innermost layer to the outermost."""
    config = service.config
    app.add_middleware(HeadLayer)
    app.add_middleware(
        AccessLayer, keys=config.http.keys(), most_per_key=config.http.max_requests_per_key, counts=service.counts
    )
    if config.http.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.http.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-ID", "Retry-After", "Server-Timing", "X-Ignored-Options"],
        )
    app.add_middleware(
        RequestLayer, metrics=service.metrics, tracing=tracing, unknown_options=config.http.unknown_options
    )
    if isinstance(part, Member):
        app.add_middleware(RelayLayer, ask=part.ask, max_body_bytes=config.http.max_body_bytes)


def _tracing(config: Config) -> Tracing | None:
    if config.otlp_traces_endpoint is None:
        return None
    try:
        return Tracing(config.otlp_traces_endpoint, config.model_name)
    except TracingError as e:
        raise ConfigError(str(e)) from e


async def _start(service: Service, part: Alone, on_status: StatusListener) -> None:
    """Start the model; what goes wrong becomes the service's status."""
    config = service.config
    loop = asyncio.get_running_loop()

    def prepare(status: EngineStatus) -> None:
        service.preparation = status
        service.steps.note(status)
        on_status(status)

    def progress(stage: str, fraction: float) -> None:
        status = EngineStatus("loading", stage=stage, fraction=fraction)
        loop.call_soon_threadsafe(prepare, status)

    def engine_changed(status: EngineStatus) -> None:
        service.steps.note(status)
        if status.state == "restarting":
            service.metrics.engine_ended()
        if status.state == "ready" and status.ready is not None:
            service.metrics.engine_ready(status.ready, prefix_caching=config.engine.enable_prefix_caching)
        # The service becomes ready only once everything else is there as well.
        if status.state != "ready" or (service.tokenizer is not None and service.settled):
            on_status(status)

    try:
        folder, engine = await part.engine(progress)
        if isinstance(engine, EngineClient):
            engine.add_step_listener(service.metrics.step_done)
        engine.add_status_listener(engine_changed)
        service.metrics.watch_engine(lambda: (service.status.state, engine.restarts))
        service.engine = engine
        await part.start(engine)
        service.grammars = Grammars(folder)
        if config.generation_config == "auto":
            service.sampling_defaults = read_defaults(folder)
        service.embedding = embedding_kind(folder, config.engine)
        service.images = without_images(folder, config.engine) or Images(
            folder, config.http, service.metrics.image_taken
        )
        service.tokenizer = await in_thread(lambda: Tokenizer.load(folder))
        if not isinstance(service.images, str):
            await _start_images(service, service.images)
        freeze_objects()
        await part.settle(service)
        if engine.status.state == "ready":
            on_status(engine.status)
    except (CheckpointError, TokenizerError) as e:
        prepare(EngineStatus("failed", message=str(e)))
    except Exception as e:
        logger.exception("the start failed")
        prepare(EngineStatus("failed", message=f"unexpected {type(e).__name__} while starting (see the log): {e}"))


async def _start_images(service: Service, images: Images) -> None:
    """Have the image process running; where the checkpoint's files are not enough for it, prompts may have no images."""
    try:
        await images.placeholder()
    except ImagesUnavailableError as e:
        logger.warning("prompts may have no images: %s", e)
        await images.close()
        service.images = str(e)
