"""One case on the ranks: the same steps as one device, and every number beside its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor as TorchDTensor

import shardwright as sw
from shardwright.errors import ShardwrightError
from shardwright.grads import GradientSynchronizer, clip_grad_norm_, global_mean
from tests.compositions import data
from tests.compositions.cases import Case
from tests.compositions.models import MODELS
from tests.compositions.place import Place, calls, place
from tests.compositions.reference import LIMIT, RATE, StepFacts, batches, built
from tests.cycles import tensors_in_cycles

# Of the largest element of each tensor. A half type rounds every partial sum, in another order on each mesh,
# so two of its gradients are apart as far as rounding moves either: as it moved one device's, measured.
# Models in double compute norms and positions in single precision.
BOUNDS = {"float32": 1e-4, "float64": 1e-6, "bfloat16": 2e-2}
ROUNDINGS = 4.0
TAKEN = "not refused"
Fault = Callable[[nn.Module], None]


def check(case: Case, expected: tuple[StepFacts, ...], fault: Fault | None = None) -> list[str]:
    """Run the case; what differs from one device, on this rank, the worst first.

    Args:
        fault: damages the gradients before they are compared, to see that the comparison notices.
    """
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    at = Place(case.composition)
    model = place(built(case.model, case.variant), case.model, at)
    run = _Run(case, at, model, fault)
    # A rank that sees a difference goes on: its peers, who may see none, wait for it in every collective.
    *steps, (last, facts) = enumerate(expected)
    found = [run.step(*each) for each in steps]
    with tensors_in_cycles() as left:
        found.append(run.step(last, facts))
    if left and steps:  # a first step learns
        found.append([f"step {last}: {len(left)} tensors wait for the collector: {left[:3]}"])
    return next((texts for texts in found if texts), [])


class _Run:
    def __init__(self, case: Case, at: Place, model: nn.Module, fault: Fault | None) -> None:
        self.case, self.at, self.model, self.fault = case, at, model, fault
        trainable = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trainable, RATE)
        # Torch's styles alone leave parameters plain: every rank computes their whole gradient.
        self.synchronizer = GradientSynchronizer(model if at.data is not None else placed_parameters(model))
        self.bound = BOUNDS[case.variant.dtype]

    def step(self, step: int, expected: StepFacts) -> list[str]:
        """One training step; what differs."""
        *before, last = batches(self.case.variant, step)
        losses = [self._backward(number) for number in before]
        overlapped = step % 2 == 1
        with self.synchronizer.overlapped() if overlapped else nullcontext():
            losses.append(self._backward(last))
        where = f"step {step}"
        found = self._losses(where, losses, expected)
        if self.fault is not None:
            self.fault(self.model)
        # A rank that did not run has no part of its own yet; one that overlaps has none any more.
        if not self.case.variant.idle and not overlapped:
            found += self._gradients(f"{where}, before the sum", expected)
        self.synchronizer.synchronize()
        found += self._gradients(where, expected)
        found += self._layouts(where)
        norm = float(clip_grad_norm_(self.model.parameters(), LIMIT))
        if not abs(norm - expected.norm) <= self.bound * expected.norm:
            found.append(f"{where}: norm {norm:.7g}, one device {expected.norm:.7g}")
        self.optimizer.step()
        self.optimizer.zero_grad()
        values = {n: p.detach() for n, p in self.model.named_parameters()}
        return found + differences(
            f"{where}, parameters after", values, expected.parameters, self.bound, expected.rounding
        )

    def _backward(self, number: int) -> float | None:
        """Forward and backward on this rank's rows of one batch; the loss of the whole batch."""
        variant, composition = self.case.variant, self.case.composition
        vocab = MODELS[self.case.model].vocab
        tokens, targets = data.part(
            variant.rows, composition.data_ranks, number, vocab, self.at.index, no_rows=self.case.no_rows
        )
        _, all_targets = data.batch(variant.rows, composition.data_ranks, number, vocab)
        count = data.counted(all_targets)
        if variant.idle and data.counted(targets) == 0:
            return None
        with self.at.inside():
            total = data.loss_sum(self.model(tokens), targets)
            if self.at.data is None or variant.idle:
                loss = total / count
            else:
                loss = global_mean(plain(total), data.counted(targets), self.at.data)
            loss.backward()
        return None if variant.idle else float(plain(loss.detach()))

    def _losses(self, where: str, losses: list[float | None], expected: StepFacts) -> list[str]:
        return [
            f"{where}: loss {loss:.7g}, one device {wanted:.7g}"
            for loss, wanted in zip(losses, expected.losses, strict=True)
            if loss is not None and not abs(loss - wanted) <= self.bound * abs(wanted)
        ]

    def _gradients(self, where: str, expected: StepFacts) -> list[str]:
        gradients = {n: p.grad for n, p in self.model.named_parameters()}
        return differences(
            f"{where}, gradients", gradients, expected.gradients, self.bound, expected.rounding
        )

    def _layouts(self, where: str) -> list[str]:
        """A summed gradient lies as its parameter does."""
        return [
            f"{where}: {name} lies {_described(p)}, its gradient {_described(p.grad)}"
            for name, p in self.model.named_parameters()
            if isinstance(p.grad, TorchDTensor) and p.grad.placements != p.placements
        ]


