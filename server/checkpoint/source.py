"""From the configured model name to a checked folder on disk. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from server import PACKAGE
from server.checkpoint.base import CheckpointError, Progress, check_disk
from server.checkpoint.embedded.files import embedded_checkpoint
from server.checkpoint.inspection import CheckpointInfo, inspect_checkpoint, weight_files
from server.config import EMBEDDED_MODEL

_GGUF = ".gguf"
_NO_GGUF = "GGUF is not served: name the model that it was made from, in NF4 or 16 bit"
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
        _refuse_gguf(folder)
    elif _is_hub_id(model):
        folder = _from_hub(model, progress)
    else:
        raise CheckpointError(f"{model}: no such folder, and not a hub id (owner/name) or {EMBEDDED_MODEL!r}")
    inspect_checkpoint(folder)
    return folder


def inspect_model(model: str, cache_dir: Path, progress: Progress) -> CheckpointInfo:
    """What resolve_checkpoint() would find; of a hub repository only configurations and headers of weights are fetched."""
    if Path(model).expanduser().exists() or not _is_hub_id(model):
        return inspect_checkpoint(resolve_checkpoint(model, cache_dir, progress))
    from huggingface_hub import get_safetensors_metadata, snapshot_download

    with _hub_errors(model):
        folder = Path(snapshot_download(model, allow_patterns=["*config.json", "*.index.json"]))
        if not (folder / "config.json").exists():
            raise CheckpointError(f"{model}: the hub's repository has no config.json")
        try:
            weight_files(folder)
        except CheckpointError:
            found = get_safetensors_metadata(model).files_metadata.values()
            tensors = [item for file in found for item in file.tensors.items()]
            return inspect_checkpoint(folder, {name: (info.dtype, tuple(info.shape)) for name, info in tensors})
    return inspect_checkpoint(folder)


def _is_hub_id(model: str) -> bool:
    return _HUB_ID.fullmatch(model) is not None and not model.startswith(".")


def _from_hub(model: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download

    progress(f"fetching {model} from the hub", 0.0)
    with _hub_errors(model):
        _check_hub(model)
        return Path(snapshot_download(model, allow_patterns=_WANTED))


@contextmanager
def _hub_errors(model: str) -> Iterator[None]:
    """While entered, errors of the hub are CheckpointErrors."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        NotASafetensorsRepoError,
        RepositoryNotFoundError,
    )

    try:
        yield
    except GatedRepoError as e:
        raise CheckpointError(
            f"{model}: its terms have to be accepted at https://huggingface.co/{model}, and HF_TOKEN has to be a token of"
            " that account"
        ) from e
    except RepositoryNotFoundError as e:
        raise CheckpointError(
            f"{model}: no such local folder, and the hub has no such model, or a private one that HF_TOKEN does not open"
        ) from e
    except (HfHubHTTPError, LocalEntryNotFoundError, NotASafetensorsRepoError, OSError) as e:
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise CheckpointError(f"{model}: no such local folder, and the hub did not give it: {reason}") from e


def _check_hub(model: str) -> None:
    """Raise CheckpointError for a repository of GGUF files, or one that the disk has no room for."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import DryRunError

    try:
        listed = snapshot_download(model, allow_patterns=[*_WANTED, f"*{_GGUF}"], dry_run=True)
    except DryRunError:
        return  # without the hub: what the cache has is taken
    wanted = [file for file in listed if not file.filename.endswith(_GGUF)]
    if len(wanted) < len(listed) and not any(file.filename == "config.json" for file in wanted):
        raise CheckpointError(f"{model}: {_NO_GGUF}")
    needed = sum(file.file_size or 0 for file in wanted if file.will_download)
    check_disk(Path(constants.HF_HUB_CACHE), needed, f"{model} (HF_HOME names another folder)")


def _refuse_gguf(path: Path) -> None:
    """Raise CheckpointError for a GGUF file, and for a folder that has such files and no config.json."""
    if path.is_dir() and not (path / "config.json").exists():
        path = next(iter(sorted(path.glob(f"*{_GGUF}"))), path)
    if path.suffix == _GGUF:
        raise CheckpointError(
            f"{path}: {_NO_GGUF}; or `python -m {PACKAGE}.checkpoint.embedded.convert {path} FOLDER` makes an NF4 checkpoint"
            " of it, at some loss"
        )
