"""What attention over a cut sequence costs a rank, counted by others: profiler, dispatcher, allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
from shardwright.parallel import parallelize_context
from shardwright.tensor.attention.asked import attention_by
from shardwright.testing.meshes import rank_mesh
from tests.models.configs import BY_NAME, batch_of
from tests.witness.witness import Witness


def _operands(length: int, shared: int, placement: Any) -> list[Any]:
    mesh = rank_mesh((torch.distributed.get_world_size(),), ("cp",))
    return [
        sw.distribute_tensor(torch.randn(1, heads, length, 8), mesh, [placement]).requires_grad_()
        for heads in (4, shared, shared)
    ]


def bytes_sent(way: str, length: int, shared: int) -> tuple[list[int], list[int], list[int]]:
    """What the process groups were asked to send, call by call: forward, backward; the record's two sums."""
    operands = _operands(length, shared, sw.ZigZag(2))
    gradient = operands[0].detach().clone()
    with attention_by(way), sw.trace() as t:
        with Witness() as forward:
            out = scaled_dot_product_attention(*operands, is_causal=True, enable_gqa=True)
        recorded = t.bytes
        with Witness() as backward:
            out.backward(gradient)
    found = [[_sent(call) for call in who.asked if _sent(call)] for who in (forward, backward)]
    return found[0], found[1], [recorded, t.bytes - recorded]


def _sent(call: Any) -> int:
    if call.kind == "send":
        return int(call.given)
    if call.kind == "all_to_all":
        own = call.splits[torch.distributed.get_rank()]
        return int(call.given * (sum(call.splits) - own) // sum(call.splits))
    assert call.kind in ("recv", "barrier"), call
    return 0


class _Kernels(TorchDispatchMode):
    """Adds up the pairs of a query and a key of every attention kernel that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in func.name():
            names = [argument.name for argument in func._schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            queries, keys = given["query"].shape[2], given["key"].shape[2]
            causal = given.get("is_causal", False)
            assert not causal or queries == keys
            self.pairs += queries * (queries + 1) // 2 if causal else queries * keys
        return func(*args, **(kwargs or {}))


def pairs_computed(placement: Any, length: int, window: int = 0) -> int:
    """Pairs that this rank's kernels compute, forward and backward; causal, or with a mask for a window."""
    operands = _operands(length, 4, placement)
    after = torch.arange(length)[:, None] - torch.arange(length)
    mask = (after >= 0) & (after < window) if window else None
    with _Kernels() as kernels, attention_by("ring"), sw.spmd(operands[0].device_mesh):
        out = scaled_dot_product_attention(*operands, attn_mask=mask, is_causal=mask is None)
        out.backward(operands[0].detach().clone())
    return kernels.pairs


def peak(step: Callable[[], object]) -> int:
    """The most bytes that the allocator had given out at once during a step, above those before."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def peaks(lengths: list[int], way: str) -> list[int]:
    """Of a step of a model, of these lengths; on one rank without our library."""
    architecture, found = BY_NAME["llama"], []
    for length in lengths:
        model = architecture.build()
        batch = batch_of(architecture, 1, length)
        if torch.distributed.get_world_size() > 1:
            mesh = rank_mesh((torch.distributed.get_world_size(),), ("cp",))
            parallelize_context(model, mesh, attention=way)

        def step(model: Any = model, batch: Any = batch) -> None:
            model(**batch, use_cache=False).loss.backward()

        step()
        found.append(min(peak(step) for _ in range(3)))
    return found
