"""A scale of the loss for a model whose stages lie on different ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shardwright.comm.functional import reduce_over
from shardwright.errors import ParallelError, refuse_no_number, refuse_other_kind
from shardwright.grads.stages import axis_of_all, groups_of, stages_of


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for pipelines: a step is taken by all stages, or by none, with one scale.

    torch's sees the gradients of this rank's stages only: where those of another one are infinite it takes
    the step that the other leaves out. Where there are no stages this one does what torch's does.

    Scale in the loss, which the last stage computes, and use it on every rank as on one device:

        scaler = GradScaler("cpu")
        pipeline = Pipeline(model, lambda out, y: scaler.scale(loss(out, y)), micro_batches=4)
        pipeline.step(x, target=y)
        scaler.step(optimizer)
        scaler.update()

    Args:
        device: "cpu" or "cuda": where the loss and the gradients are.
        init_scale: the first scale.
        growth_factor: what the scale is multiplied by after `growth_interval` steps without an infinity.
        backoff_factor: what it is multiplied by after a step that was left out.
        growth_interval: how many steps in a row must be finite before it grows.
        enabled: False: `scale` gives back what it gets, and `step` is the optimizer's.

    Its state is that of `torch.amp.GradScaler`. Where stages are frozen a rank may have no gradients.
    Cost: of an optimizer's step 4 bytes over the stages, beside 4 bytes over each axis that cuts parameters.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        refuse_other_kind("GradScaler: device", device, str, ParallelError, fix='"cpu" or "cuda"')
        refuse_other_kind("GradScaler: enabled", enabled, bool, ParallelError, fix="True or False")
        factors = {"init_scale": init_scale, "growth_factor": growth_factor, "backoff_factor": backoff_factor}
        for name, value in factors.items():
            refuse_no_number(f"GradScaler: {name}", value, ParallelError)
        refuse_no_number("GradScaler: growth_interval", growth_interval, ParallelError, whole=True)
        if not backoff_factor < 1 < growth_factor:
            raise ParallelError(
                f"GradScaler: growth_factor={growth_factor} and backoff_factor={backoff_factor}: a scale "
                "grows by a factor above 1, and falls by one below\n  fix: 2.0 and 0.5"
            )
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        """The scale and its age; made here on the stages that compute no loss."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return super()._check_scale_growth_tracker(funcname)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Divide the gradients by the scale: by device, whether one of any stage is not finite."""
        found: dict[torch.device, Tensor] = dict(
            super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        )
        stages = _stages_of(optimizer)
        if not stages:
            return found
        anywhere = torch.stack([found_inf, *(x.to(found_inf.device) for x in found.values())]).amax()
        for axis, group in groups_of(stages):
            anywhere = reduce_over(anywhere, "max", group, axis=axis, reason="gradients finite in all stages")
        return {device: anywhere.to(device) for device in (*found, anywhere.device)}


def _stages_of(optimizer: Optimizer) -> list[DeviceMesh]:
    """The axes over which the models of an optimizer's parameters are cut; it may have none on this rank."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = list(dict.fromkeys(held.mesh for held in map(stages_of, parameters) if held is not None))
    return found if parameters else axis_of_all()
