"""Codex CLI, not interactive, on its defaults but for where and which the model is."""

import os
import pathlib
import subprocess

config = pathlib.Path.home() / ".codex" / "config.toml"
config.parent.mkdir(exist_ok=True)
config.write_text(
    f"""model = "{os.environ["MODEL"]}"
model_provider = "nf4"
[model_providers.nf4]
name = "nf4-server"
base_url = "{os.environ["BASE_URL"]}/v1"
wire_api = "responses"
"""
)
done = subprocess.run(
    ["codex", "exec", "--skip-git-repo-check", "What is the capital of France?"],
    stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500, check=False,
)  # fmt: skip
assert done.returncode == 0, done
assert "tokens used" in done.stdout + done.stderr, done
