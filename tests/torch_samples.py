"""The operators of torch's own test database; with this module imported, their samples are cheap to ask for.

At each list of samples torch reads the source of every frame, to find the unittest that asks: 65 ms, and none
does. At each sample it sets the seed through `torch.manual_seed`, which formats the stack three times.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core

__all__ = ["OF_A_SET", "op_db", "seed"]

# Their samples are drawn from a set of words, whose order is another in each process.
OF_A_SET = frozenset({"meshgrid.list_of_tensors", "meshgrid.variadic_tensors"})


def seed(number: int = common_utils.SEED) -> None:
    """Set the state of every generator on the CPU."""
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - what torch's samples draw from
    torch.default_generator.manual_seed(number)


common_utils.extract_test_fn = core.extract_test_fn = lambda: None
common_utils.set_rng_seed = seed
