"""What a program does around its ops: gradients, hooks, host reads, moves, parts without gradients."""

from __future__ import annotations

from tests.fuzz.placing import draw_placements
from tests.fuzz.program import Ref
from tests.fuzz.run import HOOKS
from tests.fuzz.scope import Nope, Scope


def hook(s: Scope) -> None:
    """A hook on a variable that requires grad."""
    x = s.pick("fc", where=lambda t: t.requires_grad)
    s.do("hook", x, s.rng.choice(list(HOOKS)), result=False)


def host(s: Scope) -> None:
    """A value is read on the host."""
    name = s.rng.choice((".item", "bool", "float", ".tolist", "torch.equal", "torch.allclose", "int"))
    if name in {".tolist", "torch.equal", "torch.allclose"}:
        x = s.pick("fib", where=lambda t: t.numel() < 30)
        s.do(name, x, *(() if name == ".tolist" else (s.partner(s[x]),)), form="host")
        return
    x = s.pick("fib", where=lambda t: t.numel() == 1)
    s.do(name, x, form="host")


def move(s: Scope) -> None:
    """Other placements, and a copy."""
    x = s.pick("fcib")
    t = s[x]
    placements = draw_placements(s.rng, tuple(t.shape), t.dtype, s.mesh)
    placements = tuple("Replicate()" if p.startswith("Partial") else p for p in placements)
    s.do("move", x, placements)


def gradient(s: Scope) -> None:
    """Gradients as values, which later steps may differentiate again."""
    y = s.pick("fc", where=lambda t: t.requires_grad and not t.is_leaf)
    xs = [s.pick("fc", where=lambda t: t.requires_grad) for _ in range(s.rng.randint(1, 2))]
    xs = list({x.name: x for x in xs if x != y}.values())
    if not xs:
        raise Nope
    weight = s.leaf(tuple(s[y].shape), s[y].dtype, grad=s.chance(0.2))
    s.do("torch.autograd.grad", [y], xs, [weight], form="grad", create_graph=s.chance(0.7), retain_graph=True,
         materialize_grads=True)  # fmt: skip


def backward(s: Scope) -> None:
    """Gradients of one or two variables gather in the leaves."""
    ys = [s.pick("fc", where=lambda t: t.requires_grad and not t.is_leaf)]
    if s.chance(0.3):
        ys.append(s.pick("fc", where=lambda t: t.requires_grad and not t.is_leaf))
    ys = list({y.name: y for y in ys}.values())
    if len(ys) == 1 and s[ys[0]].numel() == 1 and s.chance(0.6):
        s.do(".backward", ys[0], form="backward", result=False)
        return
    weights = [s.leaf(tuple(s[y].shape), s[y].dtype, grad=False) for y in ys]
    kwargs = {"retain_graph": True} if s.chance(0.2) else {}
    s.do("torch.autograd.backward", ys, weights, form="backward", result=False, **kwargs)


def read_gradient(s: Scope) -> Ref:
    """The gradient of a leaf, as a variable."""
    x = s.pick("fc", where=lambda t: t.is_leaf and t.grad is not None)
    return s.do(".grad", x, form="attribute")[0]


def needs_grad(s: Scope) -> None:
    """A part of the program without gradients begins; see `draw`."""
    x = s.pick("fc", where=lambda t: t.is_leaf)
    s.do(".requires_grad_", x, True, form="in place", result=False)


def step_of_descent(s: Scope) -> None:
    """What an optimizer does: a leaf is changed in place by its gradient."""
    x = s.pick("f", where=lambda t: t.is_leaf and t.requires_grad and t.grad is not None)
    g = s.do(".grad", x, form="attribute")[0]
    mode, s.grad_mode = s.grad_mode, False
    s.do(".sub_", x, g, alpha=0.5, form="in place", result=False)
    s.grad_mode = mode
