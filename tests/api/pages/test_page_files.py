"""Files of the pages, as they are served: on an application without a model."""

from __future__ import annotations

import fnmatch
import gzip
import json
import re
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import httpx
import pytest

from server.api.routes.pages import ASSETS
from server.app import create_app
from server.config import Config, HttpConfig
from tests.api.pages.vendored import table

ROOT = Path(__file__).parents[3]
STATIC = ROOT / "server/api/static"
VENDOR = STATIC / "vendor"
# These belong to the sources, and are neither installed nor sent.
SOURCE_ONLY = {"vendor/pins.json", "vendor/.gitattributes"}


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that wants keys."""
    app = create_app(Config(http=HttpConfig(api_keys=("key",))))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as made:
        yield made


async def folder_of(http: httpx.AsyncClient) -> str:
    """Address of the assets, with their digest."""
    found = re.search(r"static/[0-9a-f]{16}/", (await http.get("/")).text)
    assert found
    return f"/{found[0]}"


def names() -> set[str]:
    found = {str(path.relative_to(STATIC)) for path in STATIC.rglob("*") if path.is_file()}
    return {name for name in found if "__pycache__" not in name} - SOURCE_ONLY


def test_every_file_is_listed_and_installed() -> None:
    documents = {name for name in names() if name.endswith((".html", ".md")) or "LICENSE" in name}
    assert set(ASSETS) == names() - documents
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["server"]
    for name in names():
        assert any(
            fnmatch.fnmatch(f"api/static/{name}", pattern) and pattern.count("/") == name.count("/") + 2
            for pattern in data
        ), name


async def test_every_asset_may_be_kept_for_ever(http: httpx.AsyncClient) -> None:
    folder = await folder_of(http)
    types = {"css": "text/css", "js": "text/javascript", "mjs": "text/javascript", "svg": "image/svg+xml",
             "woff2": "font/woff2"}  # fmt: skip
    for name in ASSETS:
        answer = await http.get(folder + name)
        assert answer.status_code == 200, name
        assert answer.headers["content-type"].split(";")[0] == types[name.rpartition(".")[2]]
        assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-encoding"] == "gzip"
        assert answer.content == (STATIC / name).read_bytes()
        plain = await http.get(folder + name, headers={"Accept-Encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert plain.content == answer.content


async def test_pages_are_asked_for_again_and_not_sent_again(http: httpx.AsyncClient) -> None:
    for path in ("/", "/docs"):
        answer = await http.get(path)
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        again = await http.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert (await http.get(path, headers={"If-None-Match": '"other"'})).status_code == 200
        head = await http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert not re.search(r"<script(?![^>]*src=)|<style| style=| on[a-z]+=", answer.text), (
            "inline scripts and styles"
        )
        addresses = set(re.findall(r'(?:src|href)="([^"#]+)"', answer.text))
        assert len(addresses) > 4
        for address in addresses:
            assert not urlsplit(address).netloc, "something from elsewhere"
            # A proxy may have put the server below a path, which the server does not know.
            below = urljoin(f"http://proxy/llm{path}", address)
            assert below.startswith("http://proxy/llm/"), address
            assert (await http.get(below.removeprefix("http://proxy/llm"))).status_code == 200, address


async def test_scripts_ask_below_the_path_that_the_page_came_from(http: httpx.AsyncClient) -> None:
    folder = await folder_of(http)
    for name in ("api.js", "docs.js", "server.js", "app.js"):
        text = (await http.get(folder + name)).text
        assert not re.search(r"""(?:fetch|ask)\(["'`]/""", text), name
    assert 'fetch("openapi.json")' in (await http.get(f"{folder}docs.js")).text


async def test_the_digest_is_of_what_is_there(http: httpx.AsyncClient) -> None:
    for wrong in ("0" * 16, "-", ""):
        assert (await http.get(f"/static/{wrong}/app.js")).status_code == 404


@pytest.mark.parametrize(
    "name",
    [
        "../routes/pages.py", "..%2froutes%2fpages.py", "%2e%2e/%2e%2e/config.py", "....//config.py", "/etc/passwd",
        "%2fetc%2fpasswd", "vendor/../../routes/pages.py", "vendor/..%5c..%5cconfig.py", "vendor/VENDORED.md",
        "vendor/pins.json", "chat.html", "vendor", "vendor/", "", "app.js%00", "app.js/", "APP.JS", "\\app.js",
    ],
)  # fmt: skip
async def test_nothing_else_is_served(http: httpx.AsyncClient, name: str) -> None:
    folder = await folder_of(http)
    # Raw, as httpx would resolve the dots itself.
    url = httpx.URL("http://x").copy_with(raw_path=(folder + name).encode())
    answer = await http.send(httpx.Request("GET", url))
    assert answer.status_code == 404
    assert "error" in answer.json()


def test_modules_import_what_is_served() -> None:
    for name in ASSETS:
        if name.startswith("vendor/") or not name.endswith(".js"):
            continue
        text = (STATIC / name).read_text()
        for imported in re.findall(r'^(?:import|export) (?:.*? from )?"(.*)";$', text, re.M):
            assert imported.removeprefix("./") in ASSETS, f"{name} imports {imported}"
        assert len(text.splitlines()) < 300


def test_vendored_files_are_those_that_were_pinned() -> None:
    listed = (VENDOR / "VENDORED.md").read_text()
    pins = json.loads((VENDOR / "pins.json").read_text())
    # The table has each file's sha256: it is the same only if the files are.
    assert table(pins) == listed
    assert {name for pin in pins for name in pin["files"].values()} | {"VENDORED.md"} == {
        name.removeprefix("vendor/") for name in names() if name.startswith("vendor/")
    }
    for pin in pins:
        assert any("LICENSE" in name for name in pin["files"])
        assert pin["integrity"].startswith("sha512-")


def test_all_scripts_are_small_on_the_wire() -> None:
    assert sum(len(gzip.compress((STATIC / name).read_bytes())) for name in ASSETS) < 205_000
