"""A whole model's state from mesh to mesh, 4 -> 3 -> 4 -> 2 of 6 ranks: bytes and the least, bit for bit."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import shardwright as sw
from shardwright.testing import RankPool

_WORLD = 6
_MESHES: dict[str, tuple[list[Any], tuple[str, ...]]] = {
    "4 ranks": ([0, 1, 2, 3], ("dp",)),
    "3 ranks, one of the 4": ([3, 4, 5], ("tp",)),
    "2 x 2 ranks": ([[5, 4], [1, 0]], ("dp", "tp")),
    "2 ranks": ([2, 5], ("tp",)),
}


@dataclass(frozen=True)
class Hop:
    """What one rank saw of the move to one mesh.

    sent: bytes, counted as they leave. least: what the rank wants and does not hold, by a count of every
    element. batches: of messages. whole: the largest buffer for one tensor, where the rank owns a part of it.
    """

    sent: int
    least: int
    batches: int
    equal: bool
    whole: float


def run() -> None:
    """Print one line per move."""
    spec = model_state()
    size = sum(x.numel() * x.element_size() for x in spec.values())
    print(
        f"{len(spec)} tensors, {size:,} B; every placement in turn, all tensors of a move packed together\n"
    )
    print(f"{'to':<24} {'B':>10} {'least B':>10} {'ratio':>6} {'batches':>8} {'equal':>6} {'largest buffer'}")
    with RankPool() as pool:
        seen: list[list[Hop]] = pool.run(_WORLD, chain, spec, timeout=500)
    wrong = [not _printed(name, hops) for name, *hops in zip(list(_MESHES)[1:], *seen, strict=True)]
    print("\nlargest buffer: of a tensor that moves alone, on ranks that own a part of it, as a part of it")
    if any(wrong):
        raise SystemExit("a move was not what was promised")


def _printed(name: str, hops: list[Hop]) -> bool:
    """Print one move as all ranks saw it. Returns: whether it is what was promised."""
    moved, least = sum(hop.sent for hop in hops), sum(hop.least for hop in hops)
    equal, whole = all(hop.equal for hop in hops), max(hop.whole for hop in hops)
    numbers = f"{moved:>10,} {least:>10,} {moved / least:>6.3f} {max(hop.batches for hop in hops):>8}"
    print(f"{name:<24} {numbers} {equal!s:>6} {whole:>14.2f}")
    return moved == least and equal and whole < 1


def model_state() -> dict[str, torch.Tensor]:
    """The state of a small language model: transformers' Llama if it is installed, else one of torch."""
    torch.manual_seed(0)
    if importlib.util.find_spec("transformers") is None:
        layer = torch.nn.TransformerEncoderLayer(64, 4, 176, batch_first=True)
        model = torch.nn.Sequential(torch.nn.Embedding(512, 64), torch.nn.TransformerEncoder(layer, 2))
        return dict(model.state_dict())
    llama: Any = importlib.import_module("transformers")
    config = llama.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4
    )
    return dict(llama.LlamaForCausalLM(config).state_dict())


def chain(spec: dict[str, torch.Tensor]) -> list[Hop]:
    """All moves on this rank."""
    meshes = [DeviceMesh("cpu", ranks, mesh_dim_names=axes) for ranks, axes in _MESHES.values()]
    state = {
        name: sw.distribute_tensor(x, meshes[0], placements_for(i, x, meshes[0]), src_data_rank=None)
        for i, (name, x) in enumerate(spec.items())
    }
    hops: list[Hop] = []
    for turn, mesh in enumerate(meshes[1:], 1):
        targets = {name: placements_for(i + 3 * turn, x, mesh) for i, (name, x) in enumerate(spec.items())}
        with sw.trace() as trace:
            moved = sw.redistribute_many(state, mesh, targets)
        hops.append(_seen(state, moved, spec, trace))
        state = moved
    return hops


def placements_for(turn: int, x: torch.Tensor, mesh: DeviceMesh) -> list[sw.Placement]:
    """Every placement in turn, another one on each axis."""
    n = mesh.size(0)
    kinds: list[sw.Placement] = [
        sw.Shard(0),
        sw.Replicate(),
        sw.Interleaved(0, 2),
        sw.Ragged([1, *[2] * (n - 1)]),
        sw.Owner(n - 1),
        sw.ZigZag(0),
        sw.BlockCyclic(0, 3),
        sw.Shard(x.dim() - 1),
        sw.Ragged([3, *[1] * (n - 1)], tuple(range(x.dim()))),
    ]
    return [kinds[turn % len(kinds)], *(sw.Shard(0) for _ in range(mesh.ndim - 1))]


def _seen(
    before: dict[str, sw.DTensor], after: dict[str, sw.DTensor], spec: dict[str, torch.Tensor], trace: Any
) -> Hop:
    pairs = [(sw.layout_of(before[name]), sw.layout_of(after[name])) for name in spec]
    rank = dist.get_rank()
    whole = [_largest(before[name], after[name]) for name in spec]
    return Hop(
        sent=trace.bytes,
        least=sum(_missing(*pair, rank) for pair in pairs),
        batches=len(trace.collectives),
        equal=all(_equal(after[name], full) for name, full in spec.items()),
        whole=max(whole),
    )


def _missing(source: sw.Layout, target: sw.Layout, rank: int) -> int:
    held, wanted = (_mask(layout, rank) for layout in (source, target))
    return int((wanted & ~held).sum()) * source.itemsize


def _mask(layout: sw.Layout, rank: int) -> torch.Tensor:
    mask = torch.zeros(layout.shape, dtype=torch.bool)
    if rank in layout.ranks:
        for box in layout.region(layout.coords_of(rank)).boxes:
            mask[box.slices] = True
    return mask


def _equal(x: sw.DTensor, full: torch.Tensor) -> bool:
    rank = dist.get_rank()
    if rank not in sw.layout_of(x).ranks:
        return x.to_local().numel() == 0
    return torch.equal(x.to_local(), sw.layout_of(x).split(full, sw.layout_of(x).coords_of(rank)))


class _Storages(TorchDispatchMode):
    """Remembers the largest memory that any op inside made or used."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in tree_flatten(out)[0]:
            if type(made) is torch.Tensor:
                self.largest = max(self.largest, made.untyped_storage().nbytes() // made.element_size())
        return out


def _largest(before: sw.DTensor, after: sw.DTensor) -> float:
    """The largest buffer while one tensor moves, as a part of the tensor; 0 on a rank that owns all of it."""
    with _Storages() as seen:
        before.redistribute(after.device_mesh, after.placements)
    owned = max(before.to_local().numel(), after.to_local().numel())
    return 0.0 if owned == before.numel() else seen.largest / before.numel()


if __name__ == "__main__":
    run()
