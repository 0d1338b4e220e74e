"""Adding up the gradients that the ranks computed each for their own data."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.comm.bucket import DEFAULT_BUCKET_BYTES
from shardwright.errors import ParallelError, refuse_no_number, refuse_other_kind
from shardwright.grads.at_steps import are_finished
from shardwright.grads.buckets import Plan, planned
from shardwright.grads.coverage import refuse_uncovered
from shardwright.grads.overlapped import OverlappedSum
from shardwright.grads.parameters import (
    Parameters,
    name_list,
    named_parameters,
    refuse_gathered,
    that_may_have_gradients,
    trainable,
)
from shardwright.grads.pending import finish_gradients
from shardwright.grads.stages import stages_of


class GradientSynchronizer:
    """After a backward, gives every gradient the layout of its parameter: what is pending is summed, once.

    Gradients are summed, never averaged (see `global_mean`). A second call finds nothing to do. A gradient
    that some ranks lack counts as zeros there; one that all lack stays None. No rank waits for a peer that
    skipped it: all agree first on what is there.

    Args:
        parameters: a module (asked again at every call, so that `.to(dtype)` may replace its parameters),
            parameters, or (name, parameter) pairs; the same on every rank. Frozen ones are left alone.
        bucket_bytes: small gradients are sent together, up to this many bytes in one all-reduce.
        static: every rank has the same gradients in every step: they are summed without a word before, in
            messages with room for those of all parameters. Where a rank has others all the same that is told
            there, and right; not of parameters that compute as DTensors, of which nothing tells.

    Raises:
        ParallelError: a trainable parameter is a plain tensor although there are several ranks (that are not
            the stages of its model), or is summed over fewer ranks than the others, or over ranks that
            share a sequence with this one although it computes outside of the part that cuts it.
    """

    def __init__(
        self, parameters: Parameters, bucket_bytes: int = DEFAULT_BUCKET_BYTES, *, static: bool = False
    ) -> None:
        refuse_no_number("bucket_bytes", bucket_bytes, ParallelError, whole=True)
        refuse_other_kind("static", static, bool, ParallelError, fix="True or False")
        self._source = (
            parameters if isinstance(parameters, nn.Module) else named_parameters(parameters).items()
        )
        self._bucket_bytes = bucket_bytes
        self._static = static
        self._covered: list[object] = []  # parameters and specs that `refuse_uncovered` let pass
        self._plan: Plan | None = None  # for these parameters
        self._lost = False  # an exception left a step that this rank or another one cannot end
        self._ever_trained: set[str] = set()
        self._named: dict[str, Tensor] = {}  # as the last call found them
        self._distributed()

    def synchronize(self) -> None:
        """Sum what is pending. Collective over the meshes of the parameters.

        Raises:
            ParallelError: layouts of one gradient contradict each other, or a parameter became plain.

        Cost: per mesh axis a few bytes per parameter to agree, then 2(n-1)/n of the bytes of the pending
        gradients. If `static` that of `overlapped()`: nothing before, and zeros for what a rank lacks.
        """
        distributed = self._distributed()
        if self._static:
            self._summed_in(self._sums(distributed), distributed)
            return
        distributed |= self._frozen_since(distributed)
        finish_gradients(distributed, self._bucket_bytes, agreed=False)
        self._are_finished()

    @contextmanager
    def overlapped(self) -> Iterator[None]:
        """`synchronize()`, sent while the backward in the block goes on: the last one of a step.

        `with synchronizer.overlapped(): loss.backward()`. Gradients of modules that compute on their own part
        of the batch are sent in buckets, the last parameters first, as soon as they are complete; until the
        block ends they are None. Backwards before the block only add up, and send nothing. A rank may leave
        its backward out, or have another graph: what it lacks counts as zeros. What a parameter gets again
        (from a reentrant checkpoint of a layer that is called twice, from a second backward in the block) is
        summed when the block ends.

        Raises: as `synchronize`, at the end of the block; ParallelError: a parameter gets gradients of two
            layouts or dtypes; an exception left the block of another rank. What travels then is lost, and
            later calls raise: make another one.
        Cost: 2(n-1)/n of the bytes of these gradients and three numbers for each, sent while the backward
            computes. For those that are complete on each rank (sharded units, spread experts) 128 numbers in
            the last of these messages, if it goes to the same ranks; for all others that of `synchronize`.
            The memory of the messages, as large as these gradients, is kept for the next step.
        """
        distributed = self._distributed()
        sums = self._sums(distributed)
        stop = sums.listen()
        try:
            with self._lost_by_errors(sums):
                yield
        finally:
            stop()
        self._summed_in(sums, distributed)

    def _sums(self, distributed: dict[str, TorchDTensor]) -> OverlappedSum:
        if self._plan is None:
            self._plan = planned(distributed, self._bucket_bytes)
        return OverlappedSum(self._plan)

    @contextmanager
    def _lost_by_errors(self, sums: OverlappedSum) -> Iterator[None]:
        """What an error leaves half sent is lost, and the ranks that wait for it hear so."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception):
                sums.give_up()
            self._lost = sums.took_any
            raise

    def _summed_in(self, sums: OverlappedSum, distributed: dict[str, TorchDTensor]) -> None:
        """Finish what travels, and the gradients that nobody sums."""
        with self._lost_by_errors(sums):
            unfinished = sums.finish(static=self._static)
        for left, alike in unfinished:
            finish_gradients(left, self._bucket_bytes, agreed=alike)
        if frozen := self._frozen_since(distributed):
            finish_gradients(frozen, self._bucket_bytes, agreed=self._static)
        self._are_finished()

    def _distributed(self) -> dict[str, TorchDTensor]:
        """Return the trainable parameters, none of which may be plain in a world of several ranks."""
        if self._lost:
            raise ParallelError(
                "an exception left a step while gradients travelled: they are lost\n"
                "  fix: zero_grad(), and make another GradientSynchronizer"
            )
        self._named = named_parameters(self._source)
        wanted = trainable(self._named)
        _refuse_plain(wanted)
        found = {name: p for name, p in wanted.items() if isinstance(p, TorchDTensor)}
        self._ever_trained |= found.keys()
        placed: list[object] = [part for p in found.values() for part in (p, p._spec)]
        if len(placed) != len(self._covered) or not all(map(operator.is_, placed, self._covered)):
            refuse_uncovered(found, self._source if isinstance(self._source, nn.Module) else None)
            self._covered, self._plan = placed, None
        return found

    def _frozen_since(self, trained: dict[str, TorchDTensor]) -> dict[str, TorchDTensor]:
        """Parameters that were trained before and are frozen now, perhaps since a backward."""
        left = self._ever_trained - trained.keys()
        return {name: p for name, p in self._named.items() if name in left and isinstance(p, TorchDTensor)}

    def _are_finished(self) -> None:
        named = that_may_have_gradients(self._named)
        are_finished(p for p in named.values() if isinstance(p, TorchDTensor))


def _refuse_plain(wanted: dict[str, Tensor]) -> None:
    """Raise ParallelError if a rank could not know whether a gradient must be summed."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    plain = [
        name
        for name, p in wanted.items()
        if not isinstance(p, TorchDTensor) and ((held := stages_of(p)) is None or held.mesh.size() != world)
    ]
    if plain and world > 1:
        refuse_gathered(wanted)
        raise ParallelError(
            f"{name_list(plain)}: plain trainable tensors in a world of {world} ranks, whose gradients "
            "nobody would sum; place them with parallelize_replicate(module, mesh), or freeze them"
        )
