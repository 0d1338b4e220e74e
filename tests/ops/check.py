"""One case on one rank: the operator on plain tensors, then on DTensors, value and gradients compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map

import shardwright as sw
from shardwright.tensor.dispatch import call as dispatch
from shardwright.tensor.dispatch.ways.algorithm import ByAlgorithm
from tests.ops.cases import ERROR, LENIENT, OK, WRONG, Case, Record
from tests.ops.compare import difference, strides_differ, whole
from tests.ops.database import seed
from tests.ops.modes import MODES
from tests.ops.placing import copied, place, placed, placements_for

Arguments = tuple[Any, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """Results and gradients of a run, or the error that ended it, with the stage that it was in."""

    results: Any = None
    gradients: tuple[Any, ...] | None = None
    error: Exception | None = None
    stage: str = ""


def check(
    info: Any,
    case: Case,
    sample: Any,
    mesh: DeviceMesh,
    alike: Callable[[str], bool],
    *,
    backward: bool,
    under: str = "",
) -> Record:
    """Compare one case; every rank of the mesh calls it together. `under`: in which of the modes both run.

    `alike(text)`: do all ranks say the same text here? Where they do not, nothing is gathered any more.
    """
    given: Arguments = (sample.input, sample.args, sample.kwargs)
    process = _process(case, sample)
    with MODES[under]():
        wanted = reference(info, case, given, process, backward=backward)
    record = Record(case, tuple(mesh.shape), OK)
    try:
        with MODES[under]():
            arguments = placed(copied(given), case.kind, mesh, mixed=case.mixed)
    except Exception as error:  # noqa: BLE001
        record.verdict, record.text, record.stage = ERROR, _line(error), "placing"
        return record
    with sw.trace() as trace, _seen(record.rules), MODES[under]():
        got = _run(info, case, arguments, wanted, mesh, process, backward=backward)
    record.bytes = trace.bytes
    record.fallbacks = sorted({d.op for d in trace.decisions if d.reason.startswith("fallback")})
    if not alike("" if got.error is None else type(got.error).__name__):
        text = "an error on another rank" if got.error is None else _line(got.error)
        record.verdict, record.text, record.stage = ERROR, text, got.stage
        return record
    record.verdict, record.text, record.stage = _verdict(info, case, sample, got, wanted, backward)
    return record


def reference(
    info: Any, case: Case, given: Arguments, process: Callable[[Any], Any], *, backward: bool
) -> Outcome:
    """What one device answers."""
    return _run(info, case, copied(given), None, None, process, backward=backward)


def _verdict(
    info: Any, case: Case, sample: Any, got: Outcome, wanted: Outcome, backward: bool
) -> tuple[str, str, str]:
    if got.error is not None:
        # An error of one device is its answer, in the backward pass too.
        expected = wanted.error is not None
        return (OK, "", "") if expected else (ERROR, _line(got.error), got.stage)
    if wanted.error is not None:
        return LENIENT, f"one device: {_line(wanted.error)}", wanted.stage
    try:
        results, gradients = whole(got.results), whole(got.gradients)
    except Exception as error:  # noqa: BLE001
        return ERROR, _line(error), "full_tensor"
    plain = _plain_results(got, wanted)
    if plain:
        return WRONG, plain, "forward"
    order = strides_differ(got.results, wanted.results)
    if order:
        return WRONG, order, "forward"
    text = difference(results, wanted.results)
    if text and _same_invariants(sample, results, wanted.results):
        return OK, "", ""
    if not text and gradients is not None:
        text = difference(gradients, wanted.gradients)
        if text and not _is_rounding(info, case, sample, gradients, wanted.gradients, 1):
            return WRONG, f"gradient: {text}", "backward"
        return OK, "", ""
    if text and not _is_rounding(info, case, sample, results, wanted.results, 0):
        return WRONG, text, "forward"
    return OK, "", ""


def _plain_results(got: Outcome, wanted: Outcome) -> str:
    """A DTensor goes in, so a DTensor must come out; its gradient is one too."""
    for what, tree in (("result", got.results), ("gradient", got.gradients)):
        leaves = [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
        if any(not isinstance(x, sw.DTensor) for x in leaves):
            return f"a {what} is a plain tensor"
    return ""


def _same_invariants(sample: Any, got: Any, wanted: Any) -> bool:
    """Factorizations are unique up to signs: compare what torch's own tests differentiate."""
    process = sample.output_process_fn_grad
    try:
        return not difference(process(got), process(wanted))
    except Exception:  # noqa: BLE001
        return False


def _is_rounding(info: Any, case: Case, sample: Any, got: Any, wanted: Any, part: int) -> bool:
    """Is the distance no more than a few times one device's own, from the value in double precision?

    Where the problem amplifies rounding (an ill-conditioned system), one device is as far off.
    """
    if not hasattr(torch, case.dtype) or case.dtype not in {"float32", "complex64"}:
        return False
    wide = tree_map(_widened, (sample.input, sample.args, sample.kwargs))
    process = _process(case, sample)
    exact = reference(info, case, wide, process, backward=part == 1)
    if exact.error is not None:
        return False
    truth = exact.gradients if part else exact.results
    for g, w, t in zip(*(tree_leaves(x) for x in (got, wanted, truth)), strict=True):
        if not isinstance(w, torch.Tensor) or not w.numel() or not w.dtype.is_floating_point:
            continue
        own = (w.detach().double() - t.detach()).abs().max()
        if not bool((g.detach().double() - t.detach()).abs().max() <= 8 * own):
            return False
    return True


