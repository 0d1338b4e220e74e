"""One program on one rank: on plain tensors, then on DTensors; everything that can be seen is compared.

Every other program is compared when it runs for the second time: its calls are known then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.tensor.distribute import own_part
from shardwright.tensor.spec import coords_of
from tests.fuzz.compiled import is_told, one_device_fails_too, run_compiled
from tests.fuzz.erased import run_erased
from tests.fuzz.program import Program, Ref, values_in
from tests.fuzz.run import OnMesh, Outcome, Plain, run
from tests.fuzz.tolerance import SAFETY, Truth, floor
from tests.fuzz.verdicts import OK, SILENT, UNDUE, WRONG, Verdict


def check(
    program: Program, mesh: DeviceMesh, alike: Callable[[str], bool], *, erased: bool = False
) -> Verdict:
    """Compare; every rank of the mesh calls it together.

    Args:
        alike: do all ranks say the same text here? Where they do not, nothing is gathered any more.
        erased: compare a replay. A program that ends in an error of one device has none.
    """
    wanted = run(program, Plain())
    if _values_decide(wanted.error):
        program = replace(program, steps=program.steps[: wanted.step])
        wanted = run(program, Plain())
    truth = Truth(program, wanted)
    if (erased or program.compiled) and wanted.error is not None:
        return Verdict(OK)
    got = _run(program, mesh, erased=erased)
    if program.seed % 2 and wanted.error is None and got.error is None and not (erased or program.compiled):
        got = run(program, OnMesh(mesh))  # by what was kept of the first time
    said = f"{got.step} {type(got.error).__name__}"
    if not alike(said):
        text = _line(got.error) if got.error is not None else "an error on another rank only"
        return Verdict(UNDUE, f"ranks part: {text}", _step(program, got.step))
    if program.compiled and is_told(got.error):
        return Verdict(OK, "told")
    verdict = _ends(program, truth.wanted, got)
    if verdict is None:
        with torch.no_grad():
            verdict = _Comparison(program, truth, got).verdict()
    if verdict.kind != OK and program.compiled and one_device_fails_too(program, wanted):
        return Verdict(OK, f"of torch's compiler: {verdict.text}", verdict.step)
    return verdict


def _run(program: Program, mesh: DeviceMesh, *, erased: bool) -> Outcome:
    if program.compiled:
        return run_compiled(program, OnMesh(mesh))
    return run_erased(program, mesh) if erased else run(program, OnMesh(mesh))


def _values_decide(error: BaseException | None) -> bool:
    """Does one device raise for some values? Then the ranks that hold them raise, and the others may wait.

    docs/limits.md says so. What a kernel had written when it stopped is nobody's promise: the steps before
    are compared.
    """
    return error is not None and "ZeroDivisionError" in str(error)


def _ends(program: Program, wanted: Outcome, got: Outcome) -> Verdict | None:
    """An error of one device is its answer."""
    if got.error is not None and (wanted.error is None or got.step < wanted.step):
        return Verdict(UNDUE, _line(got.error), _step(program, got.step))
    if wanted.error is not None and (got.error is None or got.step > wanted.step):
        return Verdict(SILENT, f"one device: {_line(wanted.error)}", _step(program, wanted.step))
    return None


GATHERED = 4  # of the values without pending axes, one in so many is compared by its `full_tensor`


@lru_cache(maxsize=4096)
def _own_places(layout: sw.Layout, coords: tuple[int, ...]) -> torch.Tensor:
    """The number of each element that a rank holds, row-major."""
    return own_part(torch.arange(layout.numel).view(layout.shape), layout, coords)


def _coords(x: DTensor) -> tuple[int, ...]:
    coords = coords_of(x.device_mesh)
    assert coords is not None
    return coords


class _Comparison:
    def __init__(self, program: Program, truth: Truth, got: Outcome) -> None:
        self.program, self.truth, self.wanted, self.got = program, truth, truth.wanted, got
        self.unstable = self.compared = 0
        self.first: Verdict | None = None

    def verdict(self) -> Verdict:
        """The first fault; all is gathered even so, for a peer that sees none gathers what comes after it."""
        for fault in self.faults():
            self.first = self.first or fault
        return self.first or Verdict(OK, unstable=self.unstable, replayed=self.got.replayed)

    def faults(self) -> Iterator[Verdict]:
        given = _given_gradients(self.program)
        for name, wanted in self.wanted.env.items():
            if name in given:
                continue
            text = self.of_value(lambda o, n=name: o.env[n], self.got.env.get(name), wanted)
            if text:
                yield Verdict(WRONG, f"{name}: {text}", self.maker(name))
        for leaf in self.program.leaves:
            grad = _grad(self.wanted, leaf.name)
            if grad is None and self.program.compiled and _is_zero(_grad(self.got, leaf.name)):
                continue  # a compiled backward gives a gradient to all that its graph was given
            text = self.of_value(lambda o, n=leaf.name: _grad(o, n), _grad(self.got, leaf.name), grad)
            if text:
                yield Verdict(WRONG, f"gradient of {leaf.name}: {text}", "gradient")
        for step, wanted_names, names in zip(
            self.program.steps, self.wanted.written, self.got.written, strict=False
        ):
            grown, wanted_grown = (
                [name for name in some if name not in given] for some in (names, wanted_names)
            )
            if grown != wanted_grown:
                yield Verdict(WRONG, f"version counters grew of {grown} for {wanted_grown}", step.source())

    def maker(self, name: str) -> str:
        last = ""
        for step, names in zip(self.program.steps, self.wanted.written, strict=False):
            if name in step.outs or name in names:
                last = step.source()
        return last

    def of_value(self, find: Callable[[Outcome], Any], got: Any, wanted: Any) -> str:
        if isinstance(wanted, torch.Tensor):
            return self.of_tensor(find, got, wanted)
        if isinstance(wanted, int | float | complex | list) and not isinstance(wanted, bool):
            return self.of_numbers(find, got, wanted)
        if isinstance(wanted, bool):
            return "" if got is wanted or self.moves(find, wanted) else f"{got!r} for {wanted!r}"
        return "" if type(got) is type(wanted) or wanted is not None else f"{type(got).__name__} for None"

    def moves(self, find: Callable[[Outcome], Any], wanted: Any) -> bool:
        """Does noise alone change it? Behind a fault nobody asks."""
        moved = self.first is not None or any(find(o) != wanted for o in self.truth.decided_by_rounding())
        self.unstable += moved
        return moved

    def of_numbers(self, find: Callable[[Outcome], Any], got: Any, wanted: Any) -> str:
        if type(got) is not type(wanted):
            return f"{type(got).__name__} for {type(wanted).__name__}"
        try:
            one, two = torch.tensor(got), torch.tensor(wanted)
        except (TypeError, ValueError, RuntimeError):
            return "" if got == wanted else f"{got!r} for {wanted!r}"
        if one.shape != two.shape:
            return f"{got!r} for {wanted!r}"
        if not (two.is_floating_point() or two.is_complex()):
            return "" if torch.equal(one, two) or self.moves(find, wanted) else f"{got!r} for {wanted!r}"
        dtype = self.lowest()
        return self.of_floats(lambda o: torch.tensor(find(o)), one, two, dtype)

    def lowest(self) -> torch.dtype:
        """A number that was read forgot its type: the coarsest of the program's."""
        found = {
            x.dtype for x in self.wanted.env.values() if isinstance(x, torch.Tensor) and x.is_floating_point()
        }
        return max(found or {torch.float32}, key=lambda dtype: torch.finfo(dtype).eps)

    def of_tensor(self, find: Callable[[Outcome], Any], got: Any, wanted: torch.Tensor) -> str:
        if not isinstance(got, DTensor):
            return f"{type(got).__name__} for a DTensor"
        if got.dtype != wanted.dtype:
            return f"dtype {got.dtype} for {wanted.dtype}"
        if got.shape != wanted.shape:
            unstable = self.moves(lambda o: find(o).shape, wanted.shape)
            return "" if unstable else f"shape {tuple(got.shape)} for {tuple(wanted.shape)}"
        if not self.got.detached and self.is_followed(wanted) and _wants_grad(got) != _wants_grad(wanted):
            return f"requires_grad {_wants_grad(got)} for {_wants_grad(wanted)}"
        full = self.whole(got, wanted)
        if self.first is not None:
            return ""
        if full is None:
            return f"its local part is {tuple(got.detach().to_local().shape)} of {sw.layout_of(got)}"
        if full.dtype != wanted.dtype or full.shape != wanted.shape:
            return f"its full tensor is {full.dtype} {tuple(full.shape)}"
        if wanted.is_floating_point() or wanted.is_complex():
            return self.of_floats(lambda o: find(o).detach(), full, wanted.detach(), wanted.dtype)
        if torch.equal(full, wanted):
            return ""
        wrong = full != wanted
        for o in self.truth.decided_by_rounding():
            found = find(o)
            wrong &= (found == wanted) if found is not None and found.shape == wanted.shape else False
            if not bool(wrong.any()):
                self.unstable += 1
                return ""
        return _first(full, wanted, wrong)

    def is_followed(self, wanted: torch.Tensor) -> bool:
        """Does what its graph says hold? Some of the formulas for views leave it if there are no elements."""
        empty = any(isinstance(x, torch.Tensor) and not x.numel() for x in self.wanted.env.values())
        return not empty or bool(wanted.detach().count_nonzero())

    def whole(self, got: DTensor, wanted: torch.Tensor) -> torch.Tensor | None:
        """The value to compare; where nothing is pending, mostly one device's but for this rank's own part.

        All ranks look, so all elements are seen, and each copy of them, while nothing is sent. None: the
        local part has another shape than its layout says.
        """
        self.compared += 1
        layout = sw.layout_of(got)
        if layout.pending_axes or self.compared % GATHERED == 0:
            return got.detach().full_tensor()
        local, places = got.detach().to_local(), _own_places(layout, _coords(got))
        if local.shape != places.shape:
            return None
        full = wanted.detach().to(local.dtype).clone(memory_format=torch.contiguous_format)
        full.view(-1)[places.flatten()] = local.flatten()
        return full

    def of_floats(
        self, find: Callable[[Outcome], Any], got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype
    ) -> str:
        if not wanted.numel():
            return ""
        wide = torch.complex128 if wanted.is_complex() else torch.float64
        g, w = got.to(wide), wanted.to(wide)
        finite = torch.isfinite(w)
        largest = float(w[finite].abs().max()) if bool(finite.any()) else 0.0
        scale = max(largest, torch.finfo(dtype).tiny)  # below that, numbers lie evenly apart
        unit = floor(len(self.program.steps), prod(self.program.mesh), dtype)
        wrong = ~(((g - w).abs() <= unit * scale) | (g == w) | (torch.isnan(g) & torch.isnan(w)))
        if not bool(wrong.any()):
            return ""
        for inside in (False, True):
            runs = (f for f in map(find, self.truth.noisy(inside=inside)) if f is not None)
            found = [f.to(wide) for f in runs if f.shape == w.shape]
            moved = (
                torch.stack([(f - w).abs() for f in found]).amax(0) if found else torch.zeros_like(w.abs())
            )
            if not bool(torch.isfinite(moved).all()) or not found:
                self.unstable += 1
                return ""
            bound = SAFETY * float(moved.max()) + unit * scale
            wrong &= ~((g - w).abs() <= bound)
            if not bool(wrong.any()):
                return ""
        return _first(got, wanted, wrong) + f", {_apart(g, w):.2g} apart, bound {bound:.2g}"


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().nan_to_num(0, 0).max())


def _given_gradients(program: Program) -> set[str]:
    """What is given to `backward` for outputs.

    Autograd may keep its memory as a leaf's gradient and add to that: no promise of torch says when.
    """
    steps = (step for step in program.steps if step.call == "torch.autograd.backward")
    return {value.name for step in steps for value in values_in(step.args[1]) if isinstance(value, Ref)}


def _wants_grad(x: torch.Tensor) -> bool | None:
    with contextlib.suppress(RuntimeError):
        return x.requires_grad
    return None


def _grad(outcome: Outcome, name: str) -> Any:
    return outcome.env[name].grad


def _first(got: torch.Tensor, wanted: torch.Tensor, wrong: torch.Tensor) -> str:
    at = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{got[at].item()!r} for {wanted[at].item()!r} at {at}, {int(wrong.sum())} of {wrong.numel()} wrong"
    )


def _is_zero(grad: Any) -> bool:
    return isinstance(grad, DTensor) and not bool(grad.full_tensor().count_nonzero())


def _step(program: Program, number: int) -> str:
    return program.steps[number].source() if 0 <= number < len(program.steps) else "placing"


def _line(error: Exception | None) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
