"""make test-clients: what people use in front of OpenAI's and Anthropic's APIs, each in an environment of its own.

Starts the server with the embedded model, or, for coding agents, whose own prompts are longer than its context, with a
small random one, and runs one script per client against it. Environments are kept in .clients/ and made anew when a
requirement changes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from server.checkpoint.source import resolve_checkpoint
from server.config import EMBEDDED_MODEL, default_cache_dir
from tests.clients.random_model import write_random_model
from tests.conftest import start_server

HERE = Path(__file__).parent
ENVIRONMENTS = Path(".clients")
LIMIT_S = 600.0
"""Seconds that one client may take."""


@dataclass(frozen=True)
class Client:
    """A script and what it needs: packages of PyPI (their first names the client) or of npm, separated by spaces."""

    script: str
    requirement: str
    source: Literal["pypi", "npm"] = "pypi"
    model: Literal["embedded", "random"] = "embedded"


CLIENTS = {
    "openai2": Client("openai_client.py", "openai>=2,<3"),
    "openai3": Client("openai_client.py", "openai>=3,<4"),
    "anthropic": Client("anthropic_client.py", "anthropic"),
    "langchain": Client("langchain_client.py", "langchain-openai"),
    "llama-index": Client("llama_index_client.py", "llama-index-llms-openai-like"),
    "litellm": Client("litellm_client.py", "litellm"),
    "instructor": Client("instructor_client.py", "instructor"),
    "pydantic-ai": Client("pydantic_ai_client.py", "pydantic-ai-slim[openai]"),
    "llm": Client("llm_client.py", "llm"),
    "lm-eval": Client("lm_eval_client.py", "lm-eval[api] transformers"),
    "openai-agents": Client("agents_client.py", "openai-agents"),
    "huggingface-hub": Client("huggingface_client.py", "huggingface_hub"),
    "openai-node": Client("node/openai.mjs", "openai", "npm"),
    "langchain-js": Client("node/langchain.mjs", "@langchain/openai @langchain/core zod", "npm"),
    "vercel-ai-sdk": Client(
        "node/ai_sdk.mjs", "ai @ai-sdk/openai @ai-sdk/openai-compatible @ai-sdk/anthropic zod", "npm"
    ),
    "open-webui": Client("open_webui_client.py", "open-webui"),
    "claude-code": Client("claude_code_client.py", "@anthropic-ai/claude-code", "npm", "random"),
    "codex": Client("codex_client.py", "@openai/codex", "npm", "random"),
}


def environment(name: str, client: Client) -> Path:
    """The folder of an environment that has what a client requires."""
    folder = (ENVIRONMENTS / name).absolute()
    stamp = folder / "requirement"
    if stamp.is_file() and stamp.read_text() == client.requirement:
        return folder
    packages = client.requirement.split()
    if client.source == "npm":
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "package.json").write_text("{}")
        subprocess.run(["npm", "install", "--silent", "--no-fund", "--no-audit", *packages], cwd=folder, check=True)
    else:
        # Without ensurepip, as in the Makefile: Debian's python3 without python3-venv is enough.
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
        python = folder / "bin" / "python"
        subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *packages], check=True)
    stamp.write_text(client.requirement)
    return folder


def version(folder: Path, client: Client) -> str:
    """The version of a client's first package."""
    if client.source == "npm":
        package = folder / "node_modules" / client.requirement.split()[0] / "package.json"
        return str(json.loads(package.read_text())["version"])
    package_name = client.requirement.split()[0].partition("[")[0].partition(">")[0]
    ask = f"import importlib.metadata as m; print(m.version({package_name!r}))"
    return subprocess.check_output([folder / "bin" / "python", "-c", ask], text=True).strip()


def command(folder: Path, client: Client) -> list[str]:
    """Command line that runs a client's script."""
    script = (HERE / client.script).absolute()
    if script.suffix == ".mjs":
        # Node looks for packages beside a script, wherever it is run.
        return ["node", str(shutil.copy(script, folder / script.name))]
    return [sys.executable if client.source == "npm" else str(folder / "bin" / "python"), str(script)]


def run(chosen: list[str], folders: dict[str, Path], work: Path, base_url: str, tokenizer: Path) -> list[str]:
    """Run clients against a server; returns the names of those that failed."""
    failed = []
    for name in chosen:
        client, folder, home = CLIENTS[name], folders[name], work / name
        home.mkdir()
        variables = {
            "BASE_URL": base_url,
            "MODEL": EMBEDDED_MODEL,
            "TOKENIZER": str(tokenizer),
            "NO_PROXY": "127.0.0.1",
            "HOME": str(home),
            "PATH": f"{folder / 'node_modules' / '.bin'}:{os.environ['PATH']}",
        }
        started = time.monotonic()
        try:
            done = subprocess.run(
                command(folder, client), env={**os.environ, **variables}, cwd=home, timeout=LIMIT_S, check=False
            )
            result = "ok" if done.returncode == 0 else "FAILED"
        except subprocess.TimeoutExpired:
            result = "FAILED (it did not end)"
        print(f"{name} {version(folder, client)}: {result} ({time.monotonic() - started:.0f} s)", flush=True)
        failed += [] if result == "ok" else [name]
    return failed


def main() -> int:
    """Exit status 0 when every client did what its script asks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)} (default: all)")
    chosen = parser.parse_args().clients or list(CLIENTS)
    if any(CLIENTS[name].source == "npm" for name in chosen) and shutil.which("npm") is None:
        print("Some of these clients are installed with npm, which is not here; name others.", file=sys.stderr)
        return 1
    folders = {name: environment(name, CLIENTS[name]) for name in chosen}
    checkpoint = resolve_checkpoint(EMBEDDED_MODEL, default_cache_dir(), lambda stage, fraction: None)
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        random = ["--config", str(write_random_model(work / "random", checkpoint, brief=True))]
        for model, arguments in (("embedded", []), ("random", random)):
            names = [name for name in chosen if CLIENTS[name].model == model]
            if names:
                with start_server(work / f"{model}.log", *arguments, eager=False) as server:
                    failed += run(names, folders, work, server.base_url, checkpoint)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
