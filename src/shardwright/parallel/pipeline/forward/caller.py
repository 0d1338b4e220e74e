"""The model, called for one stage."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwright.compat import leave_checkpoints
from shardwright.compat.fully_shard.units import FsdpUnit
from shardwright.errors import ParallelError
from shardwright.parallel.pipeline.batch import Batch, versions
from shardwright.parallel.pipeline.forward.run import Run, Stopped
from shardwright.parallel.pipeline.split import Split


class Caller:
    """Calls a model that was cut, on one micro-batch, for one of its stages."""

    def __init__(self, module: nn.Module, split: Split) -> None:
        self.module, self.split = module, split

    def __call__(self, run: Run, batch: Batch) -> Any:
        """The model's own forward, up to where the next stage begins."""
        args, kwargs, _ = batch
        before = versions(batch) if run.learns else []
        conductor = self.split.conductor
        conductor.run = run
        self.split.units.begin()
        try:
            with self._quiet(), run.followed(conductor.parts):
                out = self.module(*args, **kwargs)
        except BaseException as error:
            leave_checkpoints(error)
            if not isinstance(error, Stopped):
                raise
            self._leave_units(tuple(run.kept.values()))
            return None
        finally:
            self.split.units.end()
            conductor.run = None
            run.writes_batch = run.learns and versions(batch) != before
            if isinstance(run.ended, Stopped):
                run.ended.__traceback__ = None  # its frames would keep all that the stage has computed
        if isinstance(run.ended, Stopped):  # the model's own code has caught it
            return None
        if run.ended is not None:
            raise run.ended
        if run.stage != self.split.stages - 1:
            raise ParallelError(
                f"the forward of {type(self.module).__name__} ended in stage {run.stage}, and nothing of "
                f"stage {run.stage + 1} was called\n  fix: cut at a module that this forward calls"
            )
        return out

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """A parameter of a module above the cuts may meet a hollow tensor: torch asks it for `.grad`."""
        if not self.split.reads_parameters:
            yield
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            yield

    def _leave_units(self, values: tuple[Tensor, ...]) -> None:
        """End the forwards of the sharded units that the stop has left open, innermost first."""
        for module in reversed(self.split.above):
            if isinstance(module, FSDPModule) and not FsdpUnit(module).is_idle:
                FsdpUnit(module).leave((), values)
                if not torch.is_grad_enabled():
                    module.reshard()
