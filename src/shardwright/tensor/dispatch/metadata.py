"""Shapes, strides and dtypes of an op's results, found by running it on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial, reduce
from types import NoneType
from typing import Any

import torch

from shardwright.compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    WithoutTangents,
    tree_flatten,
    tree_map_only,
    without_modes,
)
from shardwright.remember import memo, remembered
from shardwright.rules.call import Args, Call, Kwargs, Op, TensorInfo
from shardwright.rules.op import functional_form, is_pointwise, out_names
from shardwright.tensor.dispatch.grouped_products import grouped_product
from shardwright.tensor.dispatch.kernel_orders import KERNELS, as_kernels_put_them
from shardwright.tensor.dispatch.kernel_refusals import said_by_kernel
from shardwright.tensor.dispatch.ways.out import fits
from shardwright.tensor.dtensor import DTensor

# Ops without a kernel for tensors without data: results that are like `self`, each with its dtype if another.
_LIKE_SELF: dict[str, tuple[torch.dtype | None, ...]] = {
    "aten::fake_quantize_per_channel_affine_cachemask": (None, torch.bool),
    "aten::fake_quantize_per_tensor_affine_cachemask": (None, torch.bool),
    "aten::fractional_max_pool3d_backward": (None,),
    "aten::multi_margin_loss_backward": (None,),
    "aten::multilabel_margin_loss_backward": (None,),
}
# Ops by element whose function for tensors without data may state another dtype than their kernels give.
_PROMOTE_OTHERWISE = frozenset(
    {
        "aten::addr",
        "aten::clamp",
        "aten::clip",
        "aten::native_dropout_backward",
        "aten::pow",
        "aten::threshold_backward",
    }
)
# Norms whose CPU kernels keep mean and deviation in the widest type of their operands; torch's functions for
# tensors without data do not say so.
_STATISTICS = frozenset({"aten::native_layer_norm", "aten::native_group_norm"})


def _of_group_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor | None, ...]:
    """torch's own divides by the number of elements of a group, which may be none."""
    _, _, weight, _, channels, _, _, mask = rest
    like = x if weight is None else weight
    made = (torch.empty_like(x, dtype=grad.dtype), like.new_empty(channels), like.new_empty(channels))
    return tuple(m if wanted else None for m, wanted in zip(made, mask, strict=True))


def _of_view_copy(x: torch.Tensor, size: Any) -> torch.Tensor:
    """torch's own asks for a view; the kernel copies what is none."""
    return x.view(size) if isinstance(size, torch.dtype) else x.reshape(size).contiguous()


def _of_vector_norm(
    x: torch.Tensor, order: Any = 2, dims: Any = None, keepdim: bool = False, **kwargs: Any
) -> torch.Tensor:
    """torch's own refuses dims that count from the end, of a tensor without elements."""
    first = None if dims is None else [d + x.ndim if -x.ndim <= d < 0 else d for d in dims]
    made: torch.Tensor = torch.ops.aten.linalg_vector_norm(x, order, first, keepdim, **kwargs)
    return made


