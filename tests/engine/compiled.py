"""Compiles Triton kernels for a GPU that need not be there: the interpreter runs what the compiler refuses."""

from __future__ import annotations

from tests.engine.interpreted import run_forked

_BEFORE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

class Target:
    # A driver of a GPU on which nothing runs.
    def get_current_target(self):
        return GPUTarget("cuda", {0[0]} * 10 + {0[1]}, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

driver.set_active(Target())
torch.cuda.get_device_capability = lambda device=None: {0}
run, shared_memory = JITFunction.run, {{}}

def compile_only(self, *args, grid, warmup, **options):
    kernel = run(self, *args, grid=grid, warmup=True, **options)
    shared_memory[self.__name__] = max(shared_memory.get(self.__name__, 0), kernel.metadata.shared)

JITFunction.run = compile_only
"""


def run_compiled(code: str, capability: tuple[int, int]) -> None:
    """Run code in a new process, where launches compile a kernel for a GPU of that compute capability and no more.

    Tensors may be on the CPU; their contents stay as they are. Afterwards `shared_memory` in the code has each kernel's
    largest need of it in bytes, by name. Raises AssertionError with its output if the code fails.
    """
    run_forked(_BEFORE.format(capability) + code, interprets=False)
