"""Runs code in Triton's interpreter, which needs no GPU, or with its compiler, each in a process of its own.

The processes are forks of one that has imported torch and transformers, which takes seconds.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

_FORKS = """
import json, os, sys, tempfile, traceback
import torch, transformers.modeling_utils, triton
for line in sys.stdin:
    with tempfile.TemporaryFile("w+") as output:
        if not (child := os.fork()):
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            status = 1
            try:
                exec(compile(json.loads(line), "<code of a test>", "exec"), {"__name__": "__main__"})
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        print(json.dumps([status, output.read()[-6000:]]), flush=True)
"""


@functools.cache
def _forks(interprets: bool) -> subprocess.Popen[str]:
    """A process that runs each line of its input, code in JSON, in a fork. It ends with its input, as this process ends."""
    # Triton reads the variable when it is imported.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interprets:
        environment["TRITON_INTERPRET"] = "1"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", _FORKS], env=environment, text=True, **pipes)


def run_forked(code: str, *, interprets: bool) -> None:
    """Run code in a new process. Raises AssertionError with its output if it fails."""
    process = _forks(interprets)
    assert process.stdin is not None
    assert process.stdout is not None
    answer = ""
    try:
        process.stdin.write(json.dumps(code) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    finally:
        if not answer:  # it has ended, or this test may wait no longer
            process.kill()
            process.wait()
            _forks.cache_clear()
    assert answer, "the process that forks has ended"
    status, output = json.loads(answer)
    assert status == 0, f"ended with {status}\n{output}"


def run_interpreted(code: str) -> None:
    """Run code in a new process, where Triton interprets its kernels. Raises AssertionError with its output if it fails."""
    run_forked(code, interprets=True)
