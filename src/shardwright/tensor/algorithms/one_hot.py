"""`one_hot`: torch compares the classes of a subclass with all that there are, and looks at none of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from shardwright.rules.algorithms.ops import within
from shardwright.rules.call import Args
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.plain.boundary import Own

_NAMES = {"input": "x", "self": "x"}  # of the function, and of the op


def one_hot(func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
    """The function, once its classes were looked at as on one device.

    Raises: RuntimeError: a class that this rank holds is not one of them.
    """
    return func(*_looked_at(*args, **{_NAMES.get(name, name): value for name, value in kwargs.items()}))


def _looked_at(x: Any, num_classes: int = -1) -> tuple[Any, int]:
    if not isinstance(x, DTensor) or x.dtype != torch.int64:
        return x, num_classes
    if not x.numel() and num_classes <= 0:
        raise RuntimeError("Can not infer total number of classes from empty tensor.")
    x = within(x, 0, None, "Class values must be non-negative.")
    if num_classes != -1:
        x = within(x, None, num_classes - 1, "Class values must be smaller than num_classes.")
    return x, num_classes


_FORMS = (functional.one_hot, torch.ops.aten.one_hot, torch.ops.aten.one_hot.default)
OWN: dict[Any, Own] = dict.fromkeys(_FORMS, one_hot)
