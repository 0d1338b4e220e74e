"""`--verify`: every step of a parallel run beside the same step on one device.

On every rank an observer brings the run's weights, gradients and routing decisions together; on the first
rank the reference takes the same step, and both are compared before either goes on. The bounds are those of
float32; where a difference is larger, the reference is evaluated once more at the run's own weights, with the
run's own routing, in float64 if float32 does not tell. A gradient that agrees there is right, and the rest is
rounding that earlier steps have carried forward. Where rounding has decided a tie of the routing, two right
runs part for good: the reference goes on from where the run stands, and what they differed by counts for all
later steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwright.train.gather import full_gradients, full_parameters, gather_choices
from shardwright.train.reference_run import Gradients, ReferenceRun
from shardwright.train.routing import RoutingDifferences, largest_gap, routing_differences
from shardwright.train.step import StepResult, Trainer

LOSS_BOUND = 1e-4
PARAMETER_BOUND = 1e-4
GRADIENT_BOUND = 1e-5  # of the largest element
NORM_BOUND = 1e-5  # of the norm
TIE_GAP = 1e-5  # scores closer than this are a tie that rounding may decide
EPSILON = 2.0**-23
SHOWN = 3
ROUNDING_FACTOR = 8.0  # how much larger than the reference's own rounding the run's may be


@dataclass
class Findings:
    """What the comparison brought: the largest differences, why large ones are rounding, which bounds broke.

    `gradient` is max|g - g_ref| / max|g_ref| over the parameters at the first, second and last step of each
    run.
    """

    loss: float = 0.0
    gradient: float = 0.0
    parameter: float = 0.0
    reasons: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def last_line(self) -> str:
        """The line that every verified run ends with."""
        return (
            f"verify: max loss difference {self.loss:.3g}, max gradient difference {self.gradient:.3g}, "
            f"max parameter difference {self.parameter:.3g}"
        )


@dataclass(frozen=True)
class Snapshot:
    """A run between backward and clipping: whole weights and gradients by name, and routing per layer."""

    step: int
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    choices: list[Tensor]


class Verifier:
    """Observes a run on every rank, and compares it with `reference`, which only the first rank has."""

    def __init__(self, findings: Findings, reference: ReferenceRun | None, name: str) -> None:
        self.findings, self.reference, self.name = findings, reference, name
        self._expected: Gradients | None = None
        self._expected_norm = 0.0
        self._parted = 0.0  # what weights differed by, in all, where the reference followed the run

    def reduced(self, step: int, trainer: Trainer) -> None:
        """Compare weights and gradients. Collective; cost: gathers both."""
        snapshot = Snapshot(
            step, full_parameters(trainer.model), full_gradients(trainer.model), gather_choices(trainer)
        )
        self.compare(snapshot)

    def compare(self, snapshot: Snapshot) -> None:
        """Compare weights and gradients with the reference's, which makes the same forward pass here."""
        if self.reference is not None:
            self._compare_weights(snapshot.step - 1, snapshot.weights, self.reference)
            self._compare_gradients(snapshot, self.reference)

    def after(self, step: int, trainer: Trainer, result: StepResult) -> None:
        """Compare loss and norm, let the reference update, and compare the last weights. Collective."""
        if self.reference is not None and self._expected is not None:
            self._compare_numbers(step, result, self._expected)
            self.reference.update(step)
        if step == trainer.config.steps:
            weights = full_parameters(trainer.model)
            if self.reference is not None:
                self._compare_weights(step, weights, self.reference)

    def _compare_gradients(self, run: Snapshot, reference: ReferenceRun) -> None:
        self._expected = expected = reference.gradients(run.step)
        worst = relative_differences(run.gradients, expected.by_name)
        large = [value for value in worst.values() if not value <= GRADIENT_BOUND]
        self._expected_norm = expected.norm
        norm_error = _relative(Gradients(0.0, run.gradients, []).norm, self._expected_norm)
        if large or not norm_error <= NORM_BOUND:
            elsewhere = routing_differences(expected.scores, run.choices)
            worst = self._excuse_or_break(run, reference, large, elsewhere) or worst
        if run.step in (1, 2, reference.config.steps):
            for value in worst.values():
                self.findings.gradient = _larger(self.findings.gradient, value)

    def _excuse_or_break(
        self,
        run: Snapshot,
        reference: ReferenceRun,
        large: Sequence[float],
        elsewhere: Sequence[RoutingDifferences],
    ) -> dict[str, float]:
        """Evaluate the reference where the run stands; note a reason if it agrees there, else what broke.

        Returns: what gradients differ by there, if the reference goes on from there; else nothing.
        """
        exact = rounded = reference.gradients_at(run.step, run.weights, run.choices, torch.float32)
        errors = relative_differences(run.gradients, rounded.by_name)
        allowed = dict.fromkeys(errors, GRADIENT_BOUND)
        if not all(error <= GRADIENT_BOUND for error in errors.values()):
            exact = reference.gradients_at(run.step, run.weights, run.choices, torch.float64)
            errors = relative_differences(run.gradients, exact.by_name)
            allowed = allowed_errors(rounded.by_name, exact.by_name)
        wrong = {name: error for name, error in errors.items() if not error <= allowed[name]}
        where = f"{self.name}, step {run.step}"
        routing = routing_differences(exact.scores, run.choices)
        if wrong:
            self.findings.broken.append(
                f"{where}: {_wrong_text(wrong, allowed, run.gradients, exact.by_name)}; "
                f"routing decisions unlike one device's: {_text(elsewhere) or 'none'}"
            )
            return {}
        if largest_gap(routing) > TIE_GAP:
            self.findings.broken.append(f"{where}: routing differs where it is no tie: {_text(routing)}")
            return {}
        self._expected_norm = exact.norm
        drift = largest_difference(run.weights, reference.weights())
        ties = f", routing ties were decided otherwise ({_text(elsewhere)})" if elsewhere else ""
        share = max(errors[name] / allowed[name] for name in errors)
        self.findings.reasons.append(
            f"{where}: {len(large)} gradients differ by up to {max(large, default=0.0):.2g} of their largest "
            f"element: rounding has moved weights by up to {drift:.2g}{ties}; at the run's own weights all "
            f"agree with one device to within {share:.0%} of what float32 resolves"
        )
        if not elsewhere:
            return {}
        self._expected, self._parted = exact, self._parted + drift
        reference.go_on(run.weights, exact)
        return errors

    def _compare_numbers(self, step: int, result: StepResult, expected: Gradients) -> None:
        where = f"{self.name}, step {step}"
        loss_error = abs(result.loss - expected.loss)
        self.findings.loss = _larger(self.findings.loss, loss_error)
        if not loss_error <= LOSS_BOUND:
            self.findings.broken.append(f"{where}: loss {result.loss:.7g}, one device {expected.loss:.7g}")
        if not _relative(result.grad_norm, self._expected_norm) <= NORM_BOUND:
            self.findings.broken.append(
                f"{where}: gradient norm before clipping {result.grad_norm:.7g}, "
                f"one device {self._expected_norm:.7g}"
            )

    def _compare_weights(self, step: int, run: Mapping[str, Tensor], reference: ReferenceRun) -> None:
        difference = self._parted + largest_difference(run, reference.weights())
        self.findings.parameter = _larger(self.findings.parameter, difference)
        if not difference <= PARAMETER_BOUND:
            self.findings.broken.append(
                f"{self.name}, after step {step}: parameters differ by {difference:.3g} "
                f"(bound {PARAMETER_BOUND:g})"
            )


