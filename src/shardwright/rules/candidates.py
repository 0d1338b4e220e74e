"""The ways to run a call on one mesh axis: an equation expanded over the families of placements."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from shardwright.errors import PlacementError
from shardwright.placement.base import Partition, Pending, Placement, Replicate
from shardwright.placement.shard import Shard
from shardwright.rules.along_label import labels_cut, part_lengths, place_label
from shardwright.rules.call import Call
from shardwright.rules.equation import BoundHom, Equation, Sizes, Slot
from shardwright.rules.monoid import (
    KEPT,
    converts,
    has_meaning,
    holds_any,
    matches,
    pending_of,
    stays_neutral,
)
from shardwright.rules.states import States

REPLICATE = Replicate()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run the call on one axis.

    Args:
        inputs: the placement that each operand must have.
        outputs: the placement of each result; None where the op returns no tensor.
        text: for people.
        label: the label that is cut, by index, or None.
        part: how it is cut, as a partition of a 1-d tensor.
        divides: whether the work is divided over the axis.
        scattered: elements are partitioned in a way that labels cannot tell: later axes may use no label.
        alone: one coord has everything and does everything; the others have nothing and call no kernel.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]
    text: str
    label: int | None = None
    part: Partition | None = None
    divides: bool = False
    scattered: bool = False
    alone: bool = False


@dataclass(frozen=True, slots=True)
class AxisView:
    """What candidates depend on: equation, dtypes of operands and results, axis size, current placements.

    Args:
        states: the sizes of labels that earlier axes leave on the coords.
        scattered: an earlier axis partitions elements, not labels.
    """

    equation: Equation
    call: Call
    n: int
    current: tuple[Placement, ...]
    states: States
    scattered: bool = False


def candidates(view: AxisView) -> list[Candidate]:
    """The ways to run the call on this axis that an operand's placement suggests; first, on whole tensors."""
    whole = whole_candidate(view)
    if all(placement.is_replicated for placement in view.current):
        return [whole]
    found = [whole, *_pending(view), *_elementwise(view), *_alone(view)]
    if not view.scattered:
        for label, part in _cut_now(view):
            found += cut(view, label, part)
    return found


def plain_candidates(view: AxisView) -> list[Candidate]:
    """Each label cut in the plain way, whether or not an operand is: for when something has to move."""
    if view.scattered:
        return []
    plain = Shard(0)
    known = set(_cut_now(view))
    labels = [label for label in view.equation.cuttable if (label, plain) not in known]
    return [candidate for label in labels for candidate in cut(view, label, plain)]


def whole_candidate(view: AxisView) -> Candidate:
    """Every operand whole on every coord: true of every op."""
    outputs = tuple(None if slot is None else REPLICATE for slot in view.equation.results)
    inputs = tuple(_free(view, operand, REPLICATE) for operand in range(len(view.current)))
    return Candidate(_with_outs(view, inputs, outputs), outputs, "whole")


def _free(view: AxisView, operand: int, wanted: Placement) -> Placement:
    """What an operand needs; what is not read keeps the placement that it has."""
    slot, current = view.equation.operands[operand], view.current[operand]
    if slot.anything or (slot.metadata and current.is_pending and wanted.is_replicated):
        return current
    return wanted


def _with_outs(
    view: AxisView, inputs: Sequence[Placement], outputs: Sequence[Placement | None]
) -> tuple[Placement, ...]:
    """`out=` operands take the placement of the result that is written into them."""
    found = list(inputs)
    for result, operand in enumerate(view.equation.aliases):
        placement = outputs[result]
        if operand is not None and placement is not None and view.equation.operands[operand].out:
            found[operand] = placement
    return tuple(found)


def _alone(view: AxisView) -> Iterator[Candidate]:
    """All operands on the coord that has one of them now: true of every op."""
    shapes = [slot.shape(view.equation.sizes) for slot in view.equation.operands if not slot.metadata]
    if view.equation.same_shape or not shapes or any(0 in shape for shape in shapes):
        return  # of what has no elements, no coord can be told to have none
    for placement in dict.fromkeys(view.current):
        if isinstance(placement, Partition) and placement.undivided:
            inputs = tuple(_free(view, operand, placement) for operand in range(len(view.current)))
            outputs = tuple(None if slot is None else placement for slot in view.equation.results)
            if _silent_writes(view, range(len(inputs))):
                written = _with_outs(view, inputs, outputs)
                yield Candidate(written, outputs, f"on {placement} alone", alone=True)


# ------------------------------------------------------------------------------------ pending values


def _pending(view: AxisView) -> Iterator[Candidate]:
    for hom in view.equation.homs:
        for source in _sources(view, hom):
            candidate = _homomorphic(view, hom, source)
            if candidate is not None:
                yield candidate


def _sources(view: AxisView, hom: BoundHom) -> Iterator[Pending]:
    """The pending placements that the fact's operands have now and that the fact speaks of."""
    found = (view.current[operand] for operand in sorted(hom.operands))
    named = (p for p in found if isinstance(p, Pending) and matches(p, hom.fact.source))
    yield from dict.fromkeys(named)


