"""The arguments of a call: their leaves, and what a recording holds for them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.erased.containers import nodes_of, taken_apart
from shardwright.erased.owners import is_the_users
from shardwright.erased.walk import SCALARS, local_of
from shardwright.tensor.dtensor import DTensor

_DIRECT = (torch.Tensor, *SCALARS)
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_EXACT = frozenset({bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size})


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """Leaves and structure; torch's own flattening only where something contains something."""
    leaves = [*args, *kwargs.values()]
    for leaf in leaves:
        if not isinstance(leaf, _DIRECT):
            return taken_apart((args, kwargs))
    return leaves, (len(args), *kwargs)


def kinds_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[type]:
    """The classes of the arguments and of what holds them: leaves do not say who gave them."""
    return [*dict.fromkeys(map(type, nodes_of((args, kwargs))))]


def found(where: int | torch.Tensor, leaves: list[Any]) -> Any:
    """The leaf of the arguments with this number, or the tensor itself."""
    return leaves[where] if isinstance(where, int) else where


def signature(leaves: list[Any]) -> tuple[Any, ...]:
    """What must be the same of the arguments: two calls with equal signatures run the same local program.

    Layouts by their tokens, strides of local tensors, dtypes, `requires_grad`, values of scalars, and which
    tensors share memory. Equal on all ranks where the program is, but for plain tensors of a rank's own size.
    """
    return (*map(_of_leaf, leaves), _sharing(leaves))


def _of_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        told = (*of_tensor(leaf), "hooks") if hooked(leaf) else of_tensor(leaf)
        return (*told, *((name, _of_value(x)) for name, x in hung_on(leaf).items())) if vars(leaf) else told
    return _of_value(leaf)


def _of_value(value: Any) -> tuple[Any, ...]:
    """Of a number or text what it is; of anything else, and of a number with attributes, which object."""
    if type(value) in _EXACT:
        return type(value), value
    if isinstance(value, SCALARS) and not hasattr(value, "__dict__"):
        return type(value), repr(value)  # of -0.0 and nan too
    return object, id(value)  # held by the recording, so that no other one takes this id


def hung_on(x: torch.Tensor) -> dict[str, Any]:
    """What the program has hung on a tensor."""
    return {name: value for name, value in vars(x).items() if is_the_users(name)}


def objects_of(leaves: list[Any]) -> tuple[Any, ...]:
    """All whose `id` is in the signature."""
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    others = [x for x in leaves if not isinstance(x, torch.Tensor)]
    return (*others, *(value for x in tensors for value in hung_on(x).values()))


def hooked(x: torch.Tensor) -> bool:
    """Would a backward inside run hooks of this argument, which the next one may not have?"""
    return x.requires_grad and x.is_leaf and bool(x._backward_hooks or x._post_accumulate_grad_hooks)


def of_tensor(x: torch.Tensor) -> tuple[Any, ...]:
    """What a recording holds for of one tensor."""
    if isinstance(x, DTensor):
        local = x._local_tensor
        return type(x), x._spec.plain.token, local.stride(), x.requires_grad, x.is_leaf, _bits(local)
    if isinstance(x, TorchDTensor):
        return type(x), x._spec, x._local_tensor.stride(), x.requires_grad, x.is_leaf
    if without_strides(x):
        return type(x), x.layout, id(x), x.requires_grad, x.is_leaf
    return type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_leaf, _bits(x)


def without_strides(x: torch.Tensor) -> bool:
    """Is it nested, or sparse in one of the compressed forms?"""
    return x.is_nested or x.layout in _COMPRESSED


def _bits(x: torch.Tensor) -> tuple[bool, ...]:
    return x.is_conj(), x.is_neg(), x.is_inference()


def offsets(leaves: list[Any]) -> tuple[int, ...]:
    """Where each tensor begins in its storage: asked only by programs that name places of memory."""
    return tuple(int(local_of(x).storage_offset()) for x in leaves if isinstance(x, torch.Tensor))


def _sharing(leaves: list[Any]) -> tuple[Any, ...]:
    """Per tensor the first one of its storage: a write into one is a write into all of them.

    Of a further one also whether it is the same object, and else how far from the first it begins and
    whether it is a view of the same base, with which it shares the graph then.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if len(tensors) < 2:
        return ()
    first: dict[int, int] = {}
    found = tuple([first.setdefault(storage_of(x), place) for place, x in enumerate(tensors)])
    if len(first) == len(tensors):
        return found
    starts = [int(local_of(x).storage_offset()) for x in tensors]
    same = (tensors[at] is x for at, x in zip(found, tensors, strict=True))
    bases = [x._base if x._is_view() else x for x in tensors]
    one_base = (bases[at] is base for at, base in zip(found, bases, strict=True))
    return *found, *same, *one_base, *(start - starts[at] for start, at in zip(starts, found, strict=True))


def storage_of(x: torch.Tensor) -> int:
    """The storage of what this rank holds, as a number."""
    local = local_of(x)
    if local.layout is not torch.strided:
        return id(local)
    found: int = local.untyped_storage()._cdata
    return found
