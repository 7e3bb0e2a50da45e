"""make test-clients: what people use in front of OpenAI's and Anthropic's APIs, each in an environment of its own.

Starts the server with the embedded model, then runs one script per client against it. Environments are kept in
.clients/ and made anew when a requirement changes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from server.checkpoint.source import resolve_checkpoint
from server.config import EMBEDDED_MODEL, default_cache_dir
from tests.conftest import start_server

HERE = Path(__file__).parent
ENVIRONMENTS = Path(".clients")
CLIENTS = {
    "openai2": ("openai_client.py", "openai>=2,<3"),
    "openai3": ("openai_client.py", "openai>=3,<4"),
    "anthropic": ("anthropic_client.py", "anthropic"),
    "langchain": ("langchain_client.py", "langchain-openai"),
    "litellm": ("litellm_client.py", "litellm"),
    "instructor": ("instructor_client.py", "instructor"),
    "pydantic-ai": ("pydantic_ai_client.py", "pydantic-ai-slim[openai]"),
    "llm": ("llm_client.py", "llm"),
    "lm-eval": ("lm_eval_client.py", "lm-eval[api] transformers"),
}


def environment(name: str, requirement: str) -> Path:
    """The Python of an environment that has the requirement (several: separated by spaces)."""
    folder = ENVIRONMENTS / name
    python, stamp = folder / "bin" / "python", folder / "requirement"
    if not stamp.is_file() or stamp.read_text() != requirement:
        # Without ensurepip, as in the Makefile: Debian's python3 without python3-venv is enough.
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *requirement.split()]
        subprocess.run(pip, check=True)
        stamp.write_text(requirement)
    return python


def main() -> int:
    """Exit status 0 when every client did what its script asks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)} (default: all)")
    chosen = parser.parse_args().clients or list(CLIENTS)
    pythons = {name: environment(name, CLIENTS[name][1]) for name in chosen}
    failed = []
    with tempfile.TemporaryDirectory() as folder, start_server(Path(folder) / "log") as server:
        checkpoint = resolve_checkpoint(EMBEDDED_MODEL, default_cache_dir(), lambda stage, fraction: None)
        variables = {
            "BASE_URL": server.base_url,
            "MODEL": EMBEDDED_MODEL,
            "TOKENIZER": str(checkpoint),
            "NO_PROXY": "127.0.0.1",
        }
        for name, python in pythons.items():
            home = Path(folder) / name
            home.mkdir()
            started = time.monotonic()
            done = subprocess.run(
                [python.absolute(), (HERE / CLIENTS[name][0]).absolute()],
                env={**os.environ, **variables, "HOME": str(home)}, cwd=home, timeout=600, check=False,
            )  # fmt: skip
            result = "ok" if done.returncode == 0 else "FAILED"
            print(f"{name}: {result} ({time.monotonic() - started:.0f} s)", flush=True)
            failed += [name] if done.returncode else []
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
