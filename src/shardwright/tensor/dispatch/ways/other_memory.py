"""`x.set_(source)`: the memory, the sizes and the layout of another DTensor, for the same tensor object."""

from __future__ import annotations

import torch

from shardwright.errors import RuleError
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.spec import spec_of
from shardwright.tensor.wrap import offset_of, reshaped, wrap

_SET = torch.ops.aten.set_


def set_source(func: Op, args: Args, kwargs: Kwargs) -> DTensor:
    """`x`, in the memory of `source` from here on, and laid out as that is.

    Raises: RuntimeError: of another dtype, as on one device. RuleError: `x` is a view, whose base would not
        know; the source is plain, or on another mesh.
    """
    x, source = (*args, *kwargs.values())
    if not isinstance(x, DTensor) or not isinstance(source, DTensor) or x.device_mesh != source.device_mesh:
        raise RuleError(f"{func.name()}: takes the memory of another DTensor on the same mesh\n  fix: {_FIX}")
    if x._is_view():
        raise RuleError(f"{func.name()}: x is a view, and its base would not follow\n  fix: {_FIX}")
    if x.dtype != source.dtype:
        raise RuntimeError(f"Could not set tensor of type {source.dtype} to a tensor of type {x.dtype}")
    local = source._local_tensor.detach()
    made = wrap(local, spec_of(source._spec.layout, x.device_mesh, x._spec.use), offset=offset_of(source))
    x.data = made  # what torch knows of sizes and strides
    x._local_tensor, x._spec = made._local_tensor, made._spec
    reshaped(x)
    return x


def refuse_storage(func: Op, _args: Args, _kwargs: Kwargs) -> DTensor:
    """Raises: RuleError: always."""
    raise RuleError(
        f"{func.name()}: a storage is memory of one device, of which nothing says who holds which part\n"
        "  fix: x.set_(source) of another DTensor; or x = DTensor.from_local(local, mesh, placements)"
    )


_FIX = "x.copy_(source), for its values; or source itself in place of x"
SETS = {getattr(_SET, name): refuse_storage for name in _SET.overloads()} | {_SET.source_Tensor: set_source}
