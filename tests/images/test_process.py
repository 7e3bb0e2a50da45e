"""The image process: it may die or hang over an image, and the next one is prepared all the same."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from server.images import client
from server.images.client import ImageProcess, ImageRefusedError, ImagesUnavailableError
from server.images.messages import ImageJob
from server.images.store import ImageStore
from tests.api.images.image_models import encoded, picture, write_image_model

pytestmark = pytest.mark.process

MOST = 10_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_model(tmp_path_factory.mktemp("model") / "llava")


@pytest.fixture
async def process(folder: Path) -> AsyncIterator[ImageProcess]:
    found = ImageProcess(folder)
    yield found
    await found.close()


def job(seed: int, file: Path) -> ImageJob:
    return ImageJob(encoded(picture(seed)), str(file), MOST)


async def test_it_goes_on_after_refusals_deaths_and_time_outs(
    process: ImageProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await process.start()).placeholder == "<image>"
    first = await process.prepare(job(1, tmp_path / "a"))
    assert (first.text, first.placeholders) == ("<image>" * 4, 4)
    assert (tmp_path / "a").stat().st_size == first.num_bytes
    with pytest.raises(ImageRefusedError, match="formats"):
        await process.prepare(ImageJob(b"nothing", str(tmp_path / "b"), MOST))
    assert process.starts == 1
    assert process._child is not None
    os.kill(process._child.pid, signal.SIGSTOP)
    with monkeypatch.context() as patched:
        patched.setattr(client, "IMAGE_TIMEOUT_S", 0.2)
        with pytest.raises(ImageRefusedError, match="takes longer"):
            await process.prepare(job(2, tmp_path / "c"))
    await process.start()
    os.kill(process._child.pid, signal.SIGSTOP)  # so that it cannot answer first
    dying = asyncio.create_task(process.prepare(job(3, tmp_path / "d")))
    await asyncio.sleep(0)
    process._child.kill()
    with pytest.raises(ImageRefusedError, match="has ended"):
        await dying
    assert (await process.prepare(job(4, tmp_path / "e"))).placeholders == 4
    assert process.starts == 3


@pytest.fixture
def nonsense(folder: Path, tmp_path: Path) -> Path:
    """The same, but for what it says of images."""
    for file in folder.iterdir():
        if "processor" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Nonsense"}')
    return tmp_path


async def test_a_checkpoint_without_a_processor(nonsense: Path) -> None:
    broken = ImageProcess(nonsense)
    with pytest.raises(ImagesUnavailableError, match="image processor cannot be loaded"):
        await broken.start()
    await broken.close()


async def test_the_store_keeps_what_is_used_and_what_there_is_room_for(process: ImageProcess) -> None:
    store = ImageStore(process, MOST, cache_bytes=0)
    data = [encoded(picture(seed)) for seed in range(2)]
    one, same = await asyncio.gather(store.take(data[0]), store.take(data[0]))
    assert one is same
    smaller = await store.take(data[0], low_detail=True)
    assert smaller.key != one.key
    other = await store.take(data[1])
    store.give_back([one, other])
    assert one.file.exists()
    assert not other.file.exists()
    store.give_back([same])
    assert not one.file.exists()
    kept = await store.take(data[1])
    parent = kept.file.parent
    store.close()
    assert not parent.exists()
