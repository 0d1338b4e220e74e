"""One training step of a decoder under every composition of strategies: what is sent, how gradients lie."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.grads import GradientSynchronizer, clip_grad_norm_, global_mean
from tests.compositions import data
from tests.compositions.cases import VARIANTS
from tests.compositions.models import MODELS
from tests.compositions.place import Place, place
from tests.compositions.reference import built
from tests.compositions.table import DENSE, EXPERTS, Composition
from tests.corpus.seen import decided, error_text, sent
from tests.corpus.unit import Case, Sizes, Unit

_MODELS = {"decoder": DENSE, "decoder with experts": EXPERTS}
_ONE_OF = 2  # compositions: the others consist of the same steps
_VARIANTS = ("uneven", "tied", "plain", "checkpointing", "frozen", "twice")  # they take turns


def units() -> Iterator[Unit]:
    """One for each model and composition."""
    for model, compositions in _MODELS.items():
        for number, composition in enumerate(dict.fromkeys(compositions)):
            variants = (_VARIANTS[number % len(_VARIANTS)],)
            if number % _ONE_OF:
                continue
            words = f"{model}: {composition}"
            yield Unit("programs", words, (composition.sizes,), partial(_cases, model, composition, variants))


def _cases(model: str, composition: Composition, variants: tuple[str, ...], _: Sizes) -> Iterator[Case]:
    for variant in variants:
        for number, what in enumerate(("forward and backward", "sum and clip", "step", "layouts")):
            yield Case(f"{variant}: {what}", partial(_Step.part, (model, composition, variant), number))


class _Step:
    """One step, run once; its parts are told one after the other."""

    _last: tuple[Any, list[str]] | None = None

    @classmethod
    def part(cls, key: tuple[str, Composition, str], number: int) -> str:
        """What one part of the step did."""
        if cls._last is None or cls._last[0] != key:
            cls._last = key, _run(*key)
        told = cls._last[1]
        return told[number] if number < len(told) else "not reached"


def _run(name: str, composition: Composition, variant: str) -> list[str]:
    told: list[str] = []
    try:
        at = Place(composition)
        torch.manual_seed(1)
        model = place(built(name, VARIANTS[variant]), name, at)
        trainable = [p for p in model.parameters() if p.requires_grad]
        placed = [(n, p) for n, p in model.named_parameters() if isinstance(p, DTensor)]
        synchronizer = GradientSynchronizer(model if at.data is not None else placed)
        optimizer = torch.optim.SGD(trainable, 0.1)
        told.append(_traced(lambda: _backward(model, name, at, variant)))
        told.append(_traced(lambda: (synchronizer.synchronize(), clip_grad_norm_(model.parameters(), 0.5))))
        told.append(_traced(optimizer.step))
        told.append(", ".join(_lies(n, p) for n, p in model.named_parameters()))
    except Exception as error:  # noqa: BLE001 - a refusal is what the user sees
        told.append(f"raises {error_text(error)}")
    return told


def _traced(call: Any) -> str:
    with sw.trace() as trace:
        call()
    return " | ".join([f"{trace.bytes} B", *sent(trace), *decided(trace)])


def _backward(model: Any, name: str, at: Place, variant: str) -> None:
    rows, ranks, vocab = VARIANTS[variant].rows, at.composition.data_ranks, MODELS[name].vocab
    tokens, targets = data.part(rows, ranks, 0, vocab, at.index, no_rows=MODELS[name].no_rows)
    with at.inside():
        total = data.loss_sum(model(tokens), targets)
        if at.data is None:
            loss = total / data.counted(targets)
        else:
            plain = total.full_tensor() if isinstance(total, DTensor) else total
            loss = global_mean(plain, data.counted(targets), at.data)
        loss.backward()


def _lies(name: str, parameter: Any) -> str:
    return f"{name} {_layout(parameter)} gradient {_layout(parameter.grad)}"


def _layout(x: Any) -> str:
    if x is None:
        return "none"
    return str(sw.layout_of(x)) if isinstance(x, DTensor) else f"plain {list(x.shape)}"
