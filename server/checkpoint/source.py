"""From the configured model name to a checked folder on disk. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

from server.checkpoint.base import CheckpointError, Progress
from server.checkpoint.embedded.files import embedded_checkpoint
from server.checkpoint.inspection import inspect_checkpoint
from server.config import EMBEDDED_MODEL

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Only data is taken from a hub repository: no pickled weights, no code.
_WANTED = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def resolve_checkpoint(model: str, cache_dir: Path, progress: Progress) -> Path:
    """Folder of the model: the embedded one, a local folder, or a hub repository fetched into the hub's own cache.

    The folder's config and weight files are checked (see inspect_checkpoint). Raises CheckpointError.
    """
    if model == EMBEDDED_MODEL:
        folder = embedded_checkpoint(cache_dir, progress)
    elif Path(model).expanduser().exists():
        folder = Path(model).expanduser()
    elif _HUB_ID.fullmatch(model) and not model.startswith("."):
        folder = _from_hub(model, progress)
    else:
        raise CheckpointError(f"{model}: no such folder, and not a hub id (owner/name) or {EMBEDDED_MODEL!r}")
    inspect_checkpoint(folder)
    return folder


def _from_hub(model: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    progress(f"fetching {model} from the hub", 0.0)
    try:
        return Path(snapshot_download(model, allow_patterns=_WANTED))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as e:
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise CheckpointError(f"{model}: no such local folder, and the hub did not give it: {reason}") from e
