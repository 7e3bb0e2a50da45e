"""Options of a request that its answer does not depend on: they are accepted, named in a header and logged once."""

from __future__ import annotations

import logging
import re
from collections.abc import Container, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

from server.api.http.errors import bad_request, own_name, shown

logger = logging.getLogger(__name__)

HEADER = "X-Ignored-Options"
UnknownOptions = Literal["warn", "refuse"]

MAX_NAMED = 64
"""Names in one header; a client may send any number of unknown fields."""
MAX_NAME_CHARACTERS = 64
_MAX_LOGGED = 1024
_INDEX = re.compile(r"\[\d+\]")
_UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.\-\[\]]")
_logged: set[str] = set()


@dataclass
class IgnoredOptions:
    """The ignored options of one request."""

    unknown_options: UnknownOptions = "refuse"
    """Treatment of fields that nobody knows."""
    names: set[str] = field(default_factory=set)
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Names of the chat that a request is translated into, each with the request's own name."""

    def header(self) -> str:
        """The header's value; empty when nothing was ignored."""
        return ", ".join(sorted(self.names)[:MAX_NAMED])


current: ContextVar[IgnoredOptions | None] = ContextVar("ignored_options", default=None)
"""Set by the outermost layer for the request that is being answered."""


def ignore(option: str, reason: str) -> None:
    """Note that an option of the present request has no effect; an index in its name does not count."""
    request = current.get()
    if request is None:
        return
    option = own_name(option, request.renamed)
    name = _UNPRINTABLE.sub("?", _INDEX.sub("[]", option))[:MAX_NAME_CHARACTERS]
    request.names.add(name)
    if name not in _logged and len(_logged) < _MAX_LOGGED:
        _logged.add(name)
        logger.info("the option %s is ignored: %s (said once)", name, reason)


def ignore_unknown(option: str) -> None:
    """Note a field that this server does not know. Raises ApiError (400) where http.unknown_options is refuse."""
    request = current.get()
    if request is None or request.unknown_options == "refuse":
        raise bad_request(f"Unknown parameter: '{option}'.", option, "unknown_parameter")
    ignore(option, "this server does not know it")


def ignore_others(fields: Iterable[str], known: Container[str], where: str) -> None:
    """ignore_unknown() for each field of an object, named where in the request, that is not among the known ones."""
    for name in fields:
        if name not in known:
            ignore_unknown(f"{where}.{shown(name)}")


def rename_options(names: Mapping[str, str]) -> None:
    """From now on, the present request's options are noted under the names that the client knows."""
    request = current.get()
    if request is not None:
        request.renamed = names
