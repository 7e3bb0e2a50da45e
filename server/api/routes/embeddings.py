"""POST /v1/embeddings: texts as vectors, from the final hidden states of an embedding model."""

from __future__ import annotations

import base64
import time
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from server.api.answering.embeddings import embed
from server.api.answering.limits import admit
from server.api.answering.plan import new_id
from server.api.answering.prompts import PROMPT_SCHEMA, encode_prompts, prompt_count
from server.api.answering.service import Service, service_of
from server.api.http.errors import ApiError, bad_request, engine_failed
from server.api.http.hints import take_hints
from server.api.http.replies import json_response
from server.api.http.streaming import unless_disconnected
from server.api.http.validation import read_json, validate
from server.checkpoint.embedding import EmbeddingModel

router = APIRouter()

MOST_INPUTS = 2048
"""Inputs of one request at most, as in OpenAI's API."""
MOST_TOGETHER = 32
"""Inputs of one request that are in the engine at a time, and count in its queue."""
UNSUPPORTED_EMBEDDING: dict[str, tuple[Any, ...]] = {
    "truncate_prompt_tokens": (),
    "add_special_tokens": (True,),
    "normalize": (True,),
    "use_activation": (True,),
    # Other servers' ways to ask for a prompt in front of the input.
    "input_type": (),
    "prompt_name": (),
    "task": (),
    "text_type": (),
    "instruct": (),
    "messages": (),
    # Other forms of vectors: vLLM's, Voyage's, Cohere's, Jina's.
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "output_dtype": ("float",),
    "output_dimension": (),
    "embedding_types": (["float"],),
    "embedding_type": ("float",),
    "late_chunking": (False,),
}
"""Other servers' options that change vectors, with the values that ask for nothing."""


class EmbeddingRequest(BaseModel):
    """Body of POST /v1/embeddings. The input is checked by encode_prompts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    input: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None


@router.post("/v1/embeddings", summary="Texts as vectors")
async def embeddings(request: Request) -> Response:
    """OpenAI's embeddings; 404 where the model does not give any."""
    service = service_of(request)
    document, size = await read_json(request, service.config.http.max_body_bytes)
    arrival = time.monotonic()
    take_hints("embeddings", document)
    options = validate(EmbeddingRequest, document, UNSUPPORTED_EMBEDDING)
    service.check_model(options.model)
    return json_response(await unless_disconnected(request, _answer(service, options, size, arrival)))


async def _answer(service: Service, options: EmbeddingRequest, size: int, arrival: float) -> dict[str, Any]:
    backend = service.backend()
    kind = service.embedding
    if not isinstance(kind, EmbeddingModel):
        raise ApiError(404, f"This server gives no embeddings: {kind}.", code="embeddings_off")
    if options.dimensions is not None and options.dimensions > kind.size:
        raise bad_request(
            f"Invalid 'dimensions': this model's embeddings have {kind.size}.", "dimensions", "value_out_of_range"
        )
    count = prompt_count(options.input)
    if count > MOST_INPUTS:
        raise bad_request(f"Invalid 'input': at most {MOST_INPUTS} at a time.", "input", "value_out_of_range")
    together = min(count, MOST_TOGETHER, service.admission.limit)
    ticket = admit(service, together, "input")
    try:
        inputs = await backend.tokenizer.off_loop(
            size, lambda: encode_prompts(options.input, backend, "input", prefix=kind.prefix)
        )
        answer_id = new_id("embd-")
        states = await embed(
            service,
            backend,
            ticket,
            inputs,
            together=together,
            model=options.model,
            answer_id=answer_id,
            arrival=arrival,
        )
    finally:
        ticket.release()
    vectors = [_vector(state, kind, options.dimensions) for state in states]
    tokens = sum(map(len, inputs))
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, options.encoding_format)}
            for index, vector in enumerate(vectors)
        ],
        "model": options.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _vector(state: bytes, kind: EmbeddingModel, dimensions: int | None) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The embedding of a hidden state: its first dimensions, scaled to length 1 where the model's are. Raises ApiError."""
    vector = np.frombuffer(state, "<f4")[:dimensions]
    if not np.isfinite(vector).all():
        raise engine_failed("The model's hidden state is not numbers.")
    length = float(np.linalg.norm(vector)) if kind.normalize else 0.0
    return (vector / length).astype("<f4") if length else vector


def _encoded(vector: np.ndarray[Any, np.dtype[np.float32]], encoding: str | None) -> list[float] | str:
    return base64.b64encode(vector.tobytes()).decode() if encoding == "base64" else vector.tolist()
