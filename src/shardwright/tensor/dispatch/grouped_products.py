"""`_grouped_mm`, as its kernels have it: which types it takes, and how its operands lie in memory.

torch's function for tensors without data takes bfloat16 alone, the CPU's kernel float32 and float16 too.
Kernels want rows (or columns) that begin at multiples of 16 bytes; the parts of such an operand need not.
"""

from __future__ import annotations

import torch

_ALIGNMENT = 16  # bytes


def grouped_product(
    mat: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,  # noqa: ARG001  the signature is the op's
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The result without its data: one product per group, or one row of products, padded rows.

    Raises: RuntimeError: the contracted sizes differ, or groups are not given where they are needed.
    """
    if (mat.dim() == mat2.dim() == 3) is not (offs is None):
        dims = f"{mat.dim()} and {mat2.dim()} dims"
        raise RuntimeError(f"_grouped_mm: operands of {dims} {'need' if offs is None else 'take no'} offsets")
    if mat.shape[-1] != mat2.shape[-2]:
        raise RuntimeError(f"_grouped_mm: the contracted sizes {mat.shape[-1]} and {mat2.shape[-2]} differ")
    size = [mat.shape[-2], mat2.shape[-1]]
    if mat.dim() == mat2.dim():
        groups = mat.shape[0] if offs is None else offs.shape[0]
        size = [groups, *size]
    return _padded(mat, size, out_dtype or mat.dtype)


def grouped_mm(
    op: torch._ops.OpOverload,
    mat: torch.Tensor,
    mat2: torch.Tensor,
    *rest: torch.Tensor,
    **kwargs: torch.Tensor,
) -> torch.Tensor:
    """The op on operands that need not be aligned: those that are not are copied."""
    result: torch.Tensor = op(_aligned(mat), _aligned(mat2), *rest, **kwargs)
    return result


def _aligned(x: torch.Tensor) -> torch.Tensor:
    if any(_is_run(x, run, step) for run, step in ((-1, -2), (-2, -1))):
        return x
    return _padded(x, x.shape, x.dtype).copy_(x)


def _is_run(x: torch.Tensor, run: int, step: int) -> bool:
    """Do the elements of dim `run` lie side by side, each run at a multiple of the alignment?"""
    stride = x.stride(step)
    aligned = stride * x.element_size() % _ALIGNMENT == 0
    return aligned and x.stride(run) == 1 and stride >= max(1, x.shape[run])


def _padded(like: torch.Tensor, size: list[int] | torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor whose rows begin at multiples of the alignment."""
    unit = _ALIGNMENT // dtype.itemsize
    row = -(-size[-1] // unit) * unit
    return like.new_empty((*size[:-1], row), dtype=dtype)[..., : size[-1]]
