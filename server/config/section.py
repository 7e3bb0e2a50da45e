"""What the sections of the configuration share."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ConfigError(Exception):
    """The configuration cannot be used; the message is one line that names the field."""


class Section(BaseModel):
    """Fields that cannot be changed; a field that does not exist is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
