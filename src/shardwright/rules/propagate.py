"""From a call and the layouts of its operands to the layouts of its results. Pure and deterministic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from math import prod

from shardwright.errors import RuleError
from shardwright.layout.arrangement import conflicts
from shardwright.layout.layout import Layout
from shardwright.placement.base import Placement
from shardwright.rules.any_size import for_any_size, same_way
from shardwright.rules.binding import bind
from shardwright.rules.call import Call, TensorInfo
from shardwright.rules.candidates import REPLICATE
from shardwright.rules.decision import (
    Decision,
    LabelSize,
    LocalArg,
    LocalCall,
    LocalInt,
    LocalShape,
    ResultShape,
    ResultStride,
)
from shardwright.rules.described import BindingError
from shardwright.rules.equation import Dim, Equation
from shardwright.rules.lists import join_decisions, split_call
from shardwright.rules.op import is_per_element
from shardwright.rules.registry import registry
from shardwright.rules.search import Choice, Search, rewritten_operands


def propagate(call: Call, layouts: Sequence[Layout]) -> Decision:
    """Decide how to run `call` on operands with these layouts: the cheapest true equation, or all whole.

    Args:
        call: the logical call.
        layouts: the current layout of each operand, in the order of `call.operands`; all on one mesh.

    Returns: what each operand must have, what each result will have, and the local arguments.
    Raises: RuleError: the layouts do not belong to the call, or lie on different meshes.
    Communication: none here; `Decision.cost_bytes` estimates that of the inputs.
    """
    layouts = tuple(layouts)
    _check(call, layouts)
    if is_per_element(call.op):
        parts = split_call(call)
        if parts is not None:
            decisions = [propagate_one(part.call, tuple(layouts[i] for i in part.operands)) for part in parts]
            return join_decisions(call, parts, decisions)
    return propagate_one(call, layouts)


def propagate_one(call: Call, layouts: tuple[Layout, ...]) -> Decision:
    """`propagate` for a call that is no list of calls."""
    problems: list[str] = []
    best = best_way(call, layouts, problems)
    if best is None:
        return _fallback(call, layouts, problems)
    search, choice = best
    return decide(call, layouts, search.order, search.equation, choice)


def best_way(call: Call, layouts: tuple[Layout, ...], problems: list[str]) -> tuple[Search, Choice] | None:
    """The cheapest choice of all equations, with the search that found it; None where no equation fits.

    Args: problems: where it is noted why an equation does not fit.
    """
    found: list[tuple[Search, Choice]] = []
    if layouts:
        order = _order(layouts)
        for equation in _equations(call, problems):
            placements = _placements(layouts)
            search = Search(equation, call, layouts[0].sizes, placements, order)
            found.append((search, search.best()))
            if found[-1][1].price.free:
                break
    return min(found, key=lambda entry: entry[1].price) if found else None


def _check(call: Call, layouts: tuple[Layout, ...]) -> None:
    if len(layouts) != len(call.operands):
        raise RuleError(f"{call}: {len(call.operands)} operands, {len(layouts)} layouts")
    for layout, other in pairwise(layouts):
        if layout.mesh_shape != other.mesh_shape:
            raise RuleError(
                f"{call.op.name()}: the operands lie on different meshes\n  {layout}\n  {other}\n"
                "fix: redistribute one of them onto the mesh of the other"
            )


def _equations(call: Call, problems: list[str]) -> Iterator[Equation]:
    for formula in registry.formulas(call):
        try:
            yield bind(formula, call)
        except BindingError as error:
            problems.append(f"{formula.text!r} does not fit: {error}")


def _placements(layouts: tuple[Layout, ...]) -> tuple[tuple[Placement, ...], ...]:
    return tuple(layout.placements for layout in layouts)


# ----------------------------------------------------------------------------------------- the order


def _order(layouts: tuple[Layout, ...]) -> tuple[int, ...]:
    """The order in which axes are applied: that of the largest operand for which it matters."""
    orders = {layout.order for layout in layouts}
    if len(orders) == 1:
        return layouts[0].order
    ranked = sorted(layouts, key=lambda layout: (not order_matters(layout), -layout.numel))
    return ranked[0].order


def order_matters(layout: Layout) -> bool:
    """Whether another order of the axes would be another layout."""
    return bool(conflicts(layout.placements, layout.sizes, layout.shape))


# -------------------------------------------------------------------------------------- the decision


def decide(
    call: Call, layouts: tuple[Layout, ...], order: tuple[int, ...], equation: Equation, choice: Choice
) -> Decision:
    """The decision that follows from an equation and one candidate per axis."""
    columns = choice.candidates
    inputs = tuple(
        _moved(layout, tuple(candidate.inputs[i] for candidate in columns), order)
        for i, layout in enumerate(layouts)
    )
    outputs = tuple(
        None if info is None else _made(layouts[0], info, [c.outputs[i] for c in columns], order)
        for i, info in enumerate(call.results)
    )
    rewrites = rewritten_operands(equation, choice, _placements(layouts))
    # Elementwise kernels give empty parts their shape, so nobody need ask which ranks have one; but not
    # where something is broadcast beside elements that no label tells: (1, 0) and (0, 1) give (0, 0). Nor
    # where they want a tensor of no dims, of which a coord that does not hold it has (0,): `fill_`.
    number = any(not x.shape and any(p.is_partition for p in x.placements) for x in inputs)
    broadcast = len({layout.shape for layout in layouts}) > 1
    shaped = equation.formula.elementwise and not (
        number or any(one.alone or (broadcast and one.scattered) for one in columns)
    )
    return Decision(
        inputs=inputs,
        outputs=_aliased(equation, inputs, outputs),
        reason=_reason(layouts[0], equation, choice, rewrites),
        cost_bytes=choice.price.bytes,
        overrides=tuple(_overrides(equation, layouts[0].sizes, order, choice, outputs)),
        runs_empty=shaped,
        rewrites=rewrites,
        local=_local_call(equation, layouts[0].sizes, order, choice),
        any_size=for_any_size(call, layouts, equation, choice, inputs, outputs),
        same_way=partial(same_way, call, layouts, equation, inputs, outputs),
    )


def _moved(layout: Layout, wanted: tuple[Placement, ...], order: tuple[int, ...]) -> Layout:
    if wanted == layout.placements and (layout.order == order or not order_matters(layout)):
        return layout
    return layout.with_placements(wanted, order=_names(layout, order))


def _made(
    like: Layout, info: TensorInfo, wanted: Sequence[Placement | None], order: tuple[int, ...]
) -> Layout:
    placements = tuple(REPLICATE if placement is None else placement for placement in wanted)
    return Layout(
        like.mesh_shape,
        placements,
        info.shape,
        dtype=info.dtype,
        stride=info.stride,
        order=_names(like, order),
    )


def _names(layout: Layout, order: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(layout.axes[axis] for axis in order)


def _aliased(
    equation: Equation, inputs: tuple[Layout, ...], outputs: tuple[Layout | None, ...]
) -> tuple[Layout | None, ...]:
    """A result that is an operand has that operand's layout object when the placements agree."""
    found = list(outputs)
    for result, operand in enumerate(equation.aliases):
        output = found[result]
        if operand is not None and output is not None and output.is_placed_as(inputs[operand]):
            found[result] = inputs[operand]
    return tuple(found)


