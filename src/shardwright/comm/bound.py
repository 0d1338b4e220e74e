"""A plan on the mesh of a tensor, bound to this rank: what `execute` asks and looks up, asked once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwright.comm import guard, traced
from shardwright.comm.execute import execute
from shardwright.comm.program import Program, program_of, seat_of
from shardwright.plan.plan import Plan


class Bound:
    """Runs one plan as `execute` does.

    It remembers the program for the device on which the last local tensor lay. A trace, and what a guard or
    a recording wants otherwise, go to `execute`.
    """

    __slots__ = ("_device", "_idle", "_mesh", "_program", "plan")

    def __init__(self, plan: Plan, mesh: DeviceMesh | None) -> None:
        self.plan, self._mesh = plan, mesh
        self._idle = not plan.steps
        self._program: Program | None = None
        self._device: torch.device | None = None

    def run(self, local: Tensor, reason: str) -> Tensor:
        """As `execute`, of a tensor whose conjugation or sign is carried out, not noted.

        Raises: PlanError: `local` has not the shape or dtype that the source layout says.
        """
        if self._idle:
            return local
        if guard.on or traced.blocks or type(local) is not Tensor:
            return execute(self.plan, local, self._mesh, reason=reason)
        program = self._program if local.device == self._device else self._on_device(local)
        if program is None:
            return local
        return program.run(local, f"{reason}: {self.plan.reason}" if reason else self.plan.reason)

    def _on_device(self, local: Tensor) -> Program | None:
        """The program for the device of a tensor; None on a rank that the plan does not know."""
        seat = seat_of(self.plan, self._mesh)
        self._program = None if seat is None else program_of(self.plan, self._mesh, seat, local)
        self._device = local.device
        return self._program
