"""`scaled_dot_product_attention` of DTensors whose sequence is cut: chosen once, for both passes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.nn import functional

from shardwright.comm.record import record_decision, recording
from shardwright.comm.traced import goes_in_groups
from shardwright.errors import RuleError
from shardwright.layout.layout import Layout
from shardwright.rules.call import Args
from shardwright.tensor.attention.asked import Asked, asked_here
from shardwright.tensor.attention.choice import (
    AUTO,
    EXCHANGE,
    CutCall,
    Exchange,
    cheaper,
    cut_call,
    exchange_of,
)
from shardwright.tensor.attention.ring_function import Facts, RingAttention
from shardwright.tensor.autograd import apply, redistributed
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.explicit_mode import refuse_exchange
from shardwright.tensor.move import move_asked
from shardwright.tensor.move_many import redistributed_together
from shardwright.tensor.plain.boundary import Own
from shardwright.tensor.wrap import as_ours, as_replicated, up_to_date

_NAME = "scaled_dot_product_attention"


@dataclass(frozen=True)
class Given:
    """The arguments of a call, by name."""

    query: Any
    key: Any
    value: Any
    attn_mask: Any = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def factor(self) -> float:
        """Of the scores."""
        width: int = self.query.shape[-1]
        return width**-0.5 if self.scale is None else self.scale


def attention(func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
    """`torch.nn.functional.scaled_dot_product_attention` where a DTensor is among the operands.

    Where one set of mesh axes cuts queries and keys along the sequence: a ring, or an exchange of heads, as
    the block around asks or by bytes. Everything else goes to the rules of the ops.
    Raises: RuleError: the way that the program asked for cannot serve this call.
    ImplicitRedistributionError: inside `explicit()`, where no way was asked for.
    """
    given, asked = _cast(Given(*args, **kwargs)), asked_here()
    call = _cut_call(given)
    refusal = "" if call is None else _refusal(given, call, asked.way)
    if call is None or refusal:
        if refusal and asked.way != AUTO:
            raise RuleError(refusal)
        return func(*args, **kwargs)
    way = cheaper(call) if asked.way == AUTO else asked.way
    _announce(call, way, asked)
    exchange = exchange_of(call)
    if way == EXCHANGE and exchange is not None:
        return _exchanged(func, given, call, exchange)
    return _in_ring(given, call, asked)


def _cast(given: Given) -> Given:
    """The operands in the type that `torch.autocast` runs attention in."""
    device = given.query.device.type
    if not torch.is_autocast_enabled(device):
        return given
    dtype = torch.get_autocast_dtype(device)

    def cast(x: Any) -> Any:
        wider = isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype is not torch.float64
        return x.to(dtype) if wider else x

    operands = {n: cast(getattr(given, n)) for n in ("query", "key", "value", "attn_mask")}
    return replace(given, **operands)


def _cut_call(given: Given) -> CutCall | None:
    operands = (given.query, given.key, given.value)
    if not all(isinstance(x, TorchDTensor) for x in operands):
        return None
    ours = [as_ours(x) for x in operands]
    if any(x.device_mesh != ours[0].device_mesh for x in ours):
        return None
    call = cut_call(*(x._spec.layout for x in ours))
    if call is not None and len(call.axes) > 1 and goes_in_groups(ours[0]._local_tensor):
        return None  # several axes have no group together
    grouped = given.query.shape[1] != given.key.shape[1] if call is not None else False
    return None if grouped and not given.enable_gqa else call


def _refusal(given: Given, call: CutCall, way: str) -> str:
    """Why neither way serves the call, or the one that was asked for does not; the rules serve it then."""
    if given.dropout_p:
        return (
            f"{_NAME}: dropout inside attention is drawn for whole rows of keys, which no rank of "
            f"{call.axis_names} has\n  fix: dropout_p=0.0 (attention_dropout=0.0 in a configuration), or "
            "attention='auto', which gathers the keys where dropout is asked for"
        )
    if not _takes_mask(given):
        return (
            f"{_NAME}: attention='{way}' takes a boolean mask or one of the dtype of the queries, without a "
            "gradient of its own, that broadcasts to the scores; and either a mask or is_causal\n"
            "  fix: attention='auto', which follows torch's own steps there"
        )
    if way == EXCHANGE and exchange_of(call) is None:
        return (
            f"{_NAME}: attention='all_to_all' needs heads for all ranks of {call.axis_names}: "
            f"{call.key.shape[1]} heads of keys (of {call.query.shape[1]}{_cut_further(call)}) cannot "
            f"be shared out over {len(call.keys.held)} ranks\n"
            "  fix: attention='ring', which cuts no heads, or 'auto'"
        )
    return ""


def _cut_further(call: CutCall) -> str:
    pairs = zip(call.key.axes, call.key.placements, strict=True)
    axes = [a for i, (a, p) in enumerate(pairs) if p.is_partition and i not in call.axes]
    return f", cut over {', '.join(axes)} too" if axes else ""


def _takes_mask(given: Given) -> bool:
    mask = given.attn_mask
    if mask is None:
        return True
    if given.is_causal or not isinstance(mask, torch.Tensor) or mask.requires_grad or not 2 <= mask.ndim <= 4:
        return False
    if isinstance(mask, TorchDTensor) and mask.device_mesh != given.query.device_mesh:
        return False
    scores = (*given.query.shape[:3], given.key.shape[2])
    fits = all(size in (1, full) for size, full in zip(mask.shape, scores[4 - mask.ndim :], strict=True))
    return fits and mask.dtype in (torch.bool, given.query.dtype)


def _announce(call: CutCall, way: str, asked: Asked) -> None:
    """Refuse, inside `explicit()`, what nobody asked for; record what is done."""
    exchange = exchange_of(call)
    sent = exchange.bytes if way == EXCHANGE and exchange is not None else call.ring_bytes
    each = sent // len(call.key.ranks)
    if not asked.stated:
        refuse_exchange(_NAME, each, "attend over a sequence that is cut")
    if recording():
        other = "" if exchange is None else f", an all-to-all of heads {exchange.bytes} B"
        record_decision(
            _NAME,
            f"{way} over {call.axis_names}: about {each} B sent by each rank and pass",
            f"over all ranks a ring sends {call.ring_bytes} B{other}",
        )


def _exchanged(func: Any, given: Given, call: CutCall, exchange: Exchange) -> DTensor:
    """Every rank attends with some heads, to whole sequences, and sends the positions back."""
    mesh = as_ours(given.query).device_mesh
    operands = [as_ours(x) for x in (given.query, given.key, given.value)]
    layouts = (exchange.query, exchange.key, exchange.value)
    query, key, value = redistributed_together(operands, layouts, mesh)
    arguments = {"is_causal": given.is_causal, "scale": given.scale, "enable_gqa": given.enable_gqa}
    mask = given.attn_mask
    if mask is not None and not isinstance(mask, TorchDTensor):
        mask = as_replicated(mask, mesh)
    made = func(query, key, value, attn_mask=mask, **arguments)
    target = made._spec.layout.with_placements(call.result.placements, order=call.result.order_names)
    return redistributed(made, target, mesh)


def _in_ring(given: Given, call: CutCall, asked: Asked) -> DTensor:
    operands = tuple(as_ours(x) for x in (given.query, given.key, given.value))
    mask = None if given.attn_mask is None else _rows_of_mask(given.attn_mask, operands[0], call)
    facts = Facts(call, _result(given, call), given.is_causal, given.factor, asked.blocking)
    return apply(RingAttention, *operands, mask, facts)


def _rows_of_mask(mask: Any, query: DTensor, call: CutCall) -> torch.Tensor:
    """The rows of a mask for this rank's queries, over all keys:  [b or 1, h or 1, l/n or 1, s or 1]."""
    whole = mask if isinstance(mask, TorchDTensor) else as_replicated(mask, query.device_mesh)
    whole = as_ours(cast("TorchDTensor", whole[(None,) * (4 - mask.ndim)]))
    up_to_date(whole)
    return move_asked(whole, call.mask_layout(whole._spec.layout), reason=f"{_NAME}: rows of the mask")


def _result(given: Given, cut: CutCall) -> Layout:
    """The result lies in memory as one device's: like the queries, where torch's kernel takes the call."""
    mask = given.attn_mask
    return cut.result_as_query if mask is None or mask.ndim in (2, 4) else cut.result


OWN: dict[Any, Own] = {functional.scaled_dot_product_attention: attention}
