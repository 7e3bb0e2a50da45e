"""Open WebUI's server: the list of models, a streamed chat, its advanced settings, and the title that it asks for."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

MODEL, HOME = os.environ["MODEL"], os.environ["HOME"]
ASK = [{"role": "user", "content": "What is the capital of France?"}]
# As the page's settings name them. The server's own machine is what half of them are about.
SETTINGS = {
    "max_tokens": 8, "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "seed": 7, "stop": ["END"],
    "repeat_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1, "logit_bias": "5:1", "reasoning_effort": "low",
    "num_ctx": 8192, "num_keep": 4, "num_batch": 256, "num_thread": 2, "num_gpu": 0, "keep_alive": "5m",
    "use_mmap": True, "use_mlock": False,
}  # fmt: skip

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
variables = {
    "OPENAI_API_BASE_URLS": os.environ["BASE_URL"] + "/v1",
    "OPENAI_API_KEYS": "none",
    "DATA_DIR": HOME,
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "secret",
    "ENABLE_OLLAMA_API": "False",
    # Nothing is fetched: embeddings of documents would be computed by a model from the hub.
    "OFFLINE_MODE": "True",
    "HF_HUB_OFFLINE": "1",
    "RAG_EMBEDDING_ENGINE": "openai",
}
command = [Path(sys.executable).with_name("open-webui"), "serve", "--host", "127.0.0.1", "--port", str(port)]
with Path(HOME, "open-webui.log").open("w") as log:
    served = subprocess.Popen(command, env={**os.environ, **variables}, stdout=log, stderr=subprocess.STDOUT)
try:
    page = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300, trust_env=False)
    for _ in range(300):
        try:
            if page.get("/health").status_code == 200:
                break
        except httpx.TransportError:
            assert served.poll() is None, Path(HOME, "open-webui.log").read_text()[-2000:]
        time.sleep(1)
    token = page.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()["token"]
    page.headers["authorization"] = f"Bearer {token}"
    assert [model["id"] for model in page.get("/api/models").json()["data"]] == [MODEL]

    def ask(path: str, **options: Any) -> str:
        answer = page.post(path, json={"model": MODEL, "messages": ASK, **options})
        assert answer.status_code == 200, answer.text
        return answer.text

    streamed = ask("/api/chat/completions", stream=True, params={"max_tokens": 8})
    assert '"finish_reason":"length"' in streamed, streamed
    assert streamed.rstrip().endswith("data: [DONE]"), streamed
    assert ask("/api/chat/completions", stream=True, params=SETTINGS).rstrip().endswith("data: [DONE]")
    assert '"choices"' in ask("/api/chat/completions", stream=False, max_tokens=8)
    # Where the page has no title from the model, it takes the question; what counts is that the request was answered.
    assert '"choices"' in ask("/api/v1/tasks/title/completions")
finally:
    served.terminate()
    served.wait(30)