def _homomorphic(view: AxisView, hom: BoundHom, source: Pending) -> Candidate | None:
    equation, fact = view.equation, hom.fact
    target = source if fact.target in KEPT else pending_of(fact.target)
    outputs: list[Placement | None] = []
    for result, slot in enumerate(equation.results):
        if slot is None:
            outputs.append(None)
        elif any(equation.needs(result, operand) for operand in hom.operands):
            outputs.append(target)
        else:
            outputs.append(REPLICATE)
    if not _in_domain(view, outputs) or not _silent_writes(view, hom.operands, keeps=target == source):
        return None
    if not all(_may_be_pending(view, operand, source, outputs) for operand in hom.operands):
        return None
    inputs = [
        source if operand in hom.operands else _free(view, operand, REPLICATE)
        for operand in range(len(view.current))
    ]
    text = f"{'+'.join(fact.args)}: {fact.source}->{fact.target}"
    return Candidate(_with_outs(view, inputs, outputs), tuple(outputs), text)


def _silent_writes(view: AxisView, changed: Collection[int], *, keeps: bool = True) -> bool:
    """Whether operands that are written but not returned stay what they are.

    No result says what such an operand has become (foreach, fused optimizers), so it must be among those
    that are cut or pending, and stay so.
    """
    slots = enumerate(view.equation.operands)
    written = {i for i, slot in slots if slot.mutated and i not in view.equation.aliases}
    return not written or (keeps and written <= set(changed))


def _may_be_pending(
    view: AxisView, operand: int, source: Pending, outputs: Sequence[Placement | None]
) -> bool:
    """Whether the op may read terms of this operand: as they are, or those of a finished value.

    The reduction of the terms is that of their own dtype: an op that converts them reads another value. Of a
    finished value one coord may hold everything, if what the others hold stays neutral when it is converted.
    """
    dtype = view.call.operands[operand].dtype
    rule = converts if view.current[operand] == source else stays_neutral
    if view.current[operand] != source and not holds_any(source, dtype):
        return False
    return all(rule(source, dtype, made) for made in _pending_dtypes(view, outputs))


def _pending_dtypes(view: AxisView, outputs: Sequence[Placement | None]) -> set[torch.dtype]:
    """Of the terms that the op makes: returned, or written in place."""
    pairs = zip(outputs, view.call.results, strict=True)
    made = {info.dtype for placement, info in pairs if info and placement and placement.is_pending}
    return made | {view.call.operands[operand].dtype for operand in view.equation.mutated}


def _in_domain(view: AxisView, outputs: Sequence[Placement | None]) -> bool:
    return all(
        has_meaning(placement, info.dtype)
        for placement, info in zip(outputs, view.call.results, strict=True)
        if info is not None and isinstance(placement, Pending)
    )


# --------------------------------------------------------------------------- partitions of elements


def _elementwise(view: AxisView) -> Iterator[Candidate]:
    """Any partition of the elements, the same for all tensors; one-element operands stay whole."""
    if not view.equation.same_shape:
        return
    for placement in dict.fromkeys(view.current):
        if placement.is_partition and (view.scattered or _tells_no_label(view, placement)):
            yield _same_everywhere(view, placement)


def _tells_no_label(view: AxisView, placement: Placement) -> bool:
    operands = zip(view.equation.operands, view.current, strict=True)
    sizes = view.equation.sizes
    return not any(
        next(labels_cut(slot, placement, sizes, view.n), None)
        for slot, current in operands
        if current == placement
    )


def _same_everywhere(view: AxisView, placement: Placement) -> Candidate:
    equation = view.equation
    shapes = [slot.shape(equation.sizes) for slot in equation.operands]
    common = max(shapes, key=lambda shape: (prod(shape) != 1, len(shape)))

    def placed(slot: Slot) -> Placement:
        return placement if slot.shape(equation.sizes) == common else REPLICATE

    inputs = tuple(_free(view, i, placed(slot)) for i, slot in enumerate(equation.operands))
    outputs = tuple(None if slot is None else placed(slot) for slot in equation.results)
    divides = isinstance(placement, Partition) and bool(placement.cut_dims(common, view.n))
    return Candidate(inputs, outputs, f"elements as {placement}", divides=divides, scattered=True)


# --------------------------------------------------------------------------------------------- labels


def _cut_now(view: AxisView) -> list[tuple[int, Partition]]:
    """The labels that operands cut now, and how; without those that must be whole."""
    sizes = _sizes_now(view)
    found: dict[tuple[int, Partition], None] = {}
    for slot, placement in zip(view.equation.operands, view.current, strict=True):
        if placement.is_partition:
            for cut_now in labels_cut(slot, placement, sizes, view.n):
                if cut_now[0] not in view.equation.whole:
                    found[cut_now] = None
    return list(found)


def _sizes_now(view: AxisView) -> Sizes:
    """Sizes of labels on some coord; the logical ones where which label is cut does not depend on them."""
    if not view.equation.grouped and all(placement.any_size for placement in view.current):
        return view.equation.sizes
    return max(view.states.every(), key=lambda sizes: (0 not in sizes, sizes))


