"""The calls of a table, made on tensors without memory: what they would do, and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.errors import ParallelError, ShardwrightError
from shardwright.parallel.table.calls import Call
from shardwright.parallel.table.meshes import Axes
from shardwright.parallel.table.rows import refuse
from shardwright.parallel.table.words import DATA
from shardwright.tensor.modules.distribute import carry_over
from shardwright.tensor.modules.same_model import compared_before
from shardwright.tensor.modules.slots import slots_of, unchanged_on_error
from shardwright.tensor.wrap import as_ours, wrap

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Placed:
    """What becomes of one parameter.

    Args:
        by: the strategies that place it, in order.
        elements: of the whole.
        bytes: of the whole, and of what this rank holds.
    """

    name: str
    by: tuple[str, ...]
    elements: int
    bytes: int
    local_bytes: int


class _Over(Exception):  # noqa: N818 - no error: the rehearsal is over, and the module is put back
    pass


def rehearse(module: nn.Module, calls: Sequence[Call], axes: Axes) -> list[Placed]:
    """Make the calls on meta tensors, and put the module back as it was. Sends nothing.

    Raises: ParallelError: a call cannot be made, or a parameter is left that nothing places.
    """
    placed: list[Placed] = []
    try:
        with unchanged_on_error(module):
            _to_meta(module)
            by: dict[str, list[str]] = {name: [] for name, _ in module.named_parameters()}
            for call in calls:
                _make(call, module, by)
            refuse(_unplaced(module, calls, axes))
            placed = [_placed(name, p, by.get(name, [])) for name, p in module.named_parameters()]
            raise _Over
    except _Over:
        return placed


def _to_meta(module: nn.Module) -> None:
    made: dict[nn.Parameter, nn.Parameter] = {}
    for slot in slots_of(module):
        old = slot.get()
        if old not in made:
            made[old] = nn.Parameter(_meta(old), requires_grad=old.requires_grad)
            carry_over(old, made[old])
        slot.put(made[old])
    for child in module.modules():
        child._buffers.update({name: _meta(b) for name, b in child._buffers.items() if b is not None})


def _meta(x: torch.Tensor) -> torch.Tensor:
    if isinstance(x, TorchDTensor):
        ours = as_ours(x)
        return wrap(ours._local_tensor.detach().to("meta"), ours._spec)
    return x.detach().to("meta")


def _make(call: Call, module: nn.Module, by: dict[str, list[str]]) -> None:
    before = dict(module.named_parameters())
    try:
        with compared_before():  # ranks may fail one by one here, and tell each other afterwards
            call.apply()
    except ShardwrightError as error:
        where = f" of {call.path!r}" if call.path else ""
        refuse([f"{call.row}, {call.strategy}{where}: {error}"])
    for name, parameter in module.named_parameters():
        if parameter is not before.get(name):
            by.setdefault(name, []).append(call.strategy)


def _placed(name: str, parameter: nn.Parameter, by: Sequence[str]) -> Placed:
    size = parameter.element_size()
    local = as_ours(parameter)._local_tensor if isinstance(parameter, TorchDTensor) else parameter
    told = tuple(dict.fromkeys(by))
    return Placed(name, told, parameter.numel(), parameter.numel() * size, local.numel() * size)


def _unplaced(module: nn.Module, calls: Sequence[Call], axes: Axes) -> list[str]:
    """Parameters that nothing places, or nothing over the ranks that read other data."""
    named = list(module.named_parameters())
    nowhere = [name for name, p in named if not isinstance(p, TorchDTensor)]
    partly = [name for name, p in named if isinstance(p, TorchDTensor) and not axes.cover_data(p.device_mesh)]
    used: Mapping[str, str] = {call.row.strategy: str(call.row) for call in calls}
    strategy = next((name for name in DATA if name in used), "hsdp" if len(axes.data) > 1 else "fsdp")
    fix = f'\n    fix: a row for them, or for all that no row names: "" = "{strategy}"' + (
        "" if strategy == "replicate" else '; small ones "replicate"'
    )
    found = []
    if nowhere:
        found.append(f"nothing places {_list(nowhere)}{fix}")
    if partly:
        found.append(
            f"nothing places {_list(partly)} over {' x '.join(axes.data)}, whose {axes.data_ranks} ranks "
            f"read other data: nobody would sum their gradients{fix}"
        )
    return found


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def check_new(module: nn.Module) -> None:
    """Raise ParallelError for a model on the meta device in part only: half of it would be lost."""
    meta = [name for name, p in module.named_parameters() if p.is_meta]
    made = [name for name, p in module.named_parameters() if not p.is_meta]
    if meta and made:
        raise ParallelError(
            f"parallelize: {_list(made)} has values, and {_list(meta)} is on the meta device; make all of "
            'the model inside of torch.device("meta"), or none of it (what a constructor makes by '
            'torch.Tensor(n) has values there too: model.to("meta") then)'
        )
