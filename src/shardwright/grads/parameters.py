"""Which parameters a call is about, with names for its errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import DisableTorchFunctionSubclass
from shardwright.compat.fully_shard.parameters import gathered_by_units
from shardwright.errors import ParallelError

Parameters = nn.Module | Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]]


def named_parameters(parameters: Parameters) -> dict[str, Tensor]:
    """Return {name: parameter} of a module, one tensor, tensors, or (name, tensor) pairs; tied ones once.

    Tensors without a name are called by their position and shape. Raises: ParallelError: they are none of it,
    or in a set.
    """
    if isinstance(parameters, nn.Module):
        return _of_module(parameters)
    if isinstance(parameters, Tensor | type) or not isinstance(parameters, Iterable):
        parameters = [parameters]  # a class may have what makes its objects iterable
    if isinstance(parameters, set | frozenset):
        raise ParallelError(_SET)
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for position, item in enumerate(parameters):
        named_one = isinstance(item, tuple) and len(item) == 2
        name, tensor = item if named_one else (_position_text(position, item), item)
        if not isinstance(tensor, Tensor):
            raise ParallelError(f"{item!r:.60} is no module, no tensor, and no pair of a name and a tensor")
        if id(tensor) not in seen:
            named[name] = tensor
        seen.add(id(tensor))
    return named


_SET = (
    "parameters in a set: it has another order on each rank, and gradients are added up in this order\n"
    "  fix: a list, such as list(module.parameters()), or the module"
)


def _of_module(module: nn.Module) -> dict[str, Tensor]:
    """As `named_parameters` of the module, whose generators one inside the other take ten times as long."""
    own = type(module)
    if (own.named_parameters, own.named_modules) != (nn.Module.named_parameters, nn.Module.named_modules):
        return dict(module.named_parameters())
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    left: list[tuple[str, nn.Module]] = [("", module)]
    while left:
        prefix, part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                named[prefix + name] = parameter
        below = [(f"{prefix}{name}.", child) for name, child in part._modules.items() if child is not None]
        left += below[::-1]
    return named


def trainable(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those that need a gradient. Asked below the class: of a DTensor torch's own way takes a microsecond."""
    with DisableTorchFunctionSubclass():
        return {name: tensor for name, tensor in named.items() if tensor.requires_grad}


def refuse_gathered(named: Mapping[str, Tensor]) -> None:
    """Raise ParallelError for what a sharded unit has gathered, and not freed after its backward.

    The gradients of its parts are wrong then: torch ends a unit's backward with that of the first nested one.
    """
    plain = {name: tensor for name, tensor in named.items() if not isinstance(tensor, TorchDTensor)}
    held = gathered_by_units() if plain else set()
    wrong = [name for name, tensor in plain.items() if id(tensor) in held]
    if wrong:
        raise ParallelError(
            f"{name_list(wrong)}: gathered still by a sharded unit, whose backward has not ended: torch sees "
            "no end where the unit is called several times, each in a reentrant checkpoint, nor after an "
            "error\n"
            "  fix: checkpoint(..., use_reentrant=False); after an error, zero_grad() and a forward first"
        )


def that_may_have_gradients(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those that need a gradient or may have one from before they were frozen: equal on all ranks."""
    with DisableTorchFunctionSubclass():
        return {
            name: tensor
            for name, tensor in named.items()
            if tensor.requires_grad or tensor.is_floating_point() or tensor.is_complex()
        }


def name_list(names: Sequence[str]) -> str:
    """Return the first four names, and how many more there are."""
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def _position_text(position: int, tensor: object) -> str:
    """Return a name for a tensor that has none."""
    shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else ()
    return f"parameter {position} of shape {shape}"
