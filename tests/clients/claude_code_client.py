"""Claude Code, not interactive, on its defaults but for where and which the model is, and how long its answers are."""

import os
import subprocess

variables = {
    "ANTHROPIC_BASE_URL": os.environ["BASE_URL"],
    "ANTHROPIC_API_KEY": "none",
    "ANTHROPIC_MODEL": os.environ["MODEL"],
    # Of the 32000 tokens that are the default, a model with random weights would write every one.
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "2000",
}
done = subprocess.run(
    ["claude", "-p", "What is the capital of France?"],
    env={**os.environ, **variables}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500, check=False,
)  # fmt: skip
assert done.returncode == 0, done
assert "API Error" not in done.stdout, done
