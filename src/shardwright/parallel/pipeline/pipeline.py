"""Running a model that was cut into stages, micro-batch by micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.comm.functional import reduce_over
from shardwright.compat import axis_names
from shardwright.compat.fully_shard.traffic import hold_gradients_back, reduce_gradients
from shardwright.context.randomness import part_now
from shardwright.context.submesh import groups_above_one
from shardwright.errors import ParallelError
from shardwright.parallel.meshes import named_axes, refuse_no_module
from shardwright.parallel.pipeline.agreement import Agreement
from shardwright.parallel.pipeline.batch import Batch, Dims, copied, micro_batches, signature
from shardwright.parallel.pipeline.forward.caller import Caller
from shardwright.parallel.pipeline.forward.learn import learn
from shardwright.parallel.pipeline.forward.recording import refuse_recording
from shardwright.parallel.pipeline.homes import Homes
from shardwright.parallel.pipeline.running import as_it_is, autocast, device_of, numbers, own_errors, running
from shardwright.parallel.pipeline.schedules import (
    check_schedule,
    make_schedule,
    named_schedule,
    refuse_taken_apart,
)
from shardwright.parallel.pipeline.split import find_split
from shardwright.parallel.pipeline.stage import Stage, StageModule
from shardwright.parallel.pipeline.ties import Ties
from shardwright.tensor.modules.more_axes import shared_ranks

_Ready = tuple[Any, "list[StageModule]"]  # a schedule of torch, and the stages that it runs
_MOST = 8  # shapes of batches for which buffers and schedules are kept


class Pipeline:
    """Runs a model that `parallelize_pipeline` has cut, by one of torch's schedules.

    Every rank of the axis calls `step` with the same batch. Gradients are what one device has for the sum of
    the loss's terms over all micro-batches: sums, never averages, in the layouts that the strategies say.

    Args:
        module: cut by `parallelize_pipeline`, placed by any other strategies.
        loss: `loss(output, target)`, a scalar: this micro-batch's term. With `data` and `step(count=)`, a sum
            over its tokens, which is divided by the number of all ranks' tokens.
        micro_batches: into how many parts a batch is cut.
        schedule: "gpipe", "1f1b" (one stage on each rank), "interleaved_1f1b", "looped_bfs",
            "interleaved_zero_bubble" (several; the last for models that are not sharded beside).
        data: the axes whose ranks have other rows, for `step(count=)`.
    Raises: ParallelError: the module was not cut, an unknown schedule, stages that place tied weights in
        different ways, a model that records outputs of its layers, ranks with other settings; on every rank
        of the axis, also what a strategy refused on one stage alone.
    Cost: an all-reduce of 24 bytes over the axis, after a word through the store of the process group; tied
        weights are sent once to the other stages that hold them.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Any, Any], Tensor] | None = None,
        *,
        micro_batches: int,
        schedule: str | None = None,
        data: DeviceMesh | None = None,
    ) -> None:
        refuse_no_module("Pipeline", module)
        split = find_split(module)
        if split is None:
            raise ParallelError(
                f"Pipeline: {type(module).__name__} has no stages; cut it with "
                "parallelize_pipeline(module, mesh['pp'], cuts) first"
            )
        self.module, self.loss, self.data, self._split = module, loss, data, split
        self._device = device_of(split.mesh.device_type)
        self._agreement = Agreement(split, self._device)
        name = named_schedule(schedule, split.stages, split.mesh.size())
        axes = axis_names(data) if isinstance(data, DeviceMesh) else data
        said = [f"schedule={name!r}", f"micro_batches={micro_batches!r:.60}", f"data={axes!r:.60}"]
        with self._agreement.settled([*said, "no loss" if loss is None else "a loss"]):
            self._check_given()
            self.schedule = check_schedule(schedule, split.stages, split.mesh.size(), micro_batches)
            refuse_taken_apart(self.schedule, module)
            refuse_recording(module, {})
        self._agreement.between(module, data)
        self.micro_batches = micro_batches
        self._homes = Homes(module, split.mesh)
        self._ties = Ties(split, module)
        self._ties.start()
        split.units.follow(module)
        self._caller = Caller(module, split)
        self._ready: dict[Any, _Ready] = {}

    def _check_given(self) -> None:
        data, loss = self.data, self.loss
        if (
            data is not None
            and len(named_axes(data, "Pipeline(data=)"))
            and shared_ranks(data, self._split.mesh)
        ):
            raise ParallelError(
                f"Pipeline: data={axis_names(data)} has ranks of other stages, which have the same rows"
            )
        if loss is not None and not callable(loss):
            raise ParallelError(f"Pipeline: loss={loss!r:.60} is no function of the output and the target")

    @property
    def is_last(self) -> bool:
        """Does this rank run the last stage, which has the outputs?"""
        return self._split.stages - 1 in self._split.mine

    def step(
        self,
        *args: Any,
        target: Any = None,
        count: int | Tensor | None = None,
        batch_dims: Mapping[str, int | None] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Forward and backward of a batch; gradients are added to those that are there. Collective.

        Args:
            args, kwargs: of the model, for the whole batch, the same on every rank of the axis. Tensors are
                cut along dim 0; those with one row are handed whole to every micro-batch.
            target: handed to the loss, cut in the same way; tensors in any lists, tuples and dicts.
            count: how many tokens the loss sums on this rank: divides by the count of all ranks of `data`.
            batch_dims: `{argument: dim of its batch}`, None for a tensor that is not cut; names are those of
                the model's forward, also of what is given by position.
        Returns: the loss of the batch, the same on every rank of the axis (with `count`, of `data` too).
        Raises: ParallelError: on every rank of the axis: the batch is not divisible, the ranks were given
            different ones, what crosses a border cannot be sent, an error of any kind in another stage (there
            it is raised itself).
        Cost: per micro-batch and border the values that cross it, and their gradients, of which the host
            waits for one element (is it a gradient, or nobody's zeros?); two small all-reduces, before and
            after, which it waits for too, over the axis and over the ranks of other data; the gradients of
            tied weights once. The first step with shapes that are new to any of these ranks runs a forward
            of each stage more.
        """
        if self.loss is None:
            raise ParallelError("Pipeline.step needs a loss: Pipeline(module, loss, ...)")
        batches, (schedule, stages) = self._begun("step", args, kwargs, target, batch_dims, count)
        losses: list[Tensor] = []
        scale = self._scale(count)
        with self._ties.summed():
            hold_gradients_back(self.module)
            try:
                with running(stages, batches, self._scaled(scale)), own_errors():
                    schedule.step(target=numbers(batches), losses=losses, return_outputs=False)
            finally:
                reduce_gradients(self.module)
        return self._ended(losses, stages, scaled=scale is not None)

    @torch.inference_mode(mode=False)  # it knows values by how often they are written
    @torch.no_grad()
    def evaluate(
        self,
        *args: Any,
        target: Any = None,
        count: int | Tensor | None = None,
        batch_dims: Mapping[str, int | None] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The loss of a batch, without gradients; arguments, result and errors as `step`. Collective."""
        if self.loss is None:
            raise ParallelError("Pipeline.evaluate needs a loss: Pipeline(module, loss, ...)")
        begun = self._begun("evaluate", args, kwargs, target, batch_dims, count)
        scale = self._scale(count)
        return self._forward(begun, self._scaled(scale), None, scaled=scale is not None)

    @torch.inference_mode(mode=False)  # it knows values by how often they are written
    @torch.no_grad()
    def outputs(
        self, *args: Any, batch_dims: Mapping[str, int | None] | None = None, **kwargs: Any
    ) -> list[Any] | None:
        """What the model returns for each micro-batch, on the ranks of the last stage; None elsewhere.

        Collective; arguments and errors as `step`.
        """
        begun = self._begun("outputs", args, kwargs, None, batch_dims)
        outputs: list[Any] = []
        self._forward(begun, None, outputs, scaled=False)
        return outputs if self.is_last else None

    def _forward(
        self,
        begun: tuple[list[Batch], _Ready],
        loss: Callable[[Any, Any], Tensor] | None,
        outputs: list[Any] | None,
        *,
        scaled: bool,
    ) -> Tensor:
        batches, (schedule, stages) = begun
        losses: list[Tensor] = []
        with running(stages, batches, loss, outputs), own_errors():
            schedule.eval(target=numbers(batches), losses=losses, return_outputs=False)
        return self._ended(losses, stages, scaled=scaled)

    def _begun(
        self,
        what: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        dims: Dims | None,
        count: int | Tensor | None = None,
    ) -> tuple[list[Batch], _Ready]:
        """The micro-batches, and the schedule for their shapes, once it is known what crosses the borders.

        All ranks of the axis come to the same end, whatever one of them was given.
        """
        part_now(self.module)
        self._split.hear()
        self._split.tell_parameters()
        error: BaseException | None = None
        batches, said = [], [what]
        try:
            named, forward = {} if dims is None else dims, self.module.forward
            batches = micro_batches(args, kwargs, target, self.micro_batches, named, forward)
            refuse_recording(self.module, kwargs)
            said += [*signature(batches), str(self.module.training), str(autocast(self._device))]
            said.append("no count" if count is None else "a count")
            _check_count(count, self.loss)
        except BaseException as failed:  # noqa: BLE001  the other ranks are told
            error = failed
        modules = list(self.module.modules())
        tensors = (x for m in modules for x in (*m._parameters.values(), *m._buffers.values()))
        dtypes = (None if x is None else x.dtype for x in tensors)
        key = (*said, *(module.training for module in modules), *dtypes)
        known, seed = self._agreement.begin(said, known=key in self._ready, error=error)
        if not known:
            self._ready[key] = self._made(batches)
            while len(self._ready) > _MOST:
                del self._ready[next(iter(self._ready))]
        for stage in self._ready[key][1]:
            stage.seed = seed
            stage.failures.clear()
        self._split.conductor.read.clear()
        self._watch = self._split.leavings.watch(self.module)
        return batches, self._ready[key]

    def _made(self, batches: list[Batch]) -> _Ready:
        split = self._split
        split.read_code(self.loss)
        borders = learn(
            split, self.module, lambda run: self._caller(run, copied(batches[0])), self._homes, self._device
        )
        modules = [
            StageModule(self.module, split, stage, borders, self._caller, self._homes, self._device)
            for stage in split.mine
        ]
        stages = [Stage(module, split) for module in modules]
        return make_schedule(self.schedule, stages, len(batches), as_it_is), modules

    def _scale(self, count: int | Tensor | None) -> Tensor | None:
        """The number of tokens of all data ranks, on the last stage; None: terms are added as they are."""
        if count is None:
            return None
        total = torch.as_tensor(count, device=self._device).detach().double().reshape(())
        if self.is_last and self.data is not None:
            for axis, group in groups_above_one(self.data):
                total = reduce_over(total, "sum", group, axis=axis, reason="count of a pipeline's tokens")
        return total.clamp(min=1.0)

    def _scaled(self, scale: Tensor | None) -> Callable[[Any, Any], Tensor] | None:
        loss = self.loss
        if scale is None or loss is None:
            return loss
        return lambda output, target: loss(output, target) / float(scale)

    def _ended(self, losses: list[Tensor], stages: list[StageModule], *, scaled: bool) -> Tensor:
        """The loss on all stages, or what has failed on one of them."""
        failures = [stage.failures for stage in stages]
        draws = any(stage.draws for stage in stages)
        found = self._watch.found(self._split.conductor.read)
        try:
            return self._agreement.end(losses, failures, found, scaled=scaled, seed_is_used=draws)
        finally:
            if self._split.leavings.are_news:
                self._split.place_leavings(self.module)


def _check_count(count: object, loss: object) -> None:
    """Raise ParallelError for what is no number of tokens, or would divide a mean by it.

    Of a tensor nobody waits for its value.
    """
    if count is not None and getattr(loss, "reduction", None) == "mean":
        kind = type(loss).__name__
        raise ParallelError(
            f"pipeline: {kind} takes the mean of a micro-batch, and count= divides what is summed by the "
            f"tokens of all\n  fix: {kind}(reduction='sum')"
        )
    if isinstance(count, Tensor):
        is_number = count.numel() == 1
    else:
        is_number = count is None or (isinstance(count, Real) and 0 <= float(count) < math.inf)
    if not is_number or isinstance(count, bool):
        raise ParallelError(f"count={count!r:.60} is no number: how many tokens the loss sums on this rank")
