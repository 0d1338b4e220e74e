"""What an op is by its schema and torch's marks: asked once of an op, by whoever runs it or states a rule."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.remember import remembered
from shardwright.rules.call import Args, Kwargs, Op

# Their kernels are those of views, and what is written into a result is written into the operand; the schema
# does not say it, so that autograd does not ask.
_VIEWS_UNSAID = frozenset({"aten::_unsafe_view", "aten::unsafe_split", "aten::unsafe_split_with_sizes"})
# Element by element, although torch does not mark it so.
_UNMARKED = frozenset({"aten::floor_divide_", "aten::floor_divide"})
_LISTS = ("aten::_foreach_", "aten::_fused_")


def by_name(op: Op, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """The arguments that a call gives, by name, in the order of the schema."""
    given = {**dict(zip((a.name for a in op._schema.arguments), args, strict=False)), **kwargs}
    return {a.name: given[a.name] for a in op._schema.arguments if a.name in given}


@remembered(4096)
def copies(op: Op) -> bool:
    """Are its results new tensors: `view_copy`, `split_copy`, ..., and whatever is no view?"""
    said = any(result.alias_info is not None for result in op._schema.returns)
    return not said and op._schema.name not in _VIEWS_UNSAID


def is_collective(op: Op) -> bool:
    """Is it an op of a process group, which writes what it is given and does not say so?"""
    return bool(op.namespace == "c10d")


@remembered(4096)
def is_view(op: Op) -> bool:
    """Do the op's results alias its first argument, which it does not write?"""
    infos = [result.alias_info for result in op._schema.returns]
    return not copies(op) and not any(info is not None and info.is_write for info in infos)


def writes_elements(op: Op) -> bool:
    """Does the op write, and not only change sizes and strides?"""
    return bool(op._schema.is_mutable) and torch.Tag.inplace_view not in op.tags


@remembered(4096)
def out_names(op: Op) -> tuple[str, ...]:
    """The arguments that the op only writes."""
    return tuple(a.name for a in op._schema.arguments if a.is_out)


@remembered(4096)
def functional_form(op: Op) -> Op | None:
    """The overload that computes what `op` writes in place or into `out`, from the same arguments."""
    namespace, _, name = op._schema.name.partition("::")
    outs = out_names(op)
    if not outs and not (name.endswith("_") and not name.endswith("__")):
        return None
    packet = getattr(getattr(torch.ops, namespace), name if outs else name[:-1], None)
    taken = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]
    for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
        found: Op = getattr(packet, overload)
        arguments = found._schema.arguments
        same = [(a.name, str(a.type)) for a in arguments[: len(taken)]] == taken
        rest = arguments[len(taken) :]
        if same and not any(a.is_out for a in arguments) and all(a.has_default_value() for a in rest):
            return found
    return None


@remembered(4096)
def is_pointwise(op: Op) -> bool:
    """Does the op go element by element? Of many in-place forms torch marks only the plain form."""
    plain = functional_form(op)
    marked = torch.Tag.pointwise in op.tags or (plain is not None and torch.Tag.pointwise in plain.tags)
    return marked or op._schema.name in _UNMARKED


@remembered(4096)
def list_arguments(op: Op) -> tuple[str, ...]:
    """The arguments of the op that are lists of tensors; empty: it does not do one thing per position."""
    if not op._schema.name.startswith(_LISTS):
        return ()
    return tuple(a.name for a in op._schema.arguments if "List[Tensor]" in str(a.type))


@remembered(4096)
def is_per_element(op: Op) -> bool:
    """Does the op do one thing to each element of its tensor lists, of which the first argument is one?"""
    return op._schema.arguments[0].name in list_arguments(op)[:1] if op._schema.arguments else False
