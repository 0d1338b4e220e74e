"""The norm of all gradients together, and its limit."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.comm.bucket import DEFAULT_BUCKET_BYTES
from shardwright.comm.functional import reduce_over
from shardwright.compat import foreach_mul_, foreach_norm
from shardwright.context.submesh import groups_above_one
from shardwright.errors import ConfigError, ParallelError, ShardwrightError, refuse_other_kind
from shardwright.grads.alike import Crowd, crowds_of
from shardwright.grads.parameters import (
    Parameters,
    named_parameters,
    refuse_gathered,
    that_may_have_gradients,
)
from shardwright.grads.pending import finish_gradients, tell_lost
from shardwright.grads.stages import SharedByStages, axis_of_all, groups_of, stages_of
from shardwright.remember import remembered
from shardwright.tensor.spec import Token
from shardwright.tensor.wrap import as_ours

_REASON, _LOST = "norm of gradients", math.inf
_Key = tuple[DeviceMesh | None, tuple[str, ...], SharedByStages | None]


class NonFiniteNormError(ShardwrightError, RuntimeError):
    """The norm of the gradients is infinite or no number."""


@torch.no_grad()
def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients in place to a norm, as one vector, of at most `max_norm`; return the norm before.

    Parameters may live on different meshes (dense ones and experts) and in any layout. Each element counts
    once: norms of parts are added over the axes that cut a parameter, not over those that replicate it. A
    gradient that is still pending is summed first, as `GradientSynchronizer` does (the norm of a sum is not
    the sum of norms). Plain tensors are taken to be equal on all ranks. Parameters of a pipeline
    (`parallelize_pipeline`) are of one vector with those of the other stages, tied ones counted once. Sums
    are in float64.

    Args:
        parameters: a module, one tensor, tensors, or (name, tensor) pairs; the same on every rank. Of a
            pipeline those of this rank, which may be none where its stages are frozen. A gradient counts
            whether its parameter is frozen now or not, as in torch's own.
        max_norm: the limit.
        norm_type: p of the p-norm, above 0; `inf` for the largest absolute value.
        error_if_nonfinite: raise, before anything is scaled, instead of scaling by a number that is none.
        foreach: False: one kernel per tensor instead of one per list.

    Returns: a plain 0-d tensor, at least float32, the same on every rank.

    Raises:
        NonFiniteNormError: see `error_if_nonfinite`.
        ConfigError: `norm_type` is not above 0, or `max_norm` below; a parameter is pending (`Partial`) where
            its gradient is too; no parameters, beside pipelines on several axes.
        ParallelError: another rank raises one of these, or has a gradient that it cannot read.

    Cost: per mesh axis one all-reduce of about a kilobyte, which adds up norms and tells whether all ranks
        have the same gradients; a few bytes per parameter more where they have not, and what
        `GradientSynchronizer.synchronize` sends where some are pending; of a pipeline one of 16 bytes over
        its stages.
    """
    named = named_parameters(parameters)
    stages = list(dict.fromkeys(held.mesh for held in map(stages_of, named.values()) if held is not None))
    stages = stages if named else axis_of_all()
    wanted = that_may_have_gradients(named)
    distributed = {name: p for name, p in wanted.items() if isinstance(p, TorchDTensor)}
    fused = foreach is not False
    crowds, said = list(crowds_of(distributed).values()), _as_others(norm_type)
    try:
        with _heard(crowds, said):
            max_norm, norm_type = _checked(max_norm, norm_type, error_if_nonfinite, foreach)
            if len(distributed) < len(wanted):
                refuse_gathered(wanted)
            states = [crowd.states() for crowd in crowds]
        powers = _powers(crowds, states, norm_type, fused=fused)
    except ShardwrightError:
        if stages:
            zero = torch.zeros((), dtype=torch.float64, device=stages[0].device_type)
            with suppress(ParallelError):
                _over_stages(zero, stages, said, wide=_LOST)
        raise
    groups = _group(wanted.values())
    total = _total_norm(groups, powers, stages, norm_type, fused=fused)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise NonFiniteNormError(
            f"the {norm_type:g}-norm of the gradients is {total.item()}, so they cannot be clipped; look for "
            "the parameter whose gradient is not finite, or pass error_if_nonfinite=False"
        )
    _scale([local for locals_ in groups.values() for local in locals_], max_norm, total, fused=fused)
    return total


def _checked(max_norm: Any, norm_type: Any, error_if_nonfinite: Any, foreach: Any) -> tuple[float, float]:
    """The two numbers. Raises: ConfigError: an argument is not what it must be."""
    fix = "True or False"
    refuse_other_kind("error_if_nonfinite", error_if_nonfinite, bool, ConfigError, fix=fix)
    refuse_other_kind("foreach", foreach, (bool, NoneType), ConfigError, fix=f"{fix}, or None")
    limit, p = _number("max_norm", max_norm), _number("norm_type", norm_type)
    if not p > 0:
        raise ConfigError(f"norm_type={p} is no norm; use a number above 0, or inf")
    return limit, p


