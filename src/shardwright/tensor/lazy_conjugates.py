"""Kernels that conjugate lazily inside: they need the dispatch key that resolves it.

Below `__torch_dispatch__` torch has excluded that key, for any subclass and any mode: a kernel that
multiplies by `x.conj()` of its own then multiplies by `x`. Found by comparing every operator of torch's
database with one device, in complex64; the others conjugate at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_CONJUGATE_INSIDE = frozenset({"aten::linalg_lstsq"})  # |residual| squared


def kernel_of(func: torch._ops.OpOverload, dtypes: set[torch.dtype]) -> Callable[..., Any] | None:
    """What to call in place of the op on operands of these dtypes; None: the op."""
    if func._schema.name not in _CONJUGATE_INSIDE or not any(dtype.is_complex for dtype in dtypes):
        return None
    key = torch._C.DispatchKey.Conjugate

    def call(*args: Any, **kwargs: Any) -> Any:
        before = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        try:
            return func(*args, **kwargs)
        finally:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, before)

    return call
