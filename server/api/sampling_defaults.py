"""What a request gets for the sampling parameters that it leaves out: those that the model's makers recommend."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, fields
from pathlib import Path

logger = logging.getLogger(__name__)

_LIMITS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}
"""The same as for requests."""


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling parameters of requests that say nothing; as they stand here, the OpenAI API's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def read_defaults(folder: Path) -> SamplingDefaults:
    """Those of a checkpoint's generation_config.json, as vLLM takes them; what it does not have stays the OpenAI API's.

    A file or a value that cannot be used is passed over with a line in the log.
    """
    path = folder / "generation_config.json"
    try:
        given = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if not isinstance(given, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as e:
        logger.warning("%s is passed over: %s", path, e)
        return SamplingDefaults()
    found = {}
    for field in fields(SamplingDefaults):
        value = given.get(field.name)
        least, most = _LIMITS[field.name]
        if value is None:
            continue
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole or (isinstance(value, float) and field.name != "top_k")) or not least <= value <= most:
            logger.warning("%s: %s is passed over: %r", path, field.name, value)
        else:
            found[field.name] = value
    if found:
        told = ", ".join(f"{name} {value}" for name, value in found.items())
        logger.info("requests that do not say otherwise get the model's sampling parameters: %s", told)
    return SamplingDefaults(**found)