def placed_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Those that a strategy placed."""
    return [(n, p) for n, p in model.named_parameters() if isinstance(p, TorchDTensor)]


def differences(
    what: str,
    got: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    bound: float,
    rounding: Mapping[str, float] | None = None,
) -> list[str]:
    """Names whose tensor is further from one device's than the bound and its rounding, the worst first."""
    bounds = {name: bound + ROUNDINGS * (rounding or {}).get(name, 0.0) for name in expected}
    found = [(_difference(got.get(name), wanted), name) for name, wanted in expected.items()]
    worst = sorted(((error, name) for error, name in found if not error <= bounds[name]), reverse=True)
    texts = [f"{what}: {name} by {error:.2g}, {_described(got.get(name))}" for error, name in worst]
    missing = set(got) ^ set(expected)
    return texts + [f"{what}: other names: {sorted(missing)}" for _ in range(1) if missing]


def _difference(got: Tensor | None, wanted: Tensor | None) -> float:
    """max|got - wanted| / max|wanted|; infinite where one of them is missing."""
    if got is None or wanted is None:
        return 0.0 if got is wanted else float("inf")
    full = plain(got).to(wanted.device)
    if full.shape != wanted.shape or full.dtype != wanted.dtype:
        return float("inf")
    error, scale = float((full - wanted).abs().max()), float(wanted.abs().max())
    if error == 0.0:
        return 0.0
    return error / scale if scale else float("inf")


def plain(x: Any) -> Any:
    """The whole value."""
    return x.full_tensor() if isinstance(x, TorchDTensor) else x


def _described(x: Any) -> str:
    if x is None:
        return "None"
    if not isinstance(x, TorchDTensor):
        return f"plain {tuple(x.shape)}"
    return str(sw.layout_of(x))


def refuses(case: Case, says: str) -> list[str]:
    """Place a combination without a meaning: some call must say why, and leave the model as it was."""
    warnings.simplefilter("ignore")
    at = Place(case.composition)
    model = built(case.model, case.variant)
    for call in (*calls(model, case.model, at), partial(GradientSynchronizer, model)):
        before = _state(model)
        try:
            call()
        except ShardwrightError as error:
            if _state(model) != before:
                return [f"refused, but the model was changed: {error}"]
            return [] if says in str(error) else [f"refused for another reason: {error}"]
    return [TAKEN]


def _state(model: nn.Module) -> list[tuple[object, ...]]:
    """Which parameters stand where, and what runs around each module."""
    parameters = [(n, id(p)) for n, p in model.named_parameters(remove_duplicate=False)]
    modules = [
        (name, type(module), len(module._forward_pre_hooks), len(module._forward_hooks))
        for name, module in model.named_modules()
    ]
    return [*parameters, *modules]
