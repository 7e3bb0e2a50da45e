"""Ray Serve's application: `serve run deploy/ray/app.yaml` calls build() with the file's args."""

from __future__ import annotations

import os
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.deployment import Application

from server.config import Config, ConfigError
from server.ray_serve.engine import Engine
from server.ray_serve.ingress import Ingress
from server.ray_serve.router import PrefixAffinityRouter
from server.serving import ABORT_GRACE_S

Model = TypeVar("Model", bound=BaseModel)

# Beside the requests that a replica admits: those it refuses, and /health.
BESIDES = 64
# Beside a request's body in a call: its headers, and what Ray says of it.
BESIDES_BYTES = 1 << 20
# The resource that only a cluster's head node has.
HEAD_NODE = "node:__internal_head__"
# Ray reads these in each process of ours. By default a request changes threads at every step (Ray's event loop, a router's,
# one for our code) and goes from process to process as a task of Ray's, for twice the processor time.
FEWER_THREADS = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
}


class Options(BaseModel):
    """The args of the application."""

    model_config = ConfigDict(extra="forbid")

    config: dict[str, Any] = {}
    """As in config.yaml, for every replica. Of http, what listens is Ray's: host, port, tls_* and the like say nothing."""
    gpus: float = Field(default=0, ge=0)
    """GPUs of a replica; 0: CPU. Less than 1 shares one."""
    cpus: float = Field(default=1, gt=0)
    """Cores of a replica; on CPU also its threads, unless engine.threads says otherwise."""
    replicas: int = Field(default=1, ge=1)
    """Number of replicas; with max_replicas, the least number."""
    max_replicas: int | None = Field(default=None, ge=1)
    target_ongoing_requests: float = Field(default=24, gt=0)
    """Requests under way in each replica that autoscaling aims at."""
    upscale_delay_s: float = Field(default=10, ge=0)
    """Seconds that there have to be more of them before a replica is added, which takes a while to load."""
    downscale_delay_s: float = Field(default=600, ge=0)
    """Seconds that there have to be fewer before one is taken away, and its KV cache with it."""
    router: Literal["prefix_affinity", "power_of_two"] = "prefix_affinity"
    """power_of_two: the less busy of two at random, whatever the prompt."""
    imbalance: int = Field(default=16, ge=0)
    """Requests that the replica with a prompt's beginning may be ahead of the one with the fewest."""


def build(args: dict[str, Any]) -> Application:
    """The application; args are Options. Raises ConfigError with one line that names the field."""
    options = _validated(Options, args, "args")
    config = _validated(Config, options.config, "args.config")
    if config.engine.allow_runtime_lora:
        raise ConfigError(
            "args.config.engine.allow_runtime_lora: replicas serve the adapters of engine.lora_modules only"
        )
    if config.http.api_processes > 1:
        raise ConfigError("args.config.http.api_processes: a replica has one; have more replicas, or more ingresses")
    if options.max_replicas is not None and options.max_replicas < options.replicas:
        raise ConfigError(f"args.max_replicas: {options.max_replicas} is less than args.replicas ({options.replicas})")
    engines = _engines(options, config)
    return _ingress(config).bind(engines)


def _validated(model: type[Model], data: dict[str, Any], name: str) -> Model:
    try:
        return model.model_validate(data)
    except ValidationError as e:
        first = e.errors()[0]
        raise ConfigError(f"{'.'.join([name, *(str(p) for p in first['loc'])])}: {first['msg']}") from None


def _environment(config: Config) -> dict[str, Any]:
    """Environment of our processes, unless that of the process that builds the application has it."""
    variables = FEWER_THREADS | {
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(config.http.body_bytes_with_images + BESIDES_BYTES)
    }
    return {"env_vars": {name: os.environ.get(name, value) for name, value in variables.items()}}


def _engines(options: Options, config: Config) -> Application:
    scale: dict[str, Any] = {"num_replicas": options.replicas}
    if options.max_replicas is not None:
        scale = {
            "autoscaling_config": {
                "min_replicas": options.replicas,
                "max_replicas": options.max_replicas,
                "target_ongoing_requests": options.target_ongoing_requests,
                "upscale_delay_s": options.upscale_delay_s,
                "downscale_delay_s": options.downscale_delay_s,
            }
        }
    deployment = serve.deployment(
        Engine,
        name="Engine",
        ray_actor_options={
            "num_cpus": options.cpus,
            "num_gpus": options.gpus,
            "runtime_env": _environment(config),
        },
        # Ours refuses with 429 and Retry-After beyond max_queue, where Ray would let requests wait without a limit.
        max_ongoing_requests=config.http.max_queue + BESIDES,
        # A replica gets no new requests from here on, and may answer those it has.
        graceful_shutdown_timeout_s=config.http.drain_timeout_s + ABORT_GRACE_S,
        graceful_shutdown_wait_loop_s=0.5,
        # A replica that dies is noticed, and another one started, when Serve next asks.
        health_check_period_s=2,
        health_check_timeout_s=30,
        **_routing(options),
        **scale,
    )
    return deployment.bind(config.model_dump(mode="json"))


def _routing(options: Options) -> dict[str, Any]:
    if options.router == "power_of_two":  # Ray's default
        return {}
    kwargs = {"imbalance": options.imbalance}
    return {
        "request_router_config": RequestRouterConfig(
            request_router_class=PrefixAffinityRouter, request_router_kwargs=kwargs
        )
    }


def _ingress(config: Config) -> Any:
    max_body_bytes = config.http.body_bytes_with_images

    class Door:
        """Ray's wrapper makes the ASGI application when the replica is there."""

        def __init__(self, engines: Any) -> None:
            self._engines = engines

        def __serve_build_asgi_app__(self) -> Ingress:
            return Ingress(self._engines, max_body_bytes)

    return serve.deployment(
        serve.ingress()(Door),
        name="Ingress",
        # No core of its own, so that engines may have all of a small machine's. On the head node, as Ray's controller is:
        # an ingress that is lost cannot end its streams with an error, so no other node's loss may take it along.
        ray_actor_options={
            "num_cpus": 0,
            "resources": {HEAD_NODE: 0.001},
            "runtime_env": _environment(config),
        },
        max_ongoing_requests=10_000,
        graceful_shutdown_timeout_s=config.http.drain_timeout_s + ABORT_GRACE_S,
    )
