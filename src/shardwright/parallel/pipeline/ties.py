"""Parameters that several stages hold (tied weights): equal everywhere, their gradients summed once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.comm.functional import reduce_over
from shardwright.comm.record import because
from shardwright.context.submesh import groups_above_one
from shardwright.errors import ParallelError
from shardwright.parallel.pipeline.split import Split
from shardwright.parallel.sharded_layouts import in_terms
from shardwright.tensor.spec import spec_of
from shardwright.tensor.wrap import as_ours, wrap


@dataclass
class _Tie:
    """One parameter: first name, what this rank has of it, the ranks that have it; its number among all."""

    name: str
    parameter: nn.Parameter
    ranks: tuple[int, ...]
    number: int


class Ties:
    """The parameters of this rank that other ranks of the axis hold too."""

    def __init__(self, split: Split, model: nn.Module) -> None:
        self.split, self.model = split, model

    def start(self) -> None:
        """Give all holders the values of the first. A collective over the axis.

        Raises: ParallelError: two stages placed it in different ways; on every rank.
        """
        ties = self._held()
        self._check_alike(ties)
        for tie in ties:
            local = _local(tie.parameter.detach())
            if local.is_meta:
                continue
            values = self._exchanged(tie, local, "tied weights of two stages")
            local.copy_(values[0])

    @contextmanager
    def summed(self) -> Iterator[None]:
        """What backwards in the block add to a gradient is summed over its holders; what was there, was."""
        ties = self._held()
        before = [tie.parameter.grad for tie in ties]
        for tie in ties:
            tie.parameter.grad = None
        try:
            yield
            used = self._used(ties)
            sums = [self._total(tie) if used[tie.number] else None for tie in ties]
        except BaseException:
            sums = [None] * len(ties)
            raise
        finally:
            for tie, earlier, total in zip(ties, before, sums, strict=True):
                kept = total if tie.parameter.requires_grad else None
                tie.parameter.grad = _added(earlier, kept)

    def _used(self, ties: list[_Tie]) -> list[bool]:
        """For each parameter of several ranks, whether one of them has a gradient of it.

        Raises: ParallelError: a holder has frozen its copy, or written into it, and another one has not; on
            every rank.
        """
        told = torch.zeros(
            (len(self.split.shared), 5), dtype=torch.int64, device=self.split.mesh.device_type
        ).fill_(_LEAST)
        for tie in ties:
            parameter, digest = tie.parameter, _digest(_local(tie.parameter.detach()))
            states = [parameter.grad is not None, parameter.requires_grad, not parameter.requires_grad]
            told[tie.number, :3] = torch.tensor(states, dtype=torch.int64)
            told[tie.number, 3], told[tie.number, 4] = digest, -digest
        for axis, group in groups_above_one(self.split.mesh) if self.split.shared else ():
            told = reduce_over(told, "max", group, axis=axis, reason="what became of tied weights")
        used = []
        for (names, _), (has, trained, frozen, most, least) in zip(
            self.split.shared, told.tolist(), strict=True
        ):
            if trained > 0 and frozen > 0:
                raise ParallelError(_FROZEN.format(" and ".join(names)))
            if most + least:
                raise ParallelError(_PARTED.format(" and ".join(names)))
            used.append(has > 0)
        return used

    def _total(self, tie: _Tie) -> Tensor:
        gradient = _brought(tie.parameter)
        terms = self._exchanged(tie, _local(gradient), "gradients of tied weights of two stages")
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return wrap(total, as_ours(gradient)._spec) if isinstance(gradient, TorchDTensor) else total

    def _held(self) -> list[_Tie]:
        named = dict(self.model.named_parameters(remove_duplicate=False)) if self.split.shared else {}
        me = self.split.mesh.get_local_rank()
        return [
            _Tie(names[0], next(named[n] for n in names if n in named), ranks, number)
            for number, (names, ranks) in enumerate(self.split.shared)
            if me in ranks
        ]

    def _check_alike(self, ties: list[_Tie]) -> None:
        if not self.split.shared:
            return
        mine = {tie.name: _told(tie.parameter) for tie in ties}
        group = self.split.mesh.get_group()
        everybody: list[Any] = [None] * dist.get_world_size(group)
        with because("layouts of tied weights of two stages"):
            dist.all_gather_object(everybody, mine, group=group)
        for name in {name for told in everybody for name in told}:
            said = {told[name] for told in everybody if name in told}
            if len(said) > 1:
                raise ParallelError(
                    f"pipeline: {name} is held by two stages (tied weights), which place it as "
                    f"{' and as '.join(sorted(said))}\n  fix: apply the strategy before parallelize_pipeline"
                    ", while it is one parameter, or in the same way to both names"
                )

    def _exchanged(self, tie: _Tie, local: Tensor, reason: str) -> list[Tensor]:
        """The local parts of all holders, in the order of their stages: the same sums on each."""
        group, me = self.split.mesh.get_group(), self.split.mesh.get_local_rank()
        own = local.contiguous()
        parts = {rank: own if rank == me else torch.empty_like(own) for rank in tie.ranks}
        operations = []
        for rank in tie.ranks:
            if rank != me:
                peer = dist.get_global_rank(group, rank)
                operations.append(dist.P2POp(dist.isend, own, peer, group))
                operations.append(dist.P2POp(dist.irecv, parts[rank], peer, group))
        with because(reason):
            for work in dist.batch_isend_irecv(operations) if own.numel() else ():
                work.wait()
        return [parts[rank] for rank in tie.ranks]


_LEAST = -(1 << 62)
_FROZEN = (
    "pipeline: {} are one weight, held by several stages, of which one has frozen its copy and another has "
    "not\n  fix: what is done to one of the names has no effect where another rank holds it: "
    "requires_grad_() of each of them"
)
_PARTED = (
    "pipeline: {} are one weight, held by several stages, and their values are not equal any more\n"
    "  fix: write into each of the names, clip with shardwright.grads.clip_grad_norm_, and give the copies "
    "one learning rate and weight decay"
)
_SAMPLES = 64


def _digest(local: Tensor) -> Tensor | int:
    """62 bits for some of the values, spread over all: copies that part do so nearly everywhere."""
    if local.is_meta or not local.numel():
        return 0
    flat = local.reshape(-1)
    some = flat[:: max(1, flat.numel() // _SAMPLES)].contiguous().view(torch.uint8).to(torch.int64)
    weights = torch.arange(1, some.numel() + 1, device=some.device) * 0x9E3779B97F4A7C1
    return (some * weights).sum() & (1 << 62) - 1


def _added(earlier: Tensor | None, total: Tensor | None) -> Tensor | None:
    if earlier is None or total is None:
        return earlier if total is None else total
    return earlier + total


def _local(x: Tensor) -> Tensor:
    return as_ours(x)._local_tensor if isinstance(x, TorchDTensor) else x


def _brought(parameter: nn.Parameter) -> Tensor:
    """The gradient in its parameter's layout, zeros where there is none.

    A term on the axes whose ranks read other rows: of those some may have none.
    """
    gradient = parameter.grad
    if not isinstance(parameter, TorchDTensor) or not isinstance(gradient, TorchDTensor | None):
        return torch.zeros_like(parameter).detach() if gradient is None else gradient
    spec = as_ours(parameter)._spec
    layout = in_terms(spec.layout, () if spec.use is None else spec.use.summed)
    if gradient is None:
        return wrap(torch.zeros_like(_local(parameter)), spec_of(layout, spec.mesh)).detach()
    moved = as_ours(gradient).redistribute(spec.mesh, list(layout.placements), order=list(layout.order_names))
    return moved.detach()


def _told(parameter: nn.Parameter) -> str:
    """How a parameter is placed, without the ranks, which are others on each stage."""
    if not isinstance(parameter, TorchDTensor):
        return f"a plain tensor {tuple(parameter.shape)}"
    return str(as_ours(parameter)._spec.layout)