@contextmanager
def _heard(crowds: Sequence[Crowd], norm_type: float) -> Iterator[None]:
    """Inside, a rank looks at what it has; of an error hear those that wait for it in the first sum."""
    try:
        yield
    except Exception:
        for crowd in crowds[:1]:
            kinds = 0 if norm_type == math.inf else sum(map(_is_cut, _group(crowd.parameters.values())))
            zeros = torch.zeros(kinds, dtype=torch.float64, device=crowd.mesh.device_type)
            crowd.total(zeros, None, reason=_REASON)
            tell_lost(crowd.parameters)
        raise


def _as_others(norm_type: Any) -> float:
    """What it is where it is right on other ranks: of what is none here nobody knows, and most say 2."""
    try:
        return _number("norm_type", norm_type)
    except ConfigError:
        return 2.0


def _number(name: str, given: Any) -> float:
    """Return it as a float, or raise ConfigError where it is none, below 0 or NaN."""
    try:
        found = math.nan if isinstance(given, bool) else float(given)  # a tensor and a text, as torch
    except (TypeError, ValueError, RuntimeError):
        found = math.nan
    if not found >= 0:
        raise ConfigError(f"{name}={given!r:.60} is no norm; use a number above 0, or inf")
    return found


def _powers(
    crowds: Sequence[Crowd], states: Sequence[tuple[int, bool]], p: float, *, fused: bool
) -> dict[_Key, Tensor]:
    """Return the sum of |x|^p of each kind of cut over its ranks, of finished gradients.

    Of the infinity norm none: it is no sum. One all-reduce per axis tells too whether all ranks have the same
    gradients, so that most steps need no other; where they are not, or are still pending, they are brought to
    their parameters' layouts first.
    """
    found: dict[_Key, Tensor] = {}
    for crowd, (digest, finished) in zip(crowds, states, strict=True):
        local = {} if math.isinf(p) else _group(crowd.parameters.values())
        keys = [key for key in local if _is_cut(key)]  # of parameters: as many on every rank
        terms = torch.zeros(len(keys), dtype=torch.float64, device=crowd.mesh.device_type)
        for at, key in enumerate(keys if finished else ()):
            terms[at] = _local_power(local[key], p, fused=fused) / _copies(key)
        sums, alike = crowd.total(terms, digest, reason=_REASON)
        if alike and finished:
            found.update(zip(keys, sums.unbind(), strict=True))
        else:
            finish_gradients(crowd.parameters, DEFAULT_BUCKET_BYTES, agreed=alike)
    return found


def _is_cut(key: _Key) -> bool:
    mesh, cut, _ = key
    return mesh is not None and any(axis in cut for axis, _ in groups_above_one(mesh))


def _copies(key: _Key) -> int:
    """How many ranks hold each part."""
    mesh, cut, _ = key
    if mesh is None:
        return 1
    return math.prod(group.size() for axis, group in groups_above_one(mesh) if axis not in cut)


