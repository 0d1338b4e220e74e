"""A case whose steps are erased: the same batch several times, so that a recording holds for later steps."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

import shardwright as sw
from shardwright.grads import GradientSynchronizer, clip_grad_norm_, global_mean
from tests.compositions import data
from tests.compositions.cases import Case
from tests.compositions.models import MODELS
from tests.compositions.place import Place, place
from tests.compositions.ranks import BOUNDS, differences, placed_parameters, plain
from tests.compositions.reference import LIMIT, RATE, StepFacts, batches, built

STEPS = 4  # the first may make what later ones find
Rows = list[tuple[Tensor, Tensor]]


def check_erased(case: Case, expected: tuple[StepFacts, ...]) -> tuple[list[str], int, str]:
    """What differs from one device on this rank, how many steps were replays, and why others were none."""
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    at = Place(case.composition)
    model = place(built(case.model, case.variant), case.model, at)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE)
    synchronizer = GradientSynchronizer(model if at.data is not None else placed_parameters(model))

    def step(rows: Rows) -> tuple[list[Tensor], Any]:
        optimizer.zero_grad()
        losses = []
        for (tokens, targets), count in zip(rows, counts, strict=True):
            with at.inside(check=False):  # which the host would read
                total = data.loss_sum(model(tokens), targets)
                own = (targets != data.IGNORED).sum()
                loss = total / count if at.data is None else global_mean(plain(total), own, at.data)
                loss.backward()
            losses.append(loss.detach())
        synchronizer.synchronize()
        norm = clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        return losses, norm

    rows, counts = _rows(case, at)
    fast, found = sw.erase(step), []
    for number, facts in enumerate(expected):
        losses, norm = fast(rows)
        numbers = zip([*losses, norm], [*facts.losses, facts.norm], strict=True)
        told = [(float(plain(one)), wanted) for one, wanted in numbers]
        bound = BOUNDS[case.variant.dtype]
        found += [
            f"step {number}: {one:.7g}, one device {wanted:.7g}"
            for one, wanted in told
            if not abs(one - wanted) <= bound * abs(wanted)
        ]
        values = {name: p.detach() for name, p in model.named_parameters()}
        found += differences(
            f"step {number}, parameters after", values, facts.parameters, bound, facts.rounding
        )
    return found, fast.report().replays, str(fast.report())


def _rows(case: Case, at: Place) -> tuple[Rows, list[int]]:
    """This rank's rows of each backward of the first step, and what the whole batches count."""
    kind, ranks, vocab = case.variant.rows, case.composition.data_ranks, MODELS[case.model].vocab
    numbers = batches(case.variant, 0)
    rows = [data.part(kind, ranks, n, vocab, at.index, no_rows=case.no_rows) for n in numbers]
    return rows, [data.counted(data.batch(kind, ranks, n, vocab)[1]) for n in numbers]
