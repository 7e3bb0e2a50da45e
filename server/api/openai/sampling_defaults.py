"""Values of sampling parameters that a request leaves out: those that the model's makers recommend."""

from __future__ import annotations

import json
import logging
from dataclasses import fields
from pathlib import Path

from pydantic import ValidationError

from server.api.openai.options import GenerationOptions, SamplingDefaults

logger = logging.getLogger(__name__)


def read_defaults(folder: Path) -> SamplingDefaults:
    """The sampling parameters in a checkpoint's generation_config.json, as vLLM uses them; else the OpenAI API's.

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
    for name in (field.name for field in fields(SamplingDefaults) if given.get(field.name) is not None):
        try:
            options = GenerationOptions.model_validate({"model": "", name: given[name]}, strict=True)
        except ValidationError:
            logger.warning("%s: %s is passed over: %r", path, name, given[name])
        else:
            found[name] = getattr(options, name)
    if found:
        told = ", ".join(f"{name} {value}" for name, value in found.items())
        logger.info("requests that do not say otherwise get the model's sampling parameters: %s", told)
    return SamplingDefaults(**found)