def _of_attention(query: torch.Tensor, *rest: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Up to torch 2.12 the sums of exponentials are told to be of float32, whatever they are of."""
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, *rest, **named)
    return out, sums.to(torch.promote_types(query.dtype, torch.float32))


# Ops whose function for tensors without data asks for more than their kernels do, and one that does not.
def _of_shift(op: Callable[..., torch.Tensor], x: torch.Tensor, by: Any) -> torch.Tensor:
    """torch's own refuses the bools that kernels take, beside whole numbers."""
    return (torch.bitwise_left_shift if torch.bool in (x.dtype, getattr(by, "dtype", None)) else op)(x, by)


def _of_multi_margin(x: torch.Tensor, target: torch.Tensor, *rest: Any) -> torch.Tensor:
    """torch's own gives the loss of one row a dim; the kernel gives it the shape of the target."""
    made: torch.Tensor = torch.ops.aten.multi_margin_loss(x, target, *rest)
    return made.reshape(target.shape) if made.dim() > target.dim() else made


def _of_multilabel_margin(
    x: torch.Tensor, target: torch.Tensor, reduction: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's own gives the loss of one row a dim, and takes a number for one class in one shape only."""
    given = x.reshape(target.shape) if x.numel() == target.numel() == 1 else x
    loss, named = torch.ops.aten.multilabel_margin_loss_forward(given, target, reduction)
    return (loss.reshape(()) if x.dim() <= 1 else loss), named


def _of_upsampling(
    op: Callable[..., torch.Tensor], x: torch.Tensor, *rest: Any, **named: Any
) -> torch.Tensor:
    """torch's own takes the sizes of an empty batch of images for a condition, which ends in a TypeError."""
    given = x.new_empty((1, *x.shape[1:])) if x.shape[:1] == (0,) else x
    return op(given, *rest, **named)[: len(x)]


_UPSAMPLING = (f"{name}{d}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for d in (1, 2, 3))
_OWN: dict[str, Callable[..., Any]] = {
    "aten::__lshift__": partial(_of_shift, torch.ops.aten.__lshift__),
    "aten::__rshift__": partial(_of_shift, torch.ops.aten.__rshift__),
    "aten::_grouped_mm": grouped_product,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _of_attention,
    "aten::linalg_vector_norm": _of_vector_norm,
    "aten::multi_margin_loss": _of_multi_margin,
    "aten::multilabel_margin_loss_forward": _of_multilabel_margin,
    "aten::nan_to_num_": lambda x, *_: x,  # torch's, of complex numbers, asks which are -inf
    "aten::nansum": torch.ops.aten.sum,  # torch's takes an empty list of dims for no dim, kernels for all
    "aten::native_group_norm_backward": _of_group_norm_backward,
    "aten::view_copy": _of_view_copy,
    **{f"aten::{name}": partial(_of_upsampling, getattr(torch.ops.aten, name)) for name in _UPSAMPLING},
}


# What calls were found to return, whatever the layouts of their operands were.
_MOST = 16384
_KNOWN: dict[Any, tuple[TensorInfo | None, ...]] = memo("metadata of results", {})
# Their functions for tensors without data speak for CUDA: they refuse what CPUs take under
# `torch.use_deterministic_algorithms`.
_SPEAK_FOR_CUDA = frozenset({"aten::histc", "aten::median", "aten::mode", "aten::nanmedian"})
_BY_VALUE = frozenset({
    NoneType, bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format,
})  # fmt: skip


class DataDependentError(Exception):
    """The op's result cannot be described without its data."""


def result_infos(func: Op, args: Args, kwargs: Kwargs) -> tuple[TensorInfo | None, ...]:
    """One entry per flattened result, None where it is no tensor.

    Raises: DataDependentError; what the op itself raises for these shapes.
    """
    try:
        asked = _described_exactly((args, tuple(kwargs.items())))
        key = (func, asked, _device(args, kwargs), torch.get_default_dtype())
        known = _KNOWN.get(key)
    except TypeError:  # something is given that is not known by its value
        return _infos(func, args, kwargs)
    if known is None:
        known = _infos(func, args, kwargs)
        if len(_KNOWN) == _MOST:
            _KNOWN.clear()
        _KNOWN[key] = known
    return known


def _described_exactly(value: Any) -> Any:
    """An argument by what it is: numbers with their types, which decide the dtype of a result (1, 1.0, True).

    Raises: TypeError: it is not known by its value (a plain tensor, a generator).
    """
    if isinstance(value, DTensor):
        return _describe(value)
    if isinstance(value, list | tuple):
        return tuple(map(_described_exactly, value))
    if type(value) not in _BY_VALUE:
        raise TypeError(value)
    return (type(value), value)


def _infos(func: Op, args: Args, kwargs: Kwargs) -> tuple[TensorInfo | None, ...]:
    """As `result_infos`, found out."""
    with without_modes(), torch.no_grad(), WithoutTangents(), _errors_of_kernels(func, args, kwargs):
        meta_args, meta_kwargs = tree_map_only(DTensor, _meta, (args, dict(kwargs)))
        if "device" in meta_kwargs:
            meta_kwargs["device"] = torch.device("meta")
        try:  # NotImplementedError is how torch says that an op has no kernel without data
            if func._schema.is_mutable:
                _refuse_what_does_not_fit(func, args, meta_args, meta_kwargs)
            another = func._schema.name in _SPEAK_FOR_CUDA and _speaks_for_another(args, kwargs)
            with _nothing_refused() if another else nullcontext():
                out = _without_data(func)(*meta_args, **meta_kwargs)
            if func._schema.name in KERNELS or is_pointwise(func):
                out = as_kernels_put_them(func, meta_args, meta_kwargs, out, _device(args, kwargs))
        except (DataDependentOutputException, DynamicOutputShapeException, NotImplementedError) as error:
            if not func._schema.returns:
                return (None,)
            if func._schema.name not in _LIKE_SELF:
                raise DataDependentError(func.name()) from error
            out = _like_self(func, meta_args)
        except TypeError as error:
            if any(argument.is_out for argument in func._schema.arguments):
                raise DataDependentError(func.name()) from error  # torch describes the op without `out` only
            raise
        except RuntimeError as error:
            if torch.Tag.dynamic_output_shape in func.tags:  # some say it in words of their own
                raise DataDependentError(func.name()) from error
            raise
    infos = [_info(value) for value in tree_flatten(out)[0]]
    if func._schema.name in _STATISTICS:
        _in_the_widest_type(infos, [x for x in tree_flatten((args, kwargs))[0] if _is_ours(x)])
    return tuple(infos)


@contextmanager
def _errors_of_kernels(func: Op, args: Args, kwargs: Kwargs) -> Iterator[None]:
    """torch's functions without data raise other kinds of errors than its kernels, in C++ too."""
    try:
        yield
    except (ArithmeticError, AssertionError, IndexError, RuntimeError, ValueError) as error:
        ours = [x for x in tree_flatten((args, kwargs))[0] if _is_ours(x)]
        said = said_by_kernel(func, args, kwargs, ours)
        if said is None and isinstance(error, RuntimeError):
            raise
        kind = IndexError if isinstance(error, IndexError) else RuntimeError
        raise said or kind(str(error)) from None


def _refuse_what_does_not_fit(
    func: Op, args: Args, meta_args: tuple[Any, ...], meta_kwargs: dict[str, Any]
) -> None:
    """Many in-place forms, without data, take what their kernels refuse, or change their own size."""
    plain = functional_form(func) if is_pointwise(func) and not out_names(func) else None
    if plain is not None and isinstance(args[0], DTensor):
        layout = args[0]._spec.layout
        fits(func, _without_data(plain)(*meta_args, **meta_kwargs), layout.shape, layout.dtype)


def _without_data(func: Op) -> Callable[..., Any]:
    """What makes the results of an op from operands without data."""
    if func._schema.name in _PROMOTE_OTHERWISE and not func._schema.is_mutable:
        return partial(_promoted, func)
    return _OWN.get(func._schema.name, func)


def _promoted(func: Op, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The result without data, of the dtype that the kernel gives elements like these."""
    made: torch.Tensor = func(*args, **kwargs)
    ones = tree_map_only(
        torch.Tensor, lambda x: torch.ones([1] * x.dim(), dtype=x.dtype, device="cpu"), (args, kwargs)
    )
    with suppress(RuntimeError):  # CPUs have no kernel for such a type
        return made.to(func(*ones[0], **ones[1]).dtype)
    return made


def _speaks_for_another(args: Args, kwargs: Kwargs) -> bool:
    return torch.are_deterministic_algorithms_enabled() and _device(args, kwargs) == "cpu"


@contextmanager
def _nothing_refused() -> Iterator[None]:
    """Nothing is, for not being deterministic: the kernel has the word."""
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warns)


def _device(args: Args, kwargs: Kwargs) -> str:
    return next((x.device.type for x in tree_flatten((args, kwargs))[0] if _is_ours(x)), "cpu")


def _is_ours(x: Any) -> bool:
    return isinstance(x, DTensor)


def _in_the_widest_type(infos: list[TensorInfo | None], operands: list[DTensor]) -> None:
    if operands[0].device.type != "cpu":
        return
    widest = reduce(torch.promote_types, {x.dtype for x in operands})
    for index in (1, 2):
        info = infos[index]
        infos[index] = None if info is None else TensorInfo(info.shape, info.stride, widest)


def _like_self(func: Op, args: Args) -> tuple[torch.Tensor, ...]:
    own = args[[argument.name for argument in func._schema.arguments].index("self")]
    like: torch.Tensor = own.contiguous()
    return tuple(torch.empty_like(like, dtype=dtype or like.dtype) for dtype in _LIKE_SELF[func._schema.name])


def called(func: Op, args: Args, kwargs: Kwargs) -> Call:
    """The logical call, remembered by its description."""
    return _called(func, described(args), tuple(zip(kwargs, described(tuple(kwargs.values())), strict=True)))


@remembered(4096)
def _called(func: Op, args: Args, kwargs: tuple[tuple[str, Any], ...]) -> Call:
    return Call(func, args, kwargs, infos_of(func, args, dict(kwargs)))


def infos_of(func: Op, args: Args, kwargs: Kwargs) -> tuple[TensorInfo | None, ...]:
    """As `result_infos`, of arguments that are described by `TensorInfo`."""
    with without_modes(), torch.no_grad(), WithoutTangents():
        meta_args, meta_kwargs = tree_map_only(TensorInfo, _meta, (args, dict(kwargs)))
        out = _without_data(func)(*meta_args, **meta_kwargs)
        return tuple(_info(value) for value in tree_flatten(out)[0])


def _meta(x: DTensor | TensorInfo) -> torch.Tensor:
    info = x._spec.layout if isinstance(x, DTensor) else x
    return torch.empty_strided(info.shape, info.stride, dtype=info.dtype, device="meta")


def described(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments as a `Call` has them: tensors by their metadata, lists as tuples."""
    return tuple(_describe(v) for v in values)


def described_call(func: Op, args: Args, kwargs: Kwargs) -> Call:
    """The logical call; without results where they cannot be known before it runs."""
    try:
        infos = result_infos(func, args, kwargs)
    except DataDependentError:
        infos = ()
    return Call(func, described(args), tuple((k, _describe(v)) for k, v in kwargs.items()), infos)


def _describe(value: Any) -> Any:
    if isinstance(value, DTensor):
        layout = value._spec.layout
        return TensorInfo(tuple(layout.shape), tuple(layout.stride), layout.dtype)
    if isinstance(value, list | tuple):
        return described(tuple(value))
    return value


def _info(value: Any) -> TensorInfo | None:
    if not isinstance(value, torch.Tensor):
        return None
    return TensorInfo(tuple(value.shape), tuple(value.stride()), value.dtype)
