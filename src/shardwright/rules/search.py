"""Choose one candidate per axis: the best few of each axis alone, then all their combinations together.

What one axis cuts makes the transfers of the others smaller, so axes are not chosen one by one; but four
candidates per axis are enough to find the best combination in practice. The full product over the axes is
never expanded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from shardwright.placement.base import Placement
from shardwright.rules.call import Call, TensorInfo
from shardwright.rules.candidates import AxisView, Candidate, States, after, candidates, plain_candidates
from shardwright.rules.equation import Equation
from shardwright.rules.price import Price, joint_bytes, move_bytes

_KEEP = 4
_KEEP_MANY_AXES = 2
_SMALL = 1 << 16  # bytes; below it a collective costs its latency


@dataclass(frozen=True, slots=True)
class Choice:
    """One candidate per mesh axis, in the order of the mesh, and what it costs."""

    candidates: tuple[Candidate, ...]
    price: Price


@dataclass(slots=True)
class Search:
    """The best choice for one equation.

    Args:
        equation: the rule, bound to the call.
        call: the call.
        sizes: size of each mesh axis.
        current: per operand, its placement on each mesh axis.
        order: mesh axes in the order in which they are applied.
    """

    equation: Equation
    call: Call
    sizes: tuple[int, ...]
    current: tuple[tuple[Placement, ...], ...]
    order: tuple[int, ...]
    _found: list[Choice] = field(default_factory=list, init=False)
    _ranked: dict[tuple[int, bool, States], list[Candidate]] = field(default_factory=dict, init=False)

    def best(self) -> Choice:
        """The cheapest choice; there is always one, since whole tensors serve every op."""
        self._descend({}, frozenset({self.equation.sizes}), scattered=False)
        return min(self._found, key=lambda choice: choice.price)

    def _descend(self, chosen: dict[int, Candidate], states: States, *, scattered: bool) -> None:
        if len(chosen) == len(self.order):
            self._consider(tuple(chosen[axis] for axis in range(len(self.order))))
            return
        axis = self.order[len(chosen)]
        view = self._view(axis, states, scattered=scattered)
        for candidate in self._few(axis, view):
            left = after(view, candidate)
            self._descend({**chosen, axis: candidate}, left, scattered=scattered or candidate.scattered)
            if self._found[-1].price.free:
                return

    def _view(self, axis: int, states: States, *, scattered: bool) -> AxisView:
        current = tuple(placements[axis] for placements in self.current)
        return AxisView(self.equation, self.call.results, self.sizes[axis], current, states, scattered)

    def _few(self, axis: int, view: AxisView) -> list[Candidate]:
        key = (axis, view.scattered, view.states)
        if key not in self._ranked:
            self._ranked[key] = self._rank(view)
        return self._ranked[key]

    def _rank(self, view: AxisView) -> list[Candidate]:
        """The cheapest candidates of one axis, and the whole one; only the best if that costs nothing."""
        found = [c for c in candidates(view) if not self._writes_out_terms(c)]
        priced = [(self._alone(view, candidate), i, candidate) for i, candidate in enumerate(found)]
        if not min(price for price, _, _ in priced).free:
            cuts = [c for c in plain_candidates(view) if self._worth_scattering(view, c)]
            more = enumerate(cuts, len(found))
            priced += [(self._alone(view, candidate), i, candidate) for i, candidate in more]
        priced.sort(key=lambda entry: entry[:2])
        if priced[0][0].free:
            return [priced[0][2]]
        busy = sum(not all(p.is_replicated for p in column) for column in zip(*self.current, strict=True))
        kept = [candidate for _, _, candidate in priced[: _KEEP if busy <= 3 else _KEEP_MANY_AXES]]
        return kept if found[0] in kept else [*kept, found[0]]

    # ------------------------------------------------------------------------------------------ prices

    def _bytes(self, operand: int) -> int:
        """An expanded tensor moves as what it was expanded from."""
        info = self.call.operands[operand]
        own = (size for size, stride in zip(info.shape, info.stride, strict=True) if stride or not size)
        return prod(own) * info.dtype.itemsize

    def _writes_out_terms(self, candidate: Candidate) -> bool:
        """Whether an expanded pending value would become one of full size: finish it while it is small."""
        made = self.call.results[0] if self.call.results else None
        if made is None or not self.equation.formula.elementwise or is_expanded(made):
            return False
        pairs = zip(candidate.inputs, self.call.operands, strict=True)
        return any(wanted.is_pending and is_expanded(info) for wanted, info in pairs)

    def _worth_scattering(self, view: AxisView, candidate: Candidate) -> bool:
        """Whether no small pending value would be cut: a number per row meets the tensor of the rows next.

        A reduce-scatter of it sends half of what an all-reduce does, and the gather after it the rest; what
        follows would be computed in that cut, and meet the tensor that the rows came from in another.
        """
        pairs = enumerate(zip(view.current, candidate.inputs, strict=True))
        return not any(
            now.is_pending and wanted.is_partition and self._bytes(i) <= _SMALL for i, (now, wanted) in pairs
        )

    def _alone(self, view: AxisView, candidate: Candidate) -> Price:
        """The price of one axis, as if the tensors were cut on no other."""
        pairs = list(zip(view.current, candidate.inputs, strict=True))
        sent = sum(move_bytes(src, dst, self._bytes(i), view.n) for i, (src, dst) in enumerate(pairs))
        moves = sum(src != dst for src, dst in pairs)
        rewritten = sum(self._rewritten(i, view.current[i], candidate) for i in range(len(pairs)))
        return Price(rewritten, sent, 1 / view.n if candidate.divides else 1.0, moves)

    def _rewritten(self, operand: int, current: Placement, candidate: Candidate) -> bool:
        if not self.equation.operands[operand].mutated:
            return False
        if candidate.inputs[operand] != current:
            return True
        return any(
            alias == operand and placement not in {None, current}
            for alias, placement in zip(self.equation.aliases, candidate.outputs, strict=True)
        )

    def _consider(self, chosen: tuple[Candidate, ...]) -> None:
        sent = moves = rewritten = 0
        for operand, current in enumerate(self.current):
            wanted = tuple(candidate.inputs[operand] for candidate in chosen)
            if wanted != current:
                moves += 1
                sent += joint_bytes(current, wanted, self._bytes(operand), self.sizes)
            rewritten += any(
                self._rewritten(operand, current[axis], candidate) for axis, candidate in enumerate(chosen)
            )
        work = prod(1 / n for n, candidate in zip(self.sizes, chosen, strict=True) if candidate.divides)
        self._found.append(Choice(chosen, Price(rewritten, sent, work, moves)))


def is_expanded(info: TensorInfo) -> bool:
    """Whether one element repeats along a dim."""
    return any(size > 1 and not stride for size, stride in zip(info.shape, info.stride, strict=True))


def rewritten_operands(
    equation: Equation, choice: Choice, current: Sequence[Sequence[Placement]]
) -> tuple[int, ...]:
    """The mutated operands that the choice moves, or whose result has another placement."""
    found: list[int] = []
    for operand, slot in enumerate(equation.operands):
        wanted = [tuple(candidate.inputs[operand] for candidate in choice.candidates)]
        wanted += [
            tuple(candidate.outputs[result] or current[operand][0] for candidate in choice.candidates)
            for result, alias in enumerate(equation.aliases)
            if alias == operand
        ]
        if slot.mutated and any(placements != tuple(current[operand]) for placements in wanted):
            found.append(operand)
    return tuple(found)