def cut(view: AxisView, label: int, part: Partition) -> Iterator[Candidate]:
    """The candidate that cuts `label` like `part`; nothing if some tensor cannot be cut so."""
    equation = view.equation
    inputs = [_place(view, slot_index, label, part) for slot_index in range(len(equation.operands))]
    outputs = [_place_result(view, result, label, part) for result in range(len(equation.results))]
    if any(placement is None for placement in inputs) or not _outputs_exist(view, outputs):
        return
    placed = tuple(placement for placement in inputs if placement is not None)
    if not _in_domain(view, outputs) or not _cut_fits(view, label, part, outputs):
        return
    if not _silent_writes(view, [i for i, slot in enumerate(equation.operands) if slot.find(label)]):
        return
    if any(placement is not None and placement.is_pending for placement in outputs):
        addends = _addends(view, label, part, placed)
        if addends is None:
            return
        placed = addends
    name = equation.labels[label]
    text = f"cut {name.replace('.', '...-')} as {part}"
    yield Candidate(_with_outs(view, placed, outputs), tuple(outputs), text, label, part, divides=True)


def _outputs_exist(view: AxisView, outputs: Sequence[Placement | None]) -> bool:
    return all(
        placement is not None
        for placement, slot in zip(outputs, view.equation.results, strict=True)
        if slot is not None
    )


def _place(view: AxisView, operand: int, label: int, part: Partition) -> Placement | None:
    slot = view.equation.operands[operand]
    if slot.find(label) is None:
        return _free(view, operand, REPLICATE)
    return _everywhere(view, slot, label, part)


def _place_result(view: AxisView, result: int, label: int, part: Partition) -> Placement | None:
    slot = view.equation.results[result]
    if slot is None:
        return None
    if slot.find(label) is not None:
        return _everywhere(view, slot, label, part)
    if not view.equation.lacks(result, label):
        return REPLICATE
    reduce = view.equation.formula.reduce_of(result)
    return None if reduce is None else pending_of(reduce)


def _everywhere(view: AxisView, slot: Slot, label: int, part: Partition) -> Placement | None:
    """The one placement that holds whatever earlier axes left on a coord; None if there is none.

    A coord that was left with nothing agrees to every placement. It must have a meaning for the tensor itself
    too, as which a layout states it.
    """
    if not view.equation.grouped and part.any_size:  # then each dim is one label, and no size matters
        return place_label(slot, label, part, view.equation.sizes, view.n)
    states = view.states.every()
    something = [sizes for sizes in states if 0 not in slot.shape(sizes)]
    found = {place_label(slot, label, part, sizes, view.n) for sizes in something or list(states)[:1]}
    placement = found.pop() if len(found) == 1 else None
    return placement if _may_be_stated(placement, slot.shape(view.equation.sizes), view.n) else None


def _may_be_stated(placement: Partition | None, shape: tuple[int, ...], n: int) -> bool:
    """Whether a layout takes it; what looks at no size was asked when the call was bound."""
    if placement is None or placement.any_size:
        return True
    try:
        placement.validate(shape, n)
    except PlacementError:
        return False
    return True


def _cut_fits(view: AxisView, label: int, part: Partition, outputs: Sequence[Placement | None]) -> bool:
    """Whether the parts are as the rule needs them: of equal size, or at least none empty.

    A coord without elements runs no kernel; a result that every coord must have whole would be missing there.
    """
    even = view.equation.labels[label] in view.equation.formula.even
    everywhere = any(placement is not None and placement.is_replicated for placement in outputs)
    if not even and not everywhere:
        return True
    lengths = [part_lengths(part, sizes[label], view.n) for sizes in view.states.every()]
    if even and any(len(set(length)) > 1 for length in lengths):
        return False
    return not everywhere or all(min(length) > 0 for length in lengths)


def _addends(
    view: AxisView, label: int, part: Partition, inputs: tuple[Placement, ...]
) -> tuple[Placement, ...] | None:
    """Operands without the reduced label that add up with one that has it are pending themselves.

    addmm with k cut: each coord adds its part of the bias, by embedding it on coord 0. A coord without
    elements runs no kernel and would lose its part; then this candidate is none.
    """
    found = list(inputs)
    for operand in _adds_up(view.equation, label):
        reduce = view.equation.formula.reduce
        if not isinstance(reduce, str) or reduce != "sum":
            return None
        if any(0 in part_lengths(part, sizes[label], view.n) for sizes in view.states.every()):
            return None
        found[operand] = pending_of(reduce)
    return tuple(found)


def _adds_up(equation: Equation, label: int) -> list[int]:
    has = {i for i, slot in enumerate(equation.operands) if slot.find(label) is not None}
    found: set[int] = set()
    for hom in equation.homs:
        if hom.fact.source == "sum" and hom.operands & has:
            found |= hom.operands - has
    return sorted(found)


# ------------------------------------------------------------------------------------- after an axis


def after(view: AxisView, candidate: Candidate) -> States:
    """The label sizes that this candidate leaves on the coords, for the next axis."""
    if candidate.label is None or candidate.part is None:
        return view.states
    return view.states.cut(candidate.label, candidate.part, view.n)
