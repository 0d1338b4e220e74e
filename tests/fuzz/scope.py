"""Where a program grows: what has been drawn so far runs on plain tensors, so shapes and types are known."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import torch

from tests.fuzz.hazards import collides, slips
from tests.fuzz.placing import draw_placements, turned
from tests.fuzz.program import Leaf, Program, Ref, Step
from tests.fuzz.run import Env, Plain, execute, resolved, versions

_LARGEST = {torch.float16: 500.0, torch.bfloat16: 1e3}
_MAX_NUMEL = 600
# On expanded tensors, where one place would be written twice: torch says that it will not take it any more.
_DEPRECATED = frozenset({"[]=", ".index_put_", ".masked_fill_", ".index_fill_"})
_KEPT_ERRORS = {"backward": 1.0, "written": 0.1, "other": 0.02}  # how often an error of one device is kept


class Nope(Exception):  # noqa: N818 - no error: this draw leads nowhere
    """What was tried does not fit the variables that there are."""


class Ends(Exception):  # noqa: N818
    """One device raises here; the program ends with that."""


class Scope:
    """The variables of a program that is being drawn."""

    def __init__(self, seed: int, mesh: tuple[int, ...], dtype: torch.dtype, values: str) -> None:
        self.rng = Random(seed)
        self.seed, self.mesh, self.dtype, self.values = seed, mesh, dtype, values
        self.leaves: list[Leaf] = []
        self.steps: list[Step] = []
        self.env: Env = {}
        self.grad_mode = True
        self._count = 0

    def program(self) -> Program:
        """What has been drawn."""
        return Program(self.mesh, tuple(self.leaves), tuple(self.steps), self.seed)

    # -- choices ----------------------------------------------------------------------------------------

    def chance(self, p: float) -> bool:
        """True with probability p."""
        return self.rng.random() < p

    def dims(self, x: torch.Tensor) -> int:
        """A dim of x, sometimes counted from the end."""
        if not x.dim():
            raise Nope
        dim = self.rng.randrange(x.dim())
        return dim - x.dim() if self.chance(0.3) else dim

    def __getitem__(self, ref: Ref) -> torch.Tensor:
        x = self.env[ref.name]
        assert isinstance(x, torch.Tensor)
        return x

    def pick(
        self,
        kinds: str = "fc",
        *,
        dims: int = 0,
        where: Callable[[torch.Tensor], bool] = lambda x: True,
        written: bool = False,
    ) -> Ref:
        """A variable of one of these kinds (float, complex, integer, bool), the younger the likelier.

        Args: written: it will be written in place, so leaves that require grad are not wanted.
        """
        found = [
            name
            for name, x in self.env.items()
            if isinstance(x, torch.Tensor) and kind_of(x) in kinds and x.dim() >= dims and _holds(where, x)
            and not (written and self.grad_mode and _holds(_is_parameter, x) and not self.chance(0.02))
        ]  # fmt: skip
        if not found:
            raise Nope
        return Ref(self.rng.choices(found, [(i + 1) ** 1.5 for i in range(len(found))])[0])

    def leaf(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        values: str = "",
        *,
        grad: bool | None = None,
        pending: bool = True,
    ) -> Ref:
        """A new leaf; it stands at the beginning of the program."""
        dtype = dtype or self.dtype
        values = values or self.default_values(dtype)
        floating = dtype.is_floating_point or dtype.is_complex
        wants = floating and (self.chance(0.5) if grad is None else grad)
        placements = draw_placements(self.rng, shape, dtype, self.mesh)
        while not pending and any(p.startswith("Partial") for p in placements):
            placements = draw_placements(self.rng, shape, dtype, self.mesh)
        like = [x.placements for x in self.leaves if x.shape == tuple(shape) and "Partial" not in str(x)]
        if len(self.mesh) > 1 and like and self.chance(0.3):
            placements = turned(like[-1])
        name = self.name("x")
        made = Leaf(name, tuple(shape), str(dtype).removeprefix("torch."), placements, values,
                    self.rng.randrange(1000), wants)  # fmt: skip
        self.leaves.append(made)
        self.env[name] = Plain().leaf(made)
        return Ref(name)

    def default_values(self, dtype: torch.dtype) -> str:
        """What a leaf of this type is filled with."""
        if dtype == torch.bool:
            return "bool"
        if dtype.is_floating_point:
            return self.values
        return "normal" if dtype.is_complex else ("bytes" if self.values == "bytes" else "integers")

    def partner(self, x: torch.Tensor, shape: tuple[int, ...] | None = None) -> Ref:
        """A variable of x's type that has a shape (by default x's own), or a new leaf."""
        wanted = tuple(x.shape) if shape is None else shape
        if self.chance(0.5):
            try:
                return self.pick("fcib", where=lambda y: tuple(y.shape) == wanted and y.dtype == x.dtype)
            except Nope:
                pass
        return self.leaf(wanted, x.dtype)

    def broadcast(self, x: torch.Tensor) -> Ref:
        """A variable that broadcasts to x's shape."""
        shape = list(x.shape)
        for dim in range(len(shape)):
            if self.chance(0.25):
                shape[dim] = 1
        if shape and self.chance(0.25):
            shape = shape[self.rng.randint(0, len(shape)) :]
        return self.partner(x, tuple(shape))

    def name(self, prefix: str = "v") -> str:
        """A new name."""
        self._count += 1
        return f"{prefix}{self._count}"

    # -- steps ------------------------------------------------------------------------------------------

    def trial(self, call: str, *args: Any, **kwargs: Any) -> Any:
        """What a call would give; nothing is added. It must not write."""
        env = dict(self.env)
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                execute(Step(("trial",), call, args, tuple(kwargs.items())), env, Plain())
        except Exception as error:
            raise Nope from error
        return env["trial"]

    def do(self, call: str, *args: Any, form: str = "plain", result: bool = True, **kwargs: Any) -> list[Ref]:
        """Add a call; its results are new variables.

        Raises: Nope: one device refuses it, or values get out of hand. Ends: it refuses, and that is kept.
        """
        step = Step(("?",) if result else (), call, args, tuple(kwargs.items()), form, self.grad_mode)
        if call in _DEPRECATED and _overlaps(self.value(args[0])):
            raise Nope
        before = versions(self.env)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                execute(step, self.env, Plain())
        except Exception as error:
            self.env.pop("?", None)
            kept = self.chance(_KEPT_ERRORS[_kind_of_call(call, form)]) and _is_refusal(error)
            if kept and not slips(step, self.env):
                self.steps.append(replace(step, outs=(self.name(),) if result else ()))
                raise Ends from error
            raise Nope from error
        if collides(step, self.env) or slips(step, self.env):
            raise Nope
        value = self.env.pop("?", None)
        outs = self._named(value) if result else {}
        many = result and isinstance(value, list | tuple)
        self.steps.append(replace(step, outs=tuple(outs), many=many))
        self.env.update(outs)
        grown = [n for n, version in before.items() if self.env[n]._version > version]
        self._check([self.env[n] for n in (*outs, *grown)])
        return [Ref(name) for name in outs]

    def _named(self, value: Any) -> dict[str, Any]:
        if isinstance(value, list | tuple):
            if not value:
                raise Nope
            return {self.name(): v for v in value}
        return {self.name(): value}

    def _check(self, values: list[Any]) -> None:
        for x in values:
            if isinstance(x, float | complex) and not abs(x) < 1e6:
                raise Nope
            if not isinstance(x, torch.Tensor):
                continue
            if x.numel() > _MAX_NUMEL or x.dim() > 6 or x.is_sparse:
                raise Nope
            if (x.is_floating_point() or x.is_complex()) and x.numel():
                largest = x.detach().abs().max()
                if not bool(largest < _LARGEST.get(x.dtype, 1e5)):
                    raise Nope

    # -- all or nothing ---------------------------------------------------------------------------------

    def attempt(self, family: Callable[[Scope], None]) -> bool:
        """Draw a family; leave everything as it was where it leads nowhere."""
        leaves, steps, count = len(self.leaves), len(self.steps), self._count
        mode = self.grad_mode
        try:
            family(self)
        except Nope:
            del self.leaves[leaves:], self.steps[steps:]
            self._count, self.grad_mode = count, mode
            self._again()
            return False
        self.grad_mode = mode
        return True

    def _again(self) -> None:
        """Run what is left from the start: what was given up may have written."""
        self.env = {leaf.name: Plain().leaf(leaf) for leaf in self.leaves}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number, step in enumerate(self.steps):
                try:
                    execute(step, self.env, Plain())
                except Exception:  # noqa: BLE001 - it ran only because of what was given up
                    del self.steps[number:]
                    return

    def value(self, ref: Any) -> Any:
        """What a reference stands for."""
        return resolved(ref, self.env)


def _overlaps(x: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))


def _holds(where: Callable[[torch.Tensor], bool], x: torch.Tensor) -> bool:
    """False also where torch does not say: a view made without gradients, its base written with them."""
    try:
        return where(x)
    except RuntimeError:
        return False


def _is_parameter(x: torch.Tensor) -> bool:
    return x.is_leaf and x.requires_grad


def kind_of(x: torch.Tensor) -> str:
    """f, c, i or b."""
    if x.dtype.is_complex:
        return "c"
    return "f" if x.dtype.is_floating_point else "b" if x.dtype == torch.bool else "i"


def _kind_of_call(call: str, form: str) -> str:
    if "backward" in call or call == "torch.autograd.grad":
        return "backward"
    return "written" if form in {"in place", "through a view", "out=", "setitem"} else "other"


def _is_refusal(error: Exception) -> bool:
    """Not a kernel that is missing for a type, nor zeros that torch made itself: these are no promise."""
    slips = ("not implemented for", "ZeroTensors are immutable")
    return not isinstance(error, NotImplementedError | TypeError) and not any(s in str(error) for s in slips)
