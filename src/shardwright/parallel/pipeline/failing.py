"""An error in one stage: the others are served until the step has ended, then all of them are told."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.compat import WAITS_FOR_ALL_GRADIENTS
from shardwright.parallel.pipeline.forward.journal import Journal


class Failures:
    """The first error of a stage in this step, and the checksums of its journals at both of its borders.

    A stage leaves where the next one begins: with the same checksum, if both did the same.
    """

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.clear()

    def clear(self) -> None:
        """A step begins."""
        self.error: BaseException | None = None
        self.entered = self.left = 0

    def add(self, error: BaseException) -> None:
        """Keep an error; later ones follow from it."""
        self.error = self.error or error

    def saw(self, journal: Journal) -> None:
        """Count a micro-batch."""
        self.left += journal.sum
        self.entered += journal.sum if journal.entered is None else journal.entered


def nothing(examples: Sequence[Tensor], arrived: Sequence[Tensor], anchor: Tensor) -> tuple[Tensor, ...]:
    """What leaves a stage that has failed: zeros, whose gradients go back to what arrived as zeros."""
    device = anchor.device
    floats = [x.flatten()[:0].sum().to(torch.float32) for x in arrived if x.requires_grad]
    link = torch.stack([anchor, *floats]).sum() * 0
    return tuple(
        torch.zeros(x.shape, dtype=x.dtype, device=device) + link.to(x.dtype)
        if x.requires_grad and torch.is_grad_enabled()
        else torch.zeros(x.shape, dtype=x.dtype, device=device)
        for x in examples
    )


def gradients(
    came: Sequence[Tensor], made: Sequence[Tensor | None], *, served: bool
) -> tuple[Tensor | None, ...]:
    """The gradients of what arrived: those that a backward made, and zeros, which torch 2.13 sends itself.

    Args: served: a stage that has failed asks for a backward all the same: peers of the earlier ones run it.
    """
    sent = [
        torch.zeros_like(x) if gradient is None and (x.requires_grad or WAITS_FOR_ALL_GRADIENTS) else gradient
        for gradient, x in zip(made or [None] * len(came), came, strict=True)
    ]
    for x, gradient in zip(came, sent, strict=True):
        if served and x.requires_grad and gradient is not None:
            gradient[-1] = 1
    return tuple(sent)
