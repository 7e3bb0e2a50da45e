"""Operations of torch_ops.py as Triton kernels of one launch each."""

from server.engine.runtime.sampling.largest_kernel import largest_of_rows
from server.engine.runtime.sampling.option_kernels import mask_rows, penalize_rows
from server.engine.runtime.sampling.sample_kernel import sample_rows

__all__ = ["largest_of_rows", "mask_rows", "penalize_rows", "sample_rows"]
