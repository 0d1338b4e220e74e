"""Ways that run other ops in place of a call: decompositions, functional forms, `out=` of another size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardwright.compat import DispatchKey, TensorType, is_composite, tree_leaves
from shardwright.rules import registry
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.rules.op import functional_form, out_names
from shardwright.tensor.dispatch.asked import Asked
from shardwright.tensor.dispatch.kernels import with_keys
from shardwright.tensor.dispatch.ways.fresh_results import fresh, laid
from shardwright.tensor.dispatch.ways.out import resized_first, written_from
from shardwright.tensor.plain.boundary import helpers


@dataclass(frozen=True, slots=True)
class Steps:
    """Other ops that give the value of a call."""

    function: Callable[..., Any]

    def run(self, args: Args, kwargs: Kwargs) -> Any:
        """The same value from other ops, each dispatched on its own; NotImplemented: not for these arguments.

        Tensors that the steps make of their own are the same on every rank.
        """
        with helpers():
            return self.function(*args, **kwargs)


def of_an_undefined_gradient(asked: Asked) -> Steps | None:
    """Autograd asks for the derivative of what nobody used, None; its functions without data do not know."""
    takes_one = isinstance(asked.func._schema.arguments[0].type, TensorType)
    return Steps(partial(_undefined, asked.func)) if takes_one else None


def _undefined(func: Op, *_args: Any, **_kwargs: Any) -> Any:
    """What the kernels give then, on a rank without elements too."""
    made = (None,) * len(func._schema.returns)
    return made[0] if len(made) == 1 else made


def decomposed(asked: Asked) -> Steps | None:
    """Simpler ops that an op without a rule consists of; of one that writes, the form that does not."""
    func = asked.func
    if is_composite(func):
        return Steps(partial(_taken_apart, func))  # it comes whole in inference mode alone
    function = registry.fallback_decomposition(func)
    return _functional(func) if function is None else Steps(laid(asked, fresh(func, function)))


def _taken_apart(func: Op, *args: Any, **kwargs: Any) -> Any:
    """The ops of which it consists, called as torch calls them above dispatch.

    Conjugates are carried out: kernels do not see them. Views have a base, with which they share the count of
    writes, unless torch gives one to what the op returns.
    """
    views, conjugates = DispatchKey.ADInplaceOrView, DispatchKey.Conjugate
    keys = (conjugates,) if func.has_kernel_for_dispatch_key(views) else (conjugates, views)
    return with_keys(keys, func.decompose, args, kwargs)


def into_another_size(asked: Asked) -> Steps | None:
    """`out=` that has another size than the result gets that size first; where data decide it, after."""
    func, kwargs = asked.func, asked.kwargs
    names = out_names(func)
    if asked.infos is None:
        functional = functional_form(func)
        return None if functional is None else Steps(written_from(func, functional))
    targets = tree_leaves([kwargs[name] for name in names])
    sizes = [info.shape for info in asked.infos if info is not None]
    if len(sizes) != len(targets) or all(t.shape == s for t, s in zip(targets, sizes, strict=True)):
        return None
    return Steps(resized_first(func, sizes))


def by_functional_form(asked: Asked) -> Steps | None:
    """The form that writes nothing, where the op itself would need whole operands."""
    falls_back = asked.needs_whole_operands or asked.decision.fallback
    return _functional(asked.func) if falls_back else None


def _functional(func: Op) -> Steps | None:
    functional = functional_form(func)
    if functional is not None and _is_known(functional):
        return Steps(written_from(func, functional))
    return None


def _is_known(func: Op) -> bool:
    """Is there something better for the op than to make its operands whole?"""
    return bool(
        registry.rules_of(func)
        or registry.rewrite_of(func)
        or registry.fallback_decomposition(func)
        or is_composite(func)
    )
