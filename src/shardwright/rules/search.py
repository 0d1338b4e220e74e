"""Choose one candidate per axis: the best few of each axis alone, then their combinations, bounded.

What one axis cuts makes the transfers of the others smaller, so axes are not chosen one by one; but four
candidates per axis are enough to find the best combination in practice. Combinations are tried depth first,
the most promising candidates first; a branch is left when what is chosen so far costs more than the best
found, even if all axes to come cut everything; a price of zero ends the search. The full product over the
axes is never expanded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from shardwright.placement.base import Placement
from shardwright.rules.call import Call, TensorInfo
from shardwright.rules.candidates import AxisView, Candidate, after, candidates, plain_candidates
from shardwright.rules.equation import Equation, Sizes
from shardwright.rules.price import Price, Transfers, finishing_bytes, following_bytes, moved_bytes
from shardwright.rules.states import States

_KEEP = 4
_SMALL = 1 << 16  # bytes; below it a collective costs its latency


@dataclass(frozen=True, slots=True)
class Choice:
    """One candidate per mesh axis, in the order of the mesh, and what it costs.

    any_size: no size was looked at: the same call on tensors of other sizes is run in the same way.
    """

    candidates: tuple[Candidate, ...]
    price: Price
    any_size: bool = False


class Search:
    """The best choice for one equation.

    Args:
        equation: the rule, bound to the call.
        call: the call.
        sizes: size of each mesh axis.
        current: per operand, its placement on each mesh axis.
        order: mesh axes in the order in which they are applied.
    """

    def __init__(
        self,
        equation: Equation,
        call: Call,
        sizes: tuple[int, ...],
        current: tuple[tuple[Placement, ...], ...],
        order: tuple[int, ...],
    ) -> None:
        self.equation = equation
        self.call = call
        self.sizes = sizes
        self.current = current
        self.order = order
        self._columns = tuple(zip(*current, strict=True)) if current else ((),) * len(sizes)
        self._transfers = [
            Transfers(own, info, sizes, order) for own, info in zip(current, call.operands, strict=True)
        ]
        self._discount = sum(transfers.most_discount() for transfers in self._transfers if transfers.pending)
        self._made = [0 if info is None else moved_bytes(info) for info in call.results]
        self._ranked: dict[tuple[int, bool, frozenset[Sizes] | None], list[Candidate]] = {}
        self._chosen: list[Candidate | None] = [None] * len(order)
        self._found: list[Choice] = []  # each better than the one before

    def best(self) -> Choice:
        """The cheapest choice; there is always one, since whole tensors serve every op."""
        states = States(self.equation.sizes)
        self._descend(0, states, 0, scattered=False)
        found = self._found[-1]
        return replace(found, any_size=found.price.free and not states.asked)

    # `rewritten` is a set of operands, as bits.
    def _descend(self, depth: int, states: States, rewritten: int, *, scattered: bool) -> bool:
        """Try what the axes from `depth` on may do; whether something free was found."""
        if depth == len(self.order):
            return self._consider(rewritten)
        axis = self.order[depth]
        view = AxisView(self.equation, self.call, self.sizes[axis], self._columns[axis], states, scattered)
        for candidate in self._few(axis, view):
            self._chosen[axis] = candidate
            more = rewritten | self._rewrites(axis, candidate)
            if self._hopeless(more):
                continue
            left = after(view, candidate)
            if self._descend(depth + 1, left, more, scattered=scattered or candidate.scattered):
                return True
        self._chosen[axis] = None
        return False

    def _few(self, axis: int, view: AxisView) -> list[Candidate]:
        """The candidates of one axis worth trying: found once, unless they depend on earlier cuts."""
        sizes = view.states.every() if self.equation.grouped else None
        known = self._ranked.get((axis, view.scattered, sizes))
        if known is not None:
            return known
        before = view.states.asked
        found = self._rank(axis, view)
        if sizes is not None or view.states.asked == before:
            self._ranked[axis, view.scattered, sizes] = found
        return found

    def _rank(self, axis: int, view: AxisView) -> list[Candidate]:
        """The cheapest candidates of one axis, and the whole one; only the best if that costs nothing."""
        found = candidates(view)
        priced = [(self._alone(axis, view, candidate), i, candidate) for i, candidate in enumerate(found)]
        if not min(price for price, _, _ in priced).free:
            cuts = [c for c in plain_candidates(view) if self._worth_scattering(view, c)]
            more = enumerate(cuts, len(found))
            priced += [(self._alone(axis, view, candidate), i, candidate) for i, candidate in more]
        priced.sort(key=lambda entry: entry[:2])
        if priced[0][0].free:
            return [priced[0][2]]
        kept = [candidate for _, _, candidate in priced[:_KEEP]]
        return kept if found[0] in kept else [*kept, found[0]]

    # ------------------------------------------------------------------------------------------ prices

    def _worth_scattering(self, view: AxisView, candidate: Candidate) -> bool:
        """Whether no small pending value would be cut: a number per row meets the tensor of the rows next.

        A reduce-scatter of it sends half of what an all-reduce does, and the gather after it the rest; what
        follows would be computed in that cut, and meet the tensor that the rows came from in another.
        """
        pairs = enumerate(zip(view.current, candidate.inputs, strict=True))
        return not any(
            now.is_pending and wanted.is_partition and self._transfers[operand].bytes <= _SMALL
            for operand, (now, wanted) in pairs
        )

    def _alone(self, axis: int, view: AxisView, candidate: Candidate) -> Price:
        """The price of one axis, as if the tensors were cut on no other."""
        sent = moves = later = 0
        for have, want, transfers in zip(view.current, candidate.inputs, self._transfers, strict=True):
            if have is not want and have != want:
                sent += transfers.alone(axis, want)
                if have.is_pending:
                    kept = self._stay_cut(axis, candidate)
                    later += following_bytes(have, want, transfers.bytes, view.n, kept)
                moves += 1
        if sent:
            pairs = zip(candidate.outputs, self._made, strict=False)
            later += sum(finishing_bytes(made, size, view.n) for made, size in pairs)
        rewritten = self._rewrites(axis, candidate).bit_count()
        return Price(rewritten, sent + later, 1 / view.n if candidate.divides else 1.0, moves, sent)

    def _rewrites(self, axis: int, candidate: Candidate) -> int:
        """The operands that are written and that the candidate moves, or leaves with another placement."""
        found = 0
        for operand in self.equation.mutated:
            if self._rewritten(operand, self.current[operand][axis], candidate):
                found |= 1 << operand
        return found

    def _rewritten(self, operand: int, current: Placement, candidate: Candidate) -> bool:
        if candidate.inputs[operand] != current:
            return True
        return any(
            alias == operand and placement not in {None, current}
            for alias, placement in zip(self.equation.aliases, candidate.outputs, strict=True)
        )

    def _hopeless(self, rewritten: int) -> bool:
        """Whether the axes chosen so far cost more than the best, whatever the others do."""
        if not self._found:
            return False
        best = self._found[-1].price
        least = 0
        for operand, transfers in enumerate(self._transfers):
            wanted = [None if chosen is None else chosen.inputs[operand] for chosen in self._chosen]
            least += transfers.joint(tuple(wanted))
        return (rewritten.bit_count(), least - self._discount) > (best.rewritten, best.total)

    def _consider(self, rewritten: int) -> bool:
        chosen = tuple(candidate for candidate in self._chosen if candidate is not None)
        price = self._price(chosen, rewritten)
        if not self._found or price < self._found[-1].price:
            self._found.append(Choice(chosen, price))
        return price.free

    def _price(self, chosen: tuple[Candidate, ...], rewritten: int) -> Price:
        """The price of a candidate for every axis, together."""
        sent = moves = later = 0
        for operand, transfers in enumerate(self._transfers):
            wanted = tuple(candidate.inputs[operand] for candidate in chosen)
            if wanted != self.current[operand]:
                moves += 1
                sent += transfers.joint(wanted)
                if transfers.pending:
                    kept = [self._stay_cut(axis, candidate) for axis, candidate in enumerate(chosen)]
                    later += transfers.following(wanted, kept)
        if sent:
            later += self._finishing(chosen)
        work = prod(1 / n for n, candidate in zip(self.sizes, chosen, strict=True) if candidate.divides)
        return Price(rewritten.bit_count(), sent + later, work, moves, sent)

    def _stay_cut(self, axis: int, candidate: Candidate) -> int:
        """Bytes of the operands that the axis cuts and that stay as they are."""
        return sum(
            transfers.bytes
            for own, want, transfers in zip(self.current, candidate.inputs, self._transfers, strict=True)
            if want.is_partition and (own[axis] is want or own[axis] == want)
        )

    def _finishing(self, chosen: tuple[Candidate, ...]) -> int:
        total = 0
        for result, size in enumerate(self._made):
            made = [candidate.outputs[result] for candidate in chosen if result < len(candidate.outputs)]
            cut = prod(
                n
                for placement, n in zip(made, self.sizes, strict=False)
                if placement is not None and placement.is_partition
            )
            total += sum(finishing_bytes(p, size // cut, n) for p, n in zip(made, self.sizes, strict=False))
        return total

    def instead(self, choice: Choice, axis: int) -> list[Choice]:
        """The choice with each other candidate of one axis, the cheapest first. For people."""
        view = AxisView(
            self.equation,
            self.call,
            self.sizes[axis],
            self._columns[axis],
            States(self.equation.sizes),
            scattered=False,
        )
        found = []
        for candidate in (*candidates(view), *plain_candidates(view)):
            chosen = (*choice.candidates[:axis], candidate, *choice.candidates[axis + 1 :])
            rewritten = 0
            for other, own in enumerate(chosen):
                rewritten |= self._rewrites(other, own)
            if candidate != choice.candidates[axis]:
                found.append(Choice(chosen, self._price(chosen, rewritten)))
        return sorted(found, key=lambda entry: entry.price)


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
