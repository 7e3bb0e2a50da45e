"""Composition root: puts configuration, checkpoint, engine, tokenizer and routes together into one ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from server import __version__
from server.api.answering.service import Service
from server.api.http.access import AccessLayer
from server.api.http.errors import ApiError, answer_api_error, answer_http_exception
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
from server.checkpoint.base import CheckpointError, Progress
from server.checkpoint.embedding import embedding_kind
from server.checkpoint.images import without_images
from server.checkpoint.source import resolve_checkpoint
from server.config import Config, ConfigError
from server.engine.grammar import Grammars
from server.engine.supervisor.client import EngineClient, EngineStatus
from server.images.client import ImagesUnavailableError
from server.images.service import Images
from server.observability.tracing import Tracing, TracingError
from server.text.errors import TokenizerError
from server.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

StatusListener = Callable[[EngineStatus], None]


def create_app(config: Config, on_status: StatusListener | None = None) -> FastAPI:
    """The application. Its lifespan starts the model in the background, so /health answers 503 while it loads.

    on_status is called in the event loop with every change of the server's status.
    """
    service = Service(config)
    tracing = _tracing(config)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        starter = asyncio.create_task(_start(service, on_status or (lambda status: None)), name="start-model")
        try:
            yield
        finally:
            service.draining = True
            starter.cancel()
            await asyncio.gather(starter, return_exceptions=True)
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

    app = FastAPI(title="NF4 server", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.openapi = describe(app)  # type: ignore[method-assign]
    for module in (
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
    ):
        app.include_router(module.router)
    app.add_exception_handler(ApiError, answer_api_error)
    app.add_exception_handler(HTTPException, answer_http_exception)
    # The layer that is added last is the outermost.
    app.add_middleware(AccessLayer, keys=config.http.keys(), most_per_key=config.http.max_requests_per_key)
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
    return app


def _tracing(config: Config) -> Tracing | None:
    if config.otlp_traces_endpoint is None:
        return None
    try:
        return Tracing(config.otlp_traces_endpoint, config.model_name)
    except TracingError as e:
        raise ConfigError(str(e)) from e


async def _start(service: Service, on_status: StatusListener) -> None:
    """Bring the model up; what goes wrong becomes the service's status."""
    config = service.config
    loop = asyncio.get_running_loop()

    def prepare(status: EngineStatus) -> None:
        service.preparation = status
        on_status(status)

    def progress(stage: str, fraction: float) -> None:
        status = EngineStatus("loading", stage=stage, fraction=fraction)
        loop.call_soon_threadsafe(prepare, status)

    def engine_changed(status: EngineStatus) -> None:
        if status.state == "restarting":
            service.metrics.engine_ended()
        if status.state == "ready" and status.ready is not None:
            service.metrics.engine_ready(status.ready, prefix_caching=config.engine.enable_prefix_caching)
        # Ready is told once the tokenizer is there as well.
        if status.state != "ready" or service.tokenizer is not None:
            on_status(status)

    try:
        folder = await _in_thread(lambda: resolve_checkpoint(config.model, config.cache_dir, progress))
        engine = EngineClient(await _with_draft_model(config, progress), folder)
        engine.add_step_listener(service.metrics.step_done)
        engine.add_status_listener(engine_changed)
        service.metrics.watch_engine(lambda: (service.status.state, engine.restarts))
        service.engine = engine
        await engine.start()
        service.grammars = Grammars(folder)
        if config.generation_config == "auto":
            service.sampling_defaults = read_defaults(folder)
        service.embedding = embedding_kind(folder, config.engine)
        service.images = without_images(folder, config.engine) or Images(folder, config.http)
        service.tokenizer = await _in_thread(lambda: Tokenizer.load(folder))
        if not isinstance(service.images, str):
            await _start_images(service, service.images)
        # What the libraries have made by now stays; looking through it again and again would stall streams for 50 ms.
        gc.collect()
        gc.freeze()
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


async def _with_draft_model(config: Config, progress: Progress) -> Config:
    """The configuration with the folder of its draft model, if it has one. Raises CheckpointError."""
    wanted = config.engine.draft_model
    if wanted is None:
        return config
    folder = await _in_thread(lambda: resolve_checkpoint(wanted, config.cache_dir, progress))
    return config.model_copy(update={"engine": config.engine.model_copy(update={"draft_model": str(folder)})})


async def _in_thread(call: Callable[[], T]) -> T:
    """Run call in a thread that does not keep the process from ending, as a download may take long."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, error = None, None
        try:
            value = call()
        except Exception as e:
            error = e
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, daemon=True, name="start").start()
    return await result
