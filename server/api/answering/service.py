"""State that all routes share: the model's name, its tokenizer and engine, and whether the server can generate."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request

from server.api.answering.response_store import ResponseStore
from server.api.http.admission import Admission
from server.api.http.counts import Counts
from server.api.http.errors import ApiError, model_not_found, unavailable
from server.api.openai.options import SamplingDefaults
from server.checkpoint.embedding import EmbeddingModel
from server.config import Config
from server.engine.grammar import Grammars
from server.engine.supervisor.base import EngineBase, EngineStatus
from server.engine.supervisor.steps import StartSteps
from server.images.service import Images
from server.observability.many_processes import Processes
from server.observability.metrics import Metrics
from server.text.tokenizer import Tokenizer
from server.types import EngineReady

PLACEHOLDER = "dummy"
"""Model that huggingface_hub's InferenceClient asks for if it was given a URL and no model."""


@dataclass(frozen=True)
class Backend:
    """A model that can generate."""

    tokenizer: Tokenizer
    engine: EngineBase
    limits: EngineReady
    grammars: Grammars


class Service:
    """State of one server, filled in while it starts (see server.app)."""

    def __init__(self, config: Config, counts: Counts | None = None, processes: Processes | None = None) -> None:
        """counts, processes: what all API processes share; None where this one is the only one."""
        self.config = config
        self.model_name = config.model_name
        self.created = int(time.time())
        self.metrics = Metrics(config.model_name, config.http.metrics_names, processes)
        self.counts = counts or Counts(len(config.http.keys()))
        self.admission = Admission(config.http.max_queue, config.http.max_queue_tokens, self.counts)
        self.tokenizer: Tokenizer | None = None
        self.grammars: Grammars | None = None
        self.engine: EngineBase | None = None
        self.sampling_defaults = SamplingDefaults()
        self.embedding: EmbeddingModel | str = "the model is loading"
        """Maker of embeddings, or the reason that there are none."""
        self.images: Images | str = "the model is loading"
        """Preparation of images, or the reason that prompts may have none."""
        self.responses = ResponseStore(config.http.response_store) if config.http.response_store else None
        self.draining = False
        self.preparation = EngineStatus("loading", stage="starting")
        """Step of the start before there is an engine."""
        self.steps = StartSteps()
        self.settled = True
        """Whether all API processes take connections; until then /health does not invite any."""
        self.spread: Callable[[], Awaitable[None]] = _nothing
        """Tells other API processes the adapters that there are, and waits until they go by that."""
        self.when_draining: Callable[[], None] = lambda: None

    @property
    def status(self) -> EngineStatus:
        """State of the whole server."""
        if self.engine is None or self.preparation.state == "failed":
            return self.preparation
        status = self.engine.status
        if status.state == "ready" and self.tokenizer is None:
            return EngineStatus("loading", stage="loading the tokenizer")
        return status

    @property
    def max_chat_bytes(self) -> int:
        """The longest body of a chat, which may have images."""
        http = self.config.http
        return http.max_body_bytes if isinstance(self.images, str) else http.body_bytes_with_images

    @property
    def health(self) -> EngineStatus:
        """Status that /health reports, which stays "loading" until all API processes listen."""
        status = self.status
        if status.state == "ready" and not self.settled:
            return EngineStatus("loading", stage="starting the other API processes")
        return status

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.draining = True
        self.when_draining()

    @property
    def adapters(self) -> dict[str, str]:
        """Folders of the LoRA adapters that are served, by name."""
        if self.engine is not None:
            return self.engine.adapters
        return {module.name: str(module.path) for module in self.config.engine.lora_modules}

    def check_model(self, name: str) -> None:
        """Raise ApiError (404) unless this names the model, or an adapter of it."""
        self.adapter(name)

    def adapter(self, name: str) -> str | None:
        """The adapter that requests for this model run with, None for the model itself. Raises ApiError (404)."""
        if name in self.adapters:
            return name
        if name in self.config.model_names or name == PLACEHOLDER or self.config.http.any_model:
            return None
        raise model_not_found(name)

    def backend(self) -> Backend:
        """The model. Raises ApiError (503) while it cannot generate."""
        status = self.status
        if self.draining:
            raise unavailable("The server is shutting down.", "shutting_down")
        known = self.engine is not None and self.tokenizer is not None and self.grammars is not None
        if known and status.ready is not None:
            assert self.engine is not None
            assert self.tokenizer is not None
            assert self.grammars is not None
            return Backend(self.tokenizer, self.engine, status.ready, self.grammars)
        raise self.not_ready()

    def not_ready(self) -> ApiError:
        """Why the model cannot generate."""
        status = self.status
        match status.state:
            case "failed":
                return unavailable(f"The model failed to start: {status.message}", "engine_failed", None)
            case "restarting":
                return unavailable("The engine ended and is being started again.", "engine_restarting", 5)
            case "stopped":
                return unavailable("The server is shutting down.", "shutting_down")
            case _:
                return unavailable(f"The model is loading: {self.steps}.", "model_loading", 5)


async def _nothing() -> None:
    pass


def service_of(request: Request) -> Service:
    """The service that a request's application was made with."""
    service: Service = request.app.state.service
    return service
