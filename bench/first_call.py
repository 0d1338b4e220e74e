"""What the first call with a new shape costs: finding the rule and the layouts, ours beside torch's.

Each call has a shape that neither library has seen, so every cache misses in both. The two take turns; the
ratio is that of the medians, and ours against itself (other shapes, same run) says what the run can resolve.
The last columns are the same call once it is known, which no first call can go below.
One process that believes to be rank 0 (the `fake` backend): what is timed is deciding, one local kernel on a
few elements, and no communication but where the placements ask for it, which the fake backend does not do.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import tensor as theirs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwright as sw

_TURNS = {1: 60, 4: 15}
_REPEATS = 100
_BOUNDS = {1: 0.25, 4: 0.01}  # of torch's time
_Op = Callable[..., object]
# A placement per operand and axis, one letter each: a digit d is Shard(d), R Replicate, P Partial(sum).
_Placed = tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """One op: how its operands are made from a number that is new each time, and how they are placed."""

    name: str
    op: _Op
    shapes: Callable[[int], tuple[tuple[int, ...], ...]]
    placed: dict[int, tuple[_Placed, ...]]


def _sizes(new: int) -> tuple[int, int]:
    """Two sizes that 16 divides, small and new together."""
    return 16 * (1 + new % 24), 16 * (1 + new // 24)


def _square(count: int) -> Callable[[int], tuple[tuple[int, ...], ...]]:
    return lambda new: (_sizes(new),) * count


CASES = (
    Case(
        "add",
        torch.add,
        _square(2),
        {1: (("0", "0"), ("R", "R"), ("P", "P")), 4: (("01RR", "01RR"), ("RRRR", "RRRR"), ("0P1R", "0P1R"))},
    ),
    Case(
        "mm",
        torch.mm,
        lambda new: (_sizes(new), (_sizes(new)[1], 48)),
        {1: (("0", "R"), ("R", "1"), ("1", "0")), 4: (("0RRR", "R1RR"), ("01RR", "R0RR"), ("00RR", "RR1R"))},
    ),
    Case(
        "view",
        lambda x: x.view(x.shape[0], 16, -1),
        _square(1),
        {1: (("0",), ("R",), ("P",)), 4: (("01RR",), ("RRRR",), ("0P1R",))},
    ),
    Case(
        "softmax",
        lambda x: torch.softmax(x, -1),
        _square(1),
        {1: (("0",), ("R",)), 4: (("00RR",), ("RRRR",), ("0R0R",))},
    ),
    Case(
        "layer_norm",
        lambda x, w, b: functional.layer_norm(x, w.shape, w, b),
        lambda new: (_sizes(new), _sizes(new)[1:], _sizes(new)[1:]),
        {1: (("0", "R", "R"), ("R", "R", "R")), 4: (("00RR", "RRRR", "RRRR"), ("0RR0", "RRRR", "RRRR"))},
    ),
)
# Nothing fits as it is, on any axis: the search has no free choice to stop at.
ADVERSARIAL = (
    Case(
        "add, all differ", torch.add, _square(2), {1: (("0", "1"),), 4: (("01P0", "10RP"), ("0101", "1010"))}
    ),
    Case(
        "mm, all differ",
        torch.mm,
        lambda new: (_sizes(new), (_sizes(new)[1], 64)),
        {1: (("0", "1"),), 4: (("01PR", "1P01"), ("1010", "1001"))},
    ),
    Case(
        "addmm, all differ",
        torch.addmm,
        lambda new: ((_sizes(new)[0], 64), _sizes(new), (_sizes(new)[1], 64)),
        {1: (("1", "0", "1"),), 4: (("P010", "01P0", "1010"),)},
    ),
)
HEADER = (
    f"{'mesh':<9}{'op':<18} {'placements':<22} {'ours us':>9} {'torch us':>10} {'ratio':>8} {'A vs A':>7} "
    f"{'known: ours':>12} {'torch':>6}"
)


class _Shapes:
    """Numbers that were not used before. One per case: the sizes stay small, so that no kernel takes long."""

    def __init__(self) -> None:
        self._last = 1

    def new(self) -> int:
        self._last += 1
        return self._last


def run(turns: int | None = None) -> int:
    """Print one line per mesh, op and placements, then per mesh the mean over the plain ops."""
    dist.init_process_group("fake", rank=0, world_size=16, store=FakeStore())
    torch.set_num_threads(1)
    ratios = {}
    print(HEADER)
    for mesh in (
        DeviceMesh("cpu", list(range(4)), mesh_dim_names=("tp",)),
        init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=("a", "b", "c", "d")),
    ):
        for case in (*CASES, *ADVERSARIAL):
            for placed in case.placed[mesh.ndim]:
                ratios[mesh.ndim, case.name, placed] = _compare(
                    mesh, case, placed, _Shapes(), turns or _TURNS[mesh.ndim]
                )
    dist.destroy_process_group()
    for ndim, bound in _BOUNDS.items():
        worst = {
            case.name: max(ratios[ndim, case.name, placed] for placed in case.placed[ndim]) for case in CASES
        }
        mean = statistics.geometric_mean(worst.values())
        each = ", ".join(f"{name} {ratio:.4f}" for name, ratio in worst.items())
        print(f"{ndim} axes, the worst of each op: {each}; geometric mean {mean:.4f} (goal: {bound})")
    return 0


def _compare(mesh: DeviceMesh, case: Case, placed: _Placed, shapes: _Shapes, turns: int) -> float:
    seconds: dict[str, list[float]] = {"ours": [], "theirs": [], "again": []}
    known = {
        name: _known_call(library, mesh, case, placed) for name, library in (("ours", sw), ("theirs", theirs))
    }
    for turn in range(turns + 1):  # the first one compiles what serves all shapes
        found = {
            name: _first_call(library, mesh, case, placed, shapes.new())
            for name, library in (("ours", sw), ("theirs", theirs), ("again", sw))
        }
        if turn:
            for name, taken in found.items():
                seconds[name].append(taken)
    ours, peer, again = (statistics.median(taken) for taken in seconds.values())
    size = "x".join(map(str, mesh.shape))
    print(
        f"{size:<9}{case.name:<18} {', '.join(placed):<22} {ours * 1e6:>9.0f} {peer * 1e6:>10.0f} "
        f"{ours / peer:>8.4f} {ours / again:>7.2f} "
        f"{known['ours'] * 1e6:>12.0f} {known['theirs'] * 1e6:>6.0f}",
        flush=True,
    )
    return ours / peer


def _first_call(library: object, mesh: DeviceMesh, case: Case, placed: _Placed, new: int) -> float:
    operands = [
        _made(library, mesh, shape, letters) for shape, letters in zip(case.shapes(new), placed, strict=True)
    ]
    start = time.perf_counter()
    case.op(*operands)
    return time.perf_counter() - start


def _known_call(library: object, mesh: DeviceMesh, case: Case, placed: _Placed) -> float:
    """What the same call costs once it is known: the floor of a first call."""
    operands = [
        _made(library, mesh, shape, letters) for shape, letters in zip(case.shapes(1), placed, strict=True)
    ]
    taken = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        case.op(*operands)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _made(library: object, mesh: DeviceMesh, shape: tuple[int, ...], letters: str) -> torch.Tensor:
    """A tensor of this logical shape, made from this rank's part."""
    local = list(shape)
    for size, letter in zip(mesh.shape, letters, strict=True):
        if letter.isdigit():
            local[int(letter)] //= size
    return library.DTensor.from_local(  # type: ignore[attr-defined, no-any-return]
        torch.ones(local), mesh, [_placement(library, letter) for letter in letters]
    )


def _placement(library: object, letter: str) -> object:
    if letter.isdigit():
        return library.Shard(int(letter))  # type: ignore[attr-defined]
    return library.Partial() if letter == "P" else library.Replicate()  # type: ignore[attr-defined]


if __name__ == "__main__":
    run(int(sys.argv[1]) if len(sys.argv) > 1 else None)
