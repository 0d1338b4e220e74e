"""Memory that processes of one host share: of a distributed tensor, that of this rank's part."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.rules.call import Args


def _share(_: Any, args: Args, __: dict[str, Any]) -> Any:
    """torch asks the tensor itself, which has no memory: that ends the process."""
    args[0]._local_tensor.share_memory_()
    return args[0]


def _is_shared(_: Any, args: Args, __: dict[str, Any]) -> bool:
    return bool(args[0]._local_tensor.is_shared())


OWN: dict[Any, Any] = {torch.Tensor.share_memory_: _share, torch.Tensor.is_shared: _is_shared}
