"""What the ranks of a pipeline's axis tell each other before a step and after it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.comm.functional import reduce_over
from shardwright.comm.record import because
from shardwright.context.randomness import LOGICAL
from shardwright.context.submesh import groups_above_one
from shardwright.errors import ParallelError, words_of
from shardwright.grads.stages import meet
from shardwright.moe.layer import MoELayer
from shardwright.parallel.pipeline.failing import Failures
from shardwright.parallel.pipeline.forward.leavings import Found
from shardwright.parallel.pipeline.split import Split

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_PATIENCE = 3.0  # seconds in which a rank that was refused something may do it in another way, and come
_BITS = 7  # bytes of a hash that fit a signed number of 8, and its negative


class Agreement:
    """Ranks go into a step with the same arguments, and come out of it with the same loss or error.

    Cost: an all-reduce of 48 bytes before a step, and one of 32 and 8 for each border after it, over the
    axis; 16 bytes before and after over the axes of `data`. The host waits for all of them.
    """

    def __init__(self, split: Split, device: torch.device) -> None:
        self._split, self._device = split, device
        self._data: DeviceMesh | None = None
        self._peers: dict[ProcessGroup, str] = {}

    @contextmanager
    def settled(self, said: Sequence[str]) -> Iterator[None]:
        """Inside, a rank looks at its settings; after it all ranks of the axis go on, or all raise.

        They say which message a rank waits for next, and are compared before the first is sent.

        Raises: ParallelError: on every rank, with the first that differs, what is wrong on one of them, or
            why a strategy was refused on one that does not come.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as failed:  # noqa: BLE001  whatever it is, the other ranks wait
            error = failed
        why = meet(self._split.mesh, _PATIENCE)
        if why is not None:
            raise error or ParallelError(f"Pipeline: a stage cannot go on\n  {why}")
        number = _hash("\n".join(said).encode())
        total = torch.tensor([number, -number, error is not None], dtype=torch.int64, device=self._device)
        high, low, failing = self._over_stages(total, "max", "settings of a pipeline").tolist()
        if high != -low:
            self._refuse_different(said, "made it with different settings")
        if failing:
            self.tell(error)

    def between(self, module: nn.Module, data: DeviceMesh | None) -> None:
        """Ranks of other data take part in steps from here on."""
        self._data, self._peers = data, _peers(module, data)

    def begin(self, said: Sequence[str], *, known: bool, error: BaseException | None) -> tuple[bool, int]:
        """Do all ranks know what crosses the borders for these arguments? And a seed for what they draw.

        Where ranks of other data take part in a forward, all learn it together, or none.

        Args: said: what this rank was called with. error: why it cannot run that.
        Raises: ParallelError: on every rank, its own error or that of another; different arguments.
        """
        number, failed = _hash("\n".join(said).encode()), int(error is not None)
        here = torch.tensor([int(not known), failed], dtype=torch.int64, device=self._device)
        reason = "arguments of a pipeline"
        for group, axis in self._peers.items():
            here = reduce_over(here, "max", group, axis=axis, reason=reason)
        mine = [number, -number, *here.tolist(), failed, self._seed()]
        total = torch.tensor(mine, dtype=torch.int64, device=self._device)
        high, low, unknown, others, failed, seed = self._over_stages(total, "max", reason).tolist()
        if failed:
            self.tell(error)
        if others:
            raise ParallelError(_OTHER_DATA)
        if high != -low:
            self._refuse_different(said, "were called with different arguments")
        return not unknown, seed

    def end(
        self,
        losses: Sequence[Tensor],
        failures: Sequence[Failures],
        found: Found,
        *,
        scaled: bool,
        seed_is_used: bool,
    ) -> Tensor:
        """The sum of the losses, on all ranks of the axis; of all data ranks if they are parts of one mean.

        Raises: ParallelError: on every rank, the error of one; stages whose own code did not do the same.
        """
        failed = any(f.error is not None for f in failures)
        terms = float(sum(float(term.detach()) for term in losses))
        mine = [terms, _dtype(losses), float(failed), float(found.is_news), *self._checks(failures)]
        total = torch.tensor(mine, dtype=torch.float64, device=self._device)
        loss, dtype, failing, news, *checks = self._over_stages(total, "sum", "loss of a pipeline").tolist()
        clash = self._shared(found) if news else None
        differ = next((i for i, check in enumerate(checks) if check), None)
        others = 0.0
        if self._data is not None:
            both = [loss, float(bool(failing or clash) or differ is not None)]
            over_data = torch.tensor(both, dtype=torch.float64, device=self._device)
            for axis, group in groups_above_one(self._data):
                over_data = reduce_over(over_data, "sum", group, axis=axis, reason="loss of a pipeline")
            all_losses, others = over_data.tolist()
            loss = all_losses if scaled else loss
        if failing:
            self.tell(next((f.error for f in failures if f.error is not None), None), _NO_GRADIENTS)
        if differ is not None:
            raise ParallelError(_DIFFERENT.format(differ, differ + 1) + _NO_GRADIENTS)
        if clash is not None:
            raise ParallelError(clash + _NO_GRADIENTS)
        if others:
            raise ParallelError(_OTHER_DATA + _NO_GRADIENTS)
        if seed_is_used and self._split.mesh.get_local_rank() == 0:
            torch.rand((), device="cpu")  # the next step has another seed
        return torch.tensor(loss, dtype=_DTYPES[int(dtype) - 1] if dtype else None, device=self._device)

    def tell(self, error: BaseException | None, more: str = "") -> None:
        """Raise this rank's error here, and that of another rank on all others. Collective over the axis."""
        text = None if error is None else words_of(error)
        if isinstance(error, ParallelError):
            text = str(error)
        for rank, said in enumerate(self._gathered(text, "an error of a pipeline's stage")):
            if said is not None:
                if error is not None:
                    raise error
                raise ParallelError(f"pipeline, rank {rank} of the axis: {said}{more}")

    def _over_stages(self, x: Tensor, op: str, reason: str) -> Tensor:
        for axis, group in groups_above_one(self._split.mesh):
            x = reduce_over(x, op, group, axis=axis, reason=reason)
        return x

    def _gathered(self, mine: Any, reason: str) -> list[Any]:
        group = self._split.mesh.get_group()
        everybody: list[Any] = [mine] * dist.get_world_size(group)
        with because(reason):
            dist.all_gather_object(everybody, mine, group=group)
        return everybody

    def _shared(self, found: Found) -> str | None:
        """Let all ranks know what forwards have left for the first time; why this step is wrong, if it is."""
        everybody = self._gathered(found, "what a forward of a pipeline has left")
        return self._split.leavings.merge(everybody)

    def _refuse_different(self, said: Sequence[str], how: str) -> None:
        """Raise ParallelError with the first difference."""
        everybody = self._gathered(list(said), "arguments of a pipeline, which differ")
        rank, other = next((r, o) for r, o in enumerate(everybody) if o != everybody[0])
        first = everybody[0]
        at = next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), None)
        one, two = (first[at], other[at]) if at is not None else (f"{len(first)} of them", f"{len(other)}")
        raise ParallelError(
            f"pipeline: the ranks of the axis {how}: rank 0 with {one}, rank {rank} with {two}\n"
            "  fix: every rank of the axis makes the same calls with the same arguments"
        )

    def _seed(self) -> int:
        """A number that follows from the state of the first rank's generator; 0 elsewhere."""
        if self._split.mesh.get_local_rank() != 0:
            return 0
        return _hash(torch.default_generator.get_state().numpy().tobytes())

    def _checks(self, failures: Sequence[Failures]) -> list[float]:
        """For each border what the stage before it says, minus what the one behind it says."""
        checks = [0.0] * (self._split.stages - 1)
        for failure in failures:
            if failure.stage < len(checks):
                checks[failure.stage] += failure.left
            if failure.stage:
                checks[failure.stage - 1] -= failure.entered
        return checks