def relative_differences(run: Mapping[str, Tensor], one: Mapping[str, Tensor]) -> dict[str, float]:
    """max|g - g_ref| / max|g_ref| for each name; 0 where both are zero, inf where only g_ref is."""
    return {name: _relative_difference(run[name], one[name]) for name in one}


def largest_difference(run: Mapping[str, Tensor], one: Mapping[str, Tensor]) -> float:
    """max|w - w_ref| over all elements of all names; nan if anything is nan."""
    worst = [(run[name].to(one[name].device) - one[name]).abs().max() for name in one]
    return float(torch.stack(worst).max())


def allowed_errors(rounded: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """The relative error of each gradient that float32 explains, never less than the bound.

    What the reference itself loses by float32, times a safety factor; and one unit in the last place of the
    model's largest gradient, for a gradient that is zero but for rounding (the router's under top-1).
    """
    largest = max(float(g.abs().max()) for g in exact.values())
    return {name: _allowed_error(rounded[name], g, EPSILON * largest) for name, g in exact.items()}


def _allowed_error(rounded: Tensor, exact: Tensor, least: float) -> float:
    scale = float(exact.abs().max())
    smallest = least / scale if scale else float("inf")
    return max(GRADIENT_BOUND, ROUNDING_FACTOR * _relative_difference(rounded, exact), smallest)


def _relative_difference(g: Tensor, g_ref: Tensor) -> float:
    error = float((g.to(g_ref) - g_ref).abs().max())
    scale = float(g_ref.abs().max())
    if error == 0.0:
        return 0.0
    return error / scale if scale else float("inf")


def _wrong_text(
    wrong: Mapping[str, float],
    allowed: Mapping[str, float],
    run: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
) -> str:
    """How many gradients are wrong, and how the worst of them differ from the right ones."""
    worst = sorted(wrong, key=lambda name: -wrong[name])[:SHOWN]
    facts = [
        f"{name} by {wrong[name]:.3g} of its largest element (bound {allowed[name]:.2g}), "
        f"{_multiple(run[name], exact[name]):.6g} times the right one"
        for name in worst
    ]
    more = f", and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    return (
        f"{len(wrong)} of {len(exact)} gradients are off at the run's own weights: {'; '.join(facts)}{more}"
    )


def _multiple(g: Tensor, g_ref: Tensor) -> float:
    """The number that makes g_ref most like g."""
    square = float(g_ref.square().sum())
    return float((g.to(g_ref) * g_ref).sum()) / square if square else float("nan")


def _relative(value: float, expected: float) -> float:
    return abs(value - expected) / expected if expected else abs(value)


def _larger(a: float, b: float) -> float:
    return b if not b <= a else a  # a nan stays


def _text(differences: Sequence[RoutingDifferences]) -> str:
    return "; ".join(str(difference) for difference in differences)
