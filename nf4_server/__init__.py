"""In a checkout, the folder server by the name that it has in the wheel: docs/adr/0024-names-in-the-wheel.md."""

from server import __version__

__all__ = ["__version__"]
