"""One operator on views in awkward memory, on one device and on DTensors: values, memory, writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map_only

import shardwright as sw
from tests.memory.forms import lain
from tests.ops.compare import difference
from tests.ops.placing import place, placements_for

KINDS = ("Replicate", "Shard(0)", "Shard(-1)", "uneven")
Place = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Seen:
    """What a program saw: each entry `(what, value)`; tensors are whole and copied."""

    entries: list[tuple[str, Any]] = field(default_factory=list)
    error: Exception | None = None

    def note(self, what: str, value: Any) -> None:
        self.entries.append((what, tree_map_only(torch.Tensor, _copied, value)))


def _copied(x: torch.Tensor) -> torch.Tensor:
    whole = x.full_tensor() if isinstance(x, sw.DTensor) else x
    return whole.detach().resolve_conj().resolve_neg().clone()


def placing(kind: str, mesh: DeviceMesh) -> Place:
    """How a base becomes a DTensor."""
    return lambda x: place(x, mesh, placements_for(kind, x, mesh, mixed=False))


def observe(
    operator: Callable[..., Any], arguments: Any, form: str, put: Place, alike: Callable[[str], bool]
) -> Seen:
    """Run the operator on views of bases; note results, their memory, and what writes do.

    put: what makes of a base the tensor that is viewed. alike: whether all ranks say the same.
    """
    bases: list[torch.Tensor] = []
    known: dict[int, torch.Tensor] = {}

    def operand(x: torch.Tensor) -> torch.Tensor:
        if id(x) not in known:
            base, view = lain(x.detach(), form)
            bases.append(put(base))
            known[id(x)] = view(bases[-1])
        return known[id(x)]

    seen = Seen()
    with torch.no_grad():
        x, args, kwargs = tree_map_only(torch.Tensor, operand, arguments)
        for index, value in enumerate(known.values()):
            seen.note(f"memory of operand {index}", memory(value))
        torch.manual_seed(11)
        try:
            out = operator(x, *args, **kwargs)
        except Exception as error:  # noqa: BLE001
            seen.error = error
        if not alike("" if seen.error is None else type(seen.error).__name__) or seen.error is not None:
            seen.error = seen.error or RuntimeError("an error on another rank")
            return seen
        seen.note("value", out)
        seen.note("bases after the call", bases)
        _written(seen, [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)], bases)
    return seen


def memory(x: torch.Tensor) -> tuple[Any, ...]:
    """What torch's own code asks of a tensor's memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return (tuple(x.stride()), x.storage_offset() if x.numel() else 0, x.is_contiguous())


def _written(seen: Seen, results: list[torch.Tensor], bases: list[torch.Tensor]) -> None:
    """Write each result, look at the bases; write the bases, look at the results."""
    for index, leaf in enumerate(results):
        seen.note(f"memory of result {index}", memory(leaf))
    for index, leaf in enumerate(results):
        seen.note(f"write {index}", _tried(lambda leaf=leaf, index=index: leaf.fill_(index % 2)))
    seen.note("bases after writes into results", bases)
    for base in bases:
        seen.note("write a base", _tried(lambda base=base: base.logical_not_()))
    seen.note("results after writes into bases", results)


def _tried(write: Callable[[], Any]) -> str:
    try:
        write()
    except RuntimeError:
        return "refused"
    return ""


def differs(got: Seen, wanted: Seen) -> str:
    """The first thing that one device sees otherwise; empty if none."""
    for (what, g), (_, w) in zip(got.entries, wanted.entries, strict=False):
        text = difference(g, w) if not what.startswith(("memory", "write ")) else _unlike(g, w)
        if text:
            return f"{what}: {text}"
    return ""


def _unlike(got: Any, wanted: Any) -> str:
    return "" if got == wanted else f"{got} for {wanted}"
