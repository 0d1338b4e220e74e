"""What `explain` and `explicit` say of the ops of the operator sweep's sample, beside what they sent."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import shardwright as sw
from shardwright.errors import ImplicitRedistributionError, RuleError
from shardwright.testing import rank_mesh
from tests.ops.database import dtypes_of, operators, samples_of, seed
from tests.ops.placing import copied, placed
from tests.ops.sample import chosen

# Composite ops, which a dispatch mode never sees: (op, shapes of the tensors, other arguments).
COMPOSITE = (
    (torch.ops.aten.softmax.int, [(6, 4)], [-1]),
    (torch.ops.aten.softmax.int, [(6, 4)], [0]),
    (torch.ops.aten.log_softmax.int, [(6, 4)], [0]),
    (torch.ops.aten.layer_norm.default, [(6, 4)], [[4]]),
    (torch.ops.aten.rms_norm.default, [(6, 4)], [[4]]),
    (torch.ops.aten.group_norm.default, [(4, 4, 3)], [2]),
    (torch.ops.aten.scaled_dot_product_attention.default, [(2, 4, 6, 4)] * 3, []),
    (torch.ops.aten.linear.default, [(6, 4), (8, 4), (8,)], []),
    (torch.ops.aten.matmul.default, [(6, 4), (4, 8)], []),
    (torch.ops.aten.cross_entropy_loss.default, [(6, 4), (6, 4)], []),
    (torch.ops.aten.max_pool2d.default, [(2, 2, 6, 6)], [[2, 2]]),
    (torch.ops.aten.conv2d.default, [(2, 2, 6, 6), (4, 2, 3, 3)], []),
    (torch.ops.aten.flatten.using_ints, [(6, 4, 2)], [0, 1]),
    (torch.ops.aten.chunk.default, [(6, 4)], [2, 0]),
    (torch.ops.aten.reshape.default, [(6, 4)], [[3, 8]]),
    (torch.ops.aten.std.default, [(6, 4)], []),
    (torch.ops.aten.silu.default, [(6, 4)], []),
)


@dataclass(frozen=True)
class Said:
    """What differs of one call; compared and left out: how many calls each."""

    differing: tuple[str, ...]
    compared: int
    untold: tuple[str, ...]


class Compare(TorchDispatchMode):
    """Explains each op on DTensors, then runs it under a trace of its own, and compares the two."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.differing: list[str] = []
        self.untold: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        ours = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if not ours or not all(isinstance(x, sw.DTensor) for x in ours):
            return func(*args, **kwargs)
        return self.compare(func, args, kwargs)

    def compare(self, func, args, kwargs):
        """Run one op, and note what explain says otherwise."""
        given, named = tree_map_only(sw.DTensor, sw.layout_of, (list(args), dict(kwargs)))
        key = f"{func.name()}{given}{named}"
        if key in self.seen:
            return func(*args, **kwargs)
        self.seen.add(key)
        try:
            told = sw.explain(func, *given, rank=dist.get_rank(), **named)
        except RuleError:
            told = None
        refused, sent = in_explicit(func, args, kwargs)
        with sw.trace() as t:
            out = func(*args, **kwargs)
        if refused != anywhere(t.collectives) or sent:
            said = f"inside explicit() it is {'' if refused else 'not '}refused and sends {sent}"
            self.differing.append(f"{key}: ran {events(t)}; {said}")
        if told is None or told.rehearsal is None:
            self.untold.add(func.name())
        else:
            self._note(key, told, t)
        return out

    def _note(self, key, told, t):
        ran, said = events(t), events(told.rehearsal)
        whole = any(d.reason.startswith("fallback") for d in t.decisions)
        if ran != said or whole != told.fallback or (not ran and any(told.moves)):
            self.differing.append(f"{key}: ran {ran}, {whole}; said {said}, {told.fallback}, {told.moves}")


def in_explicit(func, args, kwargs):
    """Whether the op is refused inside `explicit()`, and what it sent there; what it writes are copies."""
    if func._schema.is_mutable:
        args, kwargs = tree_map_only(sw.DTensor, lambda x: x.detach().clone(), (args, kwargs))
    with sw.trace() as t, sw.explicit():
        try:
            func(*args, **kwargs)
        except ImplicitRedistributionError:
            return True, events(t)
    return False, events(t)


def anywhere(sent):
    """Whether any rank sent something: all refuse alike, also those that have nothing to send."""
    count = torch.tensor(len(sent))
    dist.all_reduce(count)
    return bool(count)


def events(t):
    """What a trace lists, in an order of its own."""
    return sorted((e.op, e.axis, e.bytes_sent) for e in t.collectives)


def sample(kinds, names=None, sizes=(2,)):
    """The ops of the sample, or of these operators, under these kinds, forward, one input each."""
    warnings.simplefilter("ignore")
    mesh, known, comparing = rank_mesh(sizes, ("dp", "tp")[: len(sizes)]), operators(), Compare()
    for name in names or chosen(known):
        info = known[name]
        for dtype in dtypes_of(info, (torch.float32, torch.int64))[:1]:
            for _, one in samples_of(info, dtype, 1, "sample"):
                for kind in kinds:
                    with torch.no_grad():
                        run_sample(info, one, kind, mesh, comparing)
    return Said(tuple(comparing.differing), len(comparing.seen), tuple(sorted(comparing.untold)))


def run_sample(info, one, kind, mesh, comparing):
    """One operator on one sample; what one device refuses is nobody's."""
    try:
        seed()
        x, args, kwargs = copied((one.input, one.args, one.kwargs))
        info(x, *args, **kwargs)
    except Exception:  # noqa: BLE001  whatever it is, one device raises it too
        return
    x, args, kwargs = placed(copied((one.input, one.args, one.kwargs)), kind, mesh, mixed=False)
    seed()
    with comparing:
        try:
            info(x, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  it is reported
            comparing.differing.append(f"{info.full_name} under {kind}: {error!r}")


def composite():
    """Ops that consist of others."""
    warnings.simplefilter("ignore")
    mesh, comparing = rank_mesh((2,), ("dp",)), Compare()
    for op, shapes, rest in COMPOSITE:
        for placement in (sw.Shard(0), sw.Shard(1), sw.Replicate()):
            tensors = [
                sw.distribute_tensor(
                    torch.ones(shape),
                    mesh,
                    [placement if len(shape) > 1 else sw.Replicate()],
                    src_data_rank=None,
                )
                for shape in shapes
            ]
            with torch.no_grad():
                comparing.compare(op, (*tensors, *rest), {})
    return Said(tuple(comparing.differing), len(comparing.seen), tuple(sorted(comparing.untold)))
