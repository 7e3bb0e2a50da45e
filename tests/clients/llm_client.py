"""llm, the command: a model named in its settings, whole and streamed, and a schema."""

import os
import subprocess
import sys
from pathlib import Path

home = Path(os.environ["HOME"])
os.environ["LLM_USER_PATH"] = str(home)
(home / "extra-openai-models.yaml").write_text(
    f"- model_id: local\n  model_name: {os.environ['MODEL']}\n  api_base: {os.environ['BASE_URL']}/v1\n"
    "  supports_schema: true\n"
)


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "llm", "-m", "local", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


question = ["What is the capital of France?", "-o", "temperature", "0", "-o", "max_tokens", "20"]
assert "Paris" in run(*question)
assert run(*question) == run("--no-stream", *question)
formed = run("--schema", "age int", "A pet.", "-o", "max_tokens", "60", "-o", "temperature", "0")
assert formed.lstrip().startswith("{")