def _reason(layout: Layout, equation: Equation, choice: Choice, rewrites: tuple[int, ...]) -> str:
    axes = "; ".join(
        f"{axis}: {candidate.text}" for axis, candidate in zip(layout.axes, choice.candidates, strict=True)
    )
    text = f"[{equation.formula.text}] {axes}"
    if rewrites:
        names = ", ".join(equation.operands[operand].name for operand in rewrites)
        text += f"; {names} is written but cannot keep its layout"
    return text


def _fallback(call: Call, layouts: tuple[Layout, ...], problems: list[str]) -> Decision:
    whole = tuple(_moved(layout, (REPLICATE,) * len(layout.sizes), layout.order) for layout in layouts)
    everywhere = [REPLICATE] * len(layouts[0].sizes)
    outputs = tuple(
        None if info is None else _made(layouts[0], info, everywhere, layouts[0].order)
        for info in call.results
    )
    why = "; ".join(problems) if problems else "no rule"
    operands = call.flat_operands
    cost = sum(
        prod(layout.shape) * layout.dtype.itemsize
        for layout, new in zip(layouts, whole, strict=True)
        if layout.placements != new.placements
    )
    return Decision(
        inputs=whole,
        outputs=outputs,
        reason=f"{why}; every operand is made whole",
        fallback=True,
        cost_bytes=cost,
        rewrites=tuple(
            i
            for i, layout in enumerate(layouts)
            if operands[i].mutated and layout.placements != whole[i].placements
        ),
    )


# ---------------------------------------------------------------------------------- local arguments


def _overrides(
    equation: Equation,
    sizes: tuple[int, ...],
    order: tuple[int, ...],
    choice: Choice,
    outputs: tuple[Layout | None, ...],
) -> Iterator[tuple[str, LocalArg]]:
    strides = equation.formula.strides
    if not equation.ints and not equation.shapes and not strides:
        return
    if outputs and outputs[0] is not None and not outputs[0].is_fully_replicated:
        yield from ((name, ResultStride(outputs[0])) for name in strides)
    labels = _label_sizes(equation, sizes, order, choice)
    for name, label in equation.ints:
        if labels[label].cuts:
            yield name, LocalInt((labels[label],))
    for name, dims in equation.shapes:
        slot, output = (equation.results[0], outputs[0]) if outputs else (None, None)
        if slot is not None and output is not None and slot.dims == dims:
            if not output.is_fully_replicated:
                yield name, ResultShape(output)
        elif any(labels[f.label].cuts for dim in dims for f in dim.factors if f.label >= 0):
            yield name, LocalShape(tuple(_local_dim(dim, labels) for dim in dims))


def _local_call(
    equation: Equation, sizes: tuple[int, ...], order: tuple[int, ...], choice: Choice
) -> LocalCall | None:
    stated = equation.formula
    if stated.local is None:
        return None
    labels = dict(zip(equation.labels, _label_sizes(equation, sizes, order, choice), strict=True))
    held = tuple((name, labels[name]) for name in stated.held if name in labels)
    return LocalCall(stated.local, held) if any(label.cuts for _, label in held) else None


def _label_sizes(
    equation: Equation, sizes: tuple[int, ...], order: tuple[int, ...], choice: Choice
) -> list[LabelSize]:
    labels = [LabelSize(size) for size in equation.sizes]
    for axis in order:
        candidate = choice.candidates[axis]
        if candidate.label is not None and candidate.part is not None:
            before = labels[candidate.label]
            step = (axis, sizes[axis], candidate.part)
            labels[candidate.label] = LabelSize(before.size, (*before.cuts, step))
    return labels


def _local_dim(dim: Dim, labels: list[LabelSize]) -> LocalInt:
    return LocalInt(tuple(labels[f.label] if f.label >= 0 else LabelSize(f.size) for f in dim.factors))
