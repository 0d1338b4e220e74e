"""The parameters that a forward writes into: a copy of each is taken before its first write, of no other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint.pieces import local_of
from shardwright.compat import TorchDispatchMode, tree_leaves
from shardwright.parallel.pipeline.forward.hollow import is_hollow
from shardwright.parallel.pipeline.forward.memory import same_elements
from shardwright.tensor.views.write_back import written_places


class Written(TorchDispatchMode):
    """Sees each op while it is on, and keeps what the parameters that it writes into held before.

    Parameters are known by their memory: a layer may write through `data`, a view, or `detach()`.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of_memory: dict[int, list[Tensor]] = {}
        self._before: list[tuple[Tensor, Tensor]] = []
        self._held = [(parameter, parameter.data) for parameter in parameters]
        for local in (local_of(data) for _, data in self._held):
            self._of_memory.setdefault(_memory(local), []).append(local)
        self._of_memory.pop(0, None)  # without elements

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, name in written_places(func):
            for x in tree_leaves(args[place] if place < len(args) else kwargs.get(name)):
                if isinstance(x, Tensor):
                    self._keep(x)
        return func(*args, **kwargs)

    def _keep(self, x: Tensor) -> None:
        for local in self._of_memory.pop(_memory(local_of(x)), ()):
            self._before.append((local, local.clone()))

    def put_back(self) -> None:
        """What was written is as it was, also where it is other memory now (`parameter.data = x`)."""
        with torch.no_grad():
            for local, before in self._before:
                if _memory(local):
                    local.copy_(before)
        for parameter, data in self._held:
            now, before = local_of(parameter), local_of(data)
            memories = {_memory(now), _memory(before)}
            if len(memories) == 2 and 0 not in memories and not same_elements(now, before):
                parameter.data = data


def _memory(x: Tensor) -> int:
    """Where its elements lie; 0 where there are none: of what `fully_shard` had gathered and has freed."""
    if is_hollow(x) or x.is_meta or x.layout is not torch.strided:
        return 0
    return x.untyped_storage().data_ptr()