def _process(case: Case, sample: Any) -> Callable[[Any], Any]:
    return sample.output_process_fn_grad if case.form == "call" else lambda results: results


def _widened(x: Any) -> Any:
    if not isinstance(x, torch.Tensor) or not (x.dtype.is_floating_point or x.dtype.is_complex):
        return x
    wide = torch.complex128 if x.dtype.is_complex else torch.float64
    return x.detach().to(wide).requires_grad_(x.requires_grad)


def _run(
    info: Any,
    case: Case,
    arguments: Arguments,
    wanted: Outcome | None,
    mesh: DeviceMesh | None,
    process: Callable[[Any], Any],
    *,
    backward: bool,
) -> Outcome:
    """The operator and its gradients; without a mesh this is the reference.

    `process`: what of the results has gradients that are defined, as torch's own tests have it.
    """
    seed()
    stage = "forward"
    try:
        call = _FORMS[case.form](info, case, arguments, wanted, mesh)
        results = call()
        stage = "backward"
        leaves = [x for x in tree_leaves(arguments) if isinstance(x, torch.Tensor) and x.requires_grad]
        gradients = None
        if backward and case.form != "out=":
            gradients = _gradients(process(results), leaves, mesh)
    except Exception as error:  # noqa: BLE001
        return Outcome(error=error, stage=stage)
    return Outcome(results, gradients)


def _called(info: Any, case: Case, arguments: Arguments, *_: Any) -> Callable[[], Any]:
    x, args, kwargs = arguments
    return lambda: info(x, *args, **kwargs)


def _in_place(info: Any, case: Case, arguments: Arguments, *_: Any) -> Callable[[], Any]:
    x, args, kwargs = arguments
    operator = info.inplace_variant
    if not isinstance(x, torch.Tensor):
        raise TypeError("there is no tensor to write into")

    def call() -> Any:
        target = x.clone()
        result = operator(target, *args, **kwargs)
        return [target, result]

    return call


def _out(
    info: Any, case: Case, arguments: Arguments, wanted: Outcome | None, mesh: DeviceMesh | None
) -> Callable[[], Any]:
    """With `out=`: tensors of the right shapes, full of something else, placed as the operands are."""
    x, args, kwargs = tree_map(lambda v: v.detach() if isinstance(v, torch.Tensor) else v, arguments)
    if wanted is None:
        likes = info(x, *args, **kwargs)
        seed()
    else:
        likes = wanted.results[0]

    def target(like: torch.Tensor) -> torch.Tensor:
        full = torch.ones_like(like)
        if mesh is None:
            return full
        placements = placements_for(case.kind, full, mesh, mixed=case.mixed)
        return place(full, mesh, [sw.Replicate() if p.is_partial() else p for p in placements])

    out = tree_map(target, likes)

    def call() -> Any:
        result = info(x, *args, **kwargs, out=out)
        if wanted is not None:
            return [out, result]
        # The truth is the value itself: torch's own `out=` of ihfftn leaves it unwritten.
        return [likes, None if result is None else likes]

    return call


_FORMS: dict[str, Callable[..., Callable[[], Any]]] = {"call": _called, "in place": _in_place, "out=": _out}


def _gradients(
    results: Any, leaves: list[torch.Tensor], mesh: DeviceMesh | None
) -> tuple[torch.Tensor | None, ...] | None:
    """The gradients of a sum with unlike weights; those come in the layouts that the results have."""
    outs = [x for x in tree_leaves(results) if isinstance(x, torch.Tensor) and x.requires_grad]
    outs = list({id(x): x for x in outs}.values())
    if not outs or not leaves:
        return None
    weights = [_weight(x, mesh) for x in outs]
    return torch.autograd.grad(outs, leaves, weights, allow_unused=True)


def _weight(x: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    angles = torch.arange(x.numel(), dtype=torch.float64).reshape(x.shape)
    full = (torch.cos(angles) + (1j * torch.sin(angles) if x.dtype.is_complex else 0)).to(x.dtype)
    if mesh is None:
        return full
    assert isinstance(x, sw.DTensor)
    return place(full, mesh, [sw.Replicate() if p.is_partial() else p for p in x.placements])


@contextlib.contextmanager
def _seen(rules: dict[str, str]) -> Iterator[None]:
    """Note the reason that each ATen operator's decision gave, and the algorithms."""
    run, by_algorithm = dispatch.run, ByAlgorithm.run

    def noting(prepared: Any, func: Any, *rest: Any) -> Any:
        rules[func.name()] = f"fallback: {prepared.reason}" if prepared.fallback else prepared.reason
        return run(prepared, func, *rest)

    def noting_algorithm(self: Any, *rest: Any) -> Any:
        rules[self.call.op.name()] = f"algorithm: {self.chosen.reason}"
        return by_algorithm(self, *rest)

    dispatch.run, ByAlgorithm.run = noting, noting_algorithm
    try:
        yield
    finally:
        dispatch.run, ByAlgorithm.run = run, by_algorithm


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:400]