def _group(parameters: Iterable[Tensor]) -> dict[_Key, list[Tensor]]:
    """Return the local gradients by mesh and by the axes that cut the parameter.

    Keys come from parameters, not from gradients: every rank has all of them, in the same order, and meets
    its peers in every reduction, with gradients or without.
    """
    groups: defaultdict[_Key, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None and not parameter.requires_grad and _is_pending(parameter):
            continue
        spec = as_ours(parameter)._spec if isinstance(parameter, TorchDTensor) else None
        mesh, cut = (None, ()) if spec is None else _mesh_and_cut(spec.token)
        members = groups[mesh, cut, stages_of(parameter)]
        if gradient is not None:
            members.append(gradient._local_tensor if isinstance(gradient, TorchDTensor) else gradient)
    return groups


def _is_pending(parameter: Tensor) -> bool:
    return isinstance(parameter, TorchDTensor) and bool(as_ours(parameter)._spec.layout.pending_axes)


@remembered(4096)
def _mesh_and_cut(parameter: Token) -> tuple[DeviceMesh, tuple[str, ...]]:
    """Return where a parameter's norm must be added up: its mesh, and the axes that cut it."""
    layout = parameter.spec.layout
    if layout.pending_axes:
        raise ConfigError(f"a gradient in {layout} has no norm by parts; use torch.nn.utils.clip_grad_norm_")
    cut = tuple(a for a, p in zip(layout.axes, layout.placements, strict=True) if p.is_partition)
    return parameter.spec.mesh, cut


def _total_norm(
    groups: dict[_Key, list[Tensor]],
    known: dict[_Key, Tensor],
    stages: list[DeviceMesh],
    p: float,
    *,
    fused: bool,
) -> Tensor:
    """Return the p-norm of everything in `groups`, over all ranks.

    Args:
        known: powers that are summed already.
        stages: the axes of pipelines that the parameters are of, frozen ones too: their stages may train.
    """
    if not groups and not stages:
        return torch.tensor(0.0, device="cpu")
    powers = [
        known[key] if key in known else _reduced_power(key, locals_, p, fused=fused)
        for key, locals_ in groups.items()
    ]
    zero = torch.zeros((), dtype=torch.float64, device=stages[0].device_type if stages else "cpu")
    device = next((power.device for power in (*powers, zero) if power.device.type != "cpu"), zero.device)
    here, staged = [zero.to(device)], [zero.to(device)]
    for (_, _, held), power in zip(groups, powers, strict=True):
        if held is None or held.counts:
            (here if held is None else staged).append(power.to(device))
    dtypes = [local.dtype for locals_ in groups.values() for local in locals_]
    wide = torch.float64 in dtypes or torch.complex128 in dtypes
    if stages:
        power, wide = _over_stages(_joined(staged, p), stages, p, wide=wide)
        here.append(power)
    total = _joined(here, p) if math.isinf(p) else _joined(here, p) ** (1.0 / p)
    return total.to(torch.float64 if wide else torch.float32)


def _joined(powers: Sequence[Tensor], p: float) -> Tensor:
    """Return the power of several parts together."""
    stacked = torch.stack(list(powers))
    return stacked.max() if math.isinf(p) else stacked.sum()


def _over_stages(power: Tensor, stages: list[DeviceMesh], p: float, *, wide: float) -> tuple[Tensor, bool]:
    """Return the power of all stages of a pipeline, of which this rank has that of its own; is one wide?

    Args: wide: has a gradient of this rank more than 32 bits? The norm has one dtype on all stages.
    Raises: ParallelError: a rank says that it is lost.
    """
    both = torch.stack([power, torch.full_like(power, float(wide))])
    for axis, group in groups_of(stages):
        op = "max" if p == math.inf else "sum"
        both = reduce_over(both, op, group, axis=axis, reason="norm of gradients over stages")
    if float(both[1]) == _LOST:
        raise ParallelError("clip_grad_norm_: a rank of another stage cannot go on, as its own error says")
    return both[0], bool(both[1])


def _reduced_power(key: _Key, locals_: Sequence[Tensor], p: float, *, fused: bool) -> Tensor:
    """Return the sum of |x|^p (for inf: the largest |x|) over the ranks that cut these gradients."""
    mesh, cut, _ = key
    power = _local_power(locals_, p, fused=fused)
    if mesh is None:
        return power
    power = power.to(mesh.device_type)
    for axis, group in groups_above_one(mesh):
        if axis in cut:
            op = "max" if math.isinf(p) else "sum"
            power = reduce_over(power, op, group, axis=axis, reason=_REASON)
    return power


def _local_power(locals_: Sequence[Tensor], p: float, *, fused: bool) -> Tensor:
    """Return the sum of |x|^p (for inf: the largest |x|) of this rank's parts, 0-d float64."""
    filled = [local.abs() if local.is_complex() else local for local in locals_ if local.numel()]
    if not filled:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    if p != _SQUARES:
        return _power_of(filled, p, fused=fused)
    long: list[Tensor] = []
    short: list[Tensor] = []
    for local in filled:
        (long if _is_long(local) else short).append(local)
    if not long:
        return _power_of(short, p, fused=fused)
    squares = _squares_by_chunks(long)
    return squares + _power_of(short, p, fused=fused).to(squares.device) if short else squares


_SQUARES = 2.0
_CHUNK = 2048


def _is_long(local: Tensor) -> bool:
    """Is it one for `_squares_by_chunks`?"""
    usual = local.dtype == torch.float32 and local.device.type == "cpu" and local.is_contiguous()
    return usual and local.numel() > 8 * _CHUNK


def _squares_by_chunks(parts: Sequence[Tensor]) -> Tensor:
    """The sum of all squares: of each chunk in float32, of the chunks in float64.

    On the CPU torch makes a float64 of each element where that is the dtype of a sum, which takes three times
    as long; and float32 alone loses five of its digits in a tensor of a million. Squares that float32 does
    not hold (of 1e20) are infinite, as in torch's own function.
    """
    norms = []
    for part in parts:
        flat = part.view(-1)
        whole = flat.numel() // _CHUNK * _CHUNK
        chunks = (flat[:whole].view(-1, _CHUNK), flat[whole:].view(1, -1))
        norms += [torch.linalg.vector_norm(rows, dim=1) for rows in chunks]  # of no elements it is 0
    return torch.cat(norms).double().square().sum()


def _power_of(filled: list[Tensor], p: float, *, fused: bool) -> Tensor:
    """The same of tensors none of which is empty, each as a whole."""
    if fused:
        norms: Sequence[Tensor] = foreach_norm(filled, p, dtype=torch.float64)
    else:
        norms = [torch.linalg.vector_norm(local, p, dtype=torch.float64) for local in filled]
    device = norms[0].device
    stacked = torch.stack([norm.to(device) for norm in norms])
    return stacked.max() if math.isinf(p) else stacked.pow(p).sum()


def _scale(locals_: Sequence[Tensor], max_norm: float, total: Tensor, *, fused: bool) -> None:
    """Multiply by min(1, max_norm / (total + 1e-6)), the factor that torch's function uses."""
    factor = (float(max_norm) / (total + 1e-6)).clamp(max=1.0)
    by_device: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for local in locals_:
        by_device[local.device].append(local)
    for device, members in by_device.items():
        here = factor.to(device)
        if fused:
            foreach_mul_(members, here)
        else:
            for local in members:
                local.mul_(here)
