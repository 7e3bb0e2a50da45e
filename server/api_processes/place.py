"""The folder that all API processes of a server share, with their counts and the values of their metrics."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from server.observability.value_files import keep_values_in


class Place:
    """A private folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics = folder / "metrics"
        self.counts = folder / "counts"


@contextlib.contextmanager
def new_place() -> Iterator[Place]:
    """A place for this process and those that it starts, removed at the end. Raises OSError.

    Their metrics' values are files in it, so prometheus_client must not have been imported yet.
    """
    with tempfile.TemporaryDirectory(prefix="nf4-api-", ignore_cleanup_errors=True) as folder:
        place = Place(Path(folder))
        place.metrics.mkdir()
        keep_values_in(place.metrics)
        yield place
