"""A program as a file that runs by itself, under torchrun."""

from __future__ import annotations

from math import prod

from tests.fuzz.program import Program
from tests.fuzz.verdicts import Verdict

_TEXT = """\
# {kind}: {text}
# torchrun --nproc-per-node {ranks} this.py     (in the root of the repository; seed {seed}{compiled})
import torch, torch.distributed as dist, torch.nn.functional as F
import shardwright as sw
from tests.fuzz.placing import place, placements_of, values_of
from tests.fuzz.program import Leaf
from tests.ops.modes import MODES

def program(leaf, move):
{leaves}
    with MODES[{under!r}]():
{steps}
    return dict(locals())

def made(*args, placements=(), **kwargs):
    return Leaf("x", args[0], str(args[1]).removeprefix("torch."), tuple(args[2]), args[3], **kwargs)

dist.init_process_group("gloo")
mesh = sw.init_device_mesh("cpu", {mesh}, mesh_dim_names={axes})
plain = lambda *a, **k: values_of(made(*a, **k)).requires_grad_(k["grad"])
wanted = program(plain, lambda x, p: x.clone())
got = program(lambda *a, **k: place(made(*a, **k), mesh),
    lambda x, p: x.redistribute(placements=placements_of(p, mesh)).clone())
for name, x in wanted.items():
    if isinstance(x, torch.Tensor):
        same = torch.allclose(got[name].detach().full_tensor(), x.detach(), equal_nan=True)
        grad = x.grad is None or torch.allclose(got[name].grad.full_tensor(), x.grad, equal_nan=True)
        if dist.get_rank() == 0 and not (same and grad):
            print(name, "value" if not same else "gradient", "is wrong")
"""


def source(program: Program, verdict: Verdict) -> str:
    """The text of a file; its first line says what is wrong."""
    lines, made = program.lines(), len(program.leaves)
    return _TEXT.format(
        kind=verdict.kind,
        text=verdict.text,
        ranks=prod(program.mesh),
        seed=program.seed,
        compiled=f", compiled by {program.compiled}, which this file does not do" * bool(program.compiled),
        under=program.under,
        leaves="\n".join(f"    {line}" for line in lines[:made]),
        steps="\n".join(f"        {line}" for line in lines[made:] or ["pass"]),
        mesh=program.mesh,
        axes=("dp", "tp", "pp")[: len(program.mesh)],
    )
