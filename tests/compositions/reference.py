"""What one device gives: plain torch on the whole model and the whole batches."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from tests.compositions import data
from tests.compositions.cases import Case, Variant
from tests.compositions.models import MODELS, build

STEPS = 2
RATE, LIMIT = 0.3, 1.0  # of SGD; of the gradients' norm
_ALONE = threading.Lock()


@dataclass(frozen=True)
class StepFacts:
    """One training step: the losses of its backwards, gradients before the optimizer, norm, weights after.

    rounding: of a half type, how far rounding alone moved each gradient: from that of single precision, as a
        part of its largest element.
    """

    losses: tuple[float, ...]
    gradients: dict[str, Tensor | None]
    norm: float
    parameters: dict[str, Tensor]
    rounding: dict[str, float] = field(default_factory=dict)


def one_device(case: Case) -> tuple[StepFacts, ...]:
    """The steps of the case's model on one device: one thread at a time, for all draw from one generator."""
    with _ALONE:
        return _run(case.model, case.variant, case.composition.data_ranks)


def one_device_again(case: Case, steps: int) -> tuple[StepFacts, ...]:
    """As many steps on the batches of the first."""
    with _ALONE, warnings.catch_warnings(action="ignore"):
        name, variant = case.model, case.variant
        numbers = [batches(variant, 0)] * steps
        return _steps(built(name, variant), name, variant, case.composition.data_ranks, numbers)


@functools.lru_cache(maxsize=64)
def _run(name: str, variant: Variant, ranks: int) -> tuple[StepFacts, ...]:
    with warnings.catch_warnings(action="ignore"):
        # Weights of a half type move by whole roundings: after a step two runs are two models.
        numbers = [batches(variant, step) for step in range(1 if variant.dtype == "bfloat16" else STEPS)]
        found = _steps(built(name, variant), name, variant, ranks, numbers)
        if variant.dtype != "bfloat16":
            return found
        single = _steps(built(name, variant).float(), name, variant, ranks, numbers)
    return tuple(replace(f, rounding=_rounding(f, s)) for f, s in zip(found, single, strict=True))


def _rounding(half: StepFacts, single: StepFacts) -> dict[str, float]:
    return {
        name: float((gradient - single.gradients[name]).abs().max() / single.gradients[name].abs().max())
        for name, gradient in half.gradients.items()
        if gradient is not None
    }


def _steps(
    model: nn.Module, name: str, variant: Variant, ranks: int, steps: Sequence[range]
) -> tuple[StepFacts, ...]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE)
    facts = []
    for numbers in steps:
        losses = []
        for number in numbers:
            tokens, targets = data.batch(variant.rows, ranks, number, MODELS[name].vocab)
            loss = data.loss_sum(model(tokens), targets) / data.counted(targets)
            loss.backward()
            losses.append(float(loss.detach()))
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), LIMIT))
        optimizer.step()
        optimizer.zero_grad()
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        facts.append(StepFacts(tuple(losses), gradients, norm, weights))
    return tuple(facts)


def built(name: str, variant: Variant) -> nn.Module:
    """The variant's model, plain."""
    return build(
        name,
        tied=variant.tied,
        frozen=variant.frozen,
        twice=variant.twice,
        checkpointing=variant.checkpointing,
        dtype=variant.dtype,
    )


def batches(variant: Variant, step: int) -> range:
    """The numbers of the batches that a step reads, one per backward."""
    return range(step * variant.backwards, (step + 1) * variant.backwards)
