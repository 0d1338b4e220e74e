"""Around a schedule of torch: what its stages are given, and what it raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import ShardwrightError
from shardwright.parallel.pipeline.batch import Batch
from shardwright.parallel.pipeline.stage import StageModule


def as_it_is(output: Any, _: Any) -> Any:
    """The last stage returns its loss."""
    return output[0] if isinstance(output, tuple) else output


def numbers(batches: list[Batch]) -> Tensor:
    """What torch's schedule cuts into targets; the stage has its own."""
    return torch.zeros(len(batches), device="cpu")


def device_of(kind: str) -> torch.device:
    """This process's device of a kind."""
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def autocast(device: torch.device) -> tuple[bool, torch.dtype]:
    """Is it on, and with which dtype?"""
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)


@contextmanager
def running(
    stages: list[StageModule],
    batches: list[Batch],
    loss: Callable[[Any, Any], Tensor] | None,
    outputs: list[Any] | None = None,
) -> Iterator[None]:
    """The stages have these micro-batches, and keep none of them."""
    for stage in stages:
        stage.batches, stage.loss, stage.outputs = batches, loss, outputs
    try:
        yield
    finally:
        for stage in stages:
            stage.batches, stage.loss, stage.outputs = [], None, None


@contextmanager
def own_errors() -> Iterator[None]:
    """An error of ours, which torch wraps, as it was raised."""
    try:
        yield
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ShardwrightError):
            cause = cause.__cause__
        if cause is None:
            raise
        raise cause from None
