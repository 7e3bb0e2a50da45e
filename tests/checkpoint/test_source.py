"""From a model's name to a folder: what is refused before anything is fetched or loaded, and what to do about it."""

from __future__ import annotations

import re
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import DryRunError, GatedRepoError, RepositoryNotFoundError

from server.api_processes.alone import Alone
from server.checkpoint.adapter_files import check_adapter
from server.checkpoint.base import CheckpointError
from server.checkpoint.inspection import inspect_checkpoint
from server.checkpoint.source import inspect_model, resolve_checkpoint
from server.config import Config
from tests.checkpoint.layouts import silent

REFUSED = httpx.Response(401, request=httpx.Request("GET", "http://hub"))
Usage = namedtuple("Usage", "total used free")


def test_a_gguf_file_or_folder_is_named_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "model.Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    for given in (file, tmp_path):
        with pytest.raises(CheckpointError) as raised:
            resolve_checkpoint(str(given), tmp_path, silent)
        assert f"{file}: GGUF is not served: name the model that it was made from" in str(raised.value)
        assert f"server.checkpoint.embedded.convert {file} FOLDER" in str(raised.value)
    # A folder that has other formats, too, is served from those.
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="names no model_type"):
        resolve_checkpoint(str(tmp_path), tmp_path, silent)


def _hub(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[bool]:
    """A hub that answers dry runs so; the list says which calls were such."""
    calls: list[bool] = []

    def snapshot_download(model: str, allow_patterns: list[str], dry_run: bool = False) -> Any:
        calls.append(dry_run)
        if isinstance(answer, Exception) and dry_run:
            raise answer
        return answer if dry_run else "/nowhere"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_of_a_model_on_the_hub_headers_are_enough_to_know_it(
    embedded_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copy(embedded_folder / "config.json", tmp_path)
    whole = inspect_checkpoint(embedded_folder)
    tensors = {name: SimpleNamespace(dtype=dtype, shape=list(shape)) for name, (dtype, shape) in whole.tensors.items()}
    found = SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=tensors)})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda _: found)
    seen = inspect_model("some/model", tmp_path, silent)
    assert (seen.tensors, seen.packed, seen.quantization) == (whole.tensors, whole.packed, "nf4")
    # Files that the cache has are read there.
    shutil.copy(embedded_folder / "model.safetensors", tmp_path)
    monkeypatch.delattr(huggingface_hub, "get_safetensors_metadata")
    assert inspect_model("some/model", tmp_path, silent).tensors == whole.tensors


def _file(name: str, size: int, cached: bool = False) -> SimpleNamespace:
    return SimpleNamespace(filename=name, file_size=size, will_download=not cached)


def test_a_model_that_the_disk_has_no_room_for_is_not_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = [_file("config.json", 100), _file("model.safetensors", 16 * 2**30), _file("old.safetensors", 2**50, True)]
    calls = _hub(monkeypatch, files)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 0, 4 * 2**30))
    with pytest.raises(CheckpointError, match=r"some/model .*takes 16\.0 GiB on disk, 4\.0 GiB are free"):
        resolve_checkpoint("some/model", tmp_path, silent)
    assert calls == [True]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 0, 17 * 2**30))
    with pytest.raises(CheckpointError, match="/nowhere"):
        resolve_checkpoint("some/model", tmp_path, silent)
    assert calls == [True, True, False]


def test_the_embedded_model_is_not_fetched_onto_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 0, 2**20))
    with pytest.raises(CheckpointError, match=r"the embedded model takes 0\.7 GiB on disk"):
        resolve_checkpoint("smollm2-135m-instruct", tmp_path / "none" / "yet", silent)


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ([_file("README.md", 1), _file("a.Q4_0.gguf", 1)], "some/model: GGUF is not served"),
        (GatedRepoError("gated", response=REFUSED), "its terms have to be accepted"),
        (RepositoryNotFoundError("none", response=REFUSED), "a private one that HF_TOKEN does not open"),
        (DryRunError("no network"), "/nowhere"),
    ],
)
def test_what_the_hub_says_is_said_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: Any, complaint: str
) -> None:
    _hub(monkeypatch, answer)
    with pytest.raises(CheckpointError, match=re.escape(complaint)):
        resolve_checkpoint("some/model", tmp_path, silent)


def test_an_adapter_is_checked_without_its_tensors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        check_adapter(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: No such file"):
        check_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 8}')
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: missing"):
        check_adapter(tmp_path)
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(CheckpointError, match="pickle"):
        check_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="damaged"):
        check_adapter(tmp_path)


async def test_adapters_are_checked_before_the_model_is_fetched(tmp_path: Path) -> None:
    modules = [{"name": "sql", "path": str(tmp_path / "sql")}]
    config = Config.model_validate({"model": "/no/model", "engine": {"lora_modules": modules}})
    with pytest.raises(CheckpointError, match="sql: no such folder"):
        await Alone(config).engine(silent)