_STATISTICS = "_statistics_over"  # what a batch norm has whose calls send over ranks of other data


def _peers(module: nn.Module, data: DeviceMesh | None) -> dict[ProcessGroup, str]:
    """The groups over which ranks of other data take part in a step, and their axes."""
    units = [p for p in module.parameters() if getattr(p, "_fully_sharded", "")]
    meshes = dict.fromkeys(p.device_mesh for p in units if isinstance(p, TorchDTensor))
    found = {group: axis for mesh in (data, *meshes) if mesh for axis, group in groups_above_one(mesh)}
    return found | peers_of_layers(module) | _of_scopes(module, LOGICAL)


def peers_of_layers(module: nn.Module) -> dict[ProcessGroup, str]:
    """Those over which layers talk in their backwards too: experts, batch norms."""
    layers = [layer.communicator for layer in module.modules() if isinstance(layer, MoELayer)]
    experts = {each.group: each.axis for each in layers if each is not None}
    return experts | _of_scopes(module, _STATISTICS)


def _of_scopes(module: nn.Module, name: str) -> dict[ProcessGroup, str]:
    scopes = [scope for m in module.modules() if (scope := getattr(m, name, None)) is not None]
    return {group: axis for scope in scopes for axis, group in scope.groups}


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=_BITS).digest())


def _dtype(losses: Sequence[Tensor]) -> float:
    """The number of the losses' dtype, 0 where there are none."""
    return float(1 + _DTYPES.index(losses[0].dtype)) if losses and losses[0].dtype in _DTYPES else 0.0


_OTHER_DATA = "pipeline: a step failed on ranks of other data, which say why"
_NO_GRADIENTS = "\n  the gradients that this step has left are not complete: set them to None"
_DIFFERENT = (
    "pipeline: the model's own code did not do the same in the stages {} and {} in this step: it called "
    "other functions there, or with other numbers\n  fix: let every rank of the axis have the same "
    "attributes and arguments, and draw random numbers by torch, or in the layers"
)
