"""The words of tensor-parallel plans, as `transformers` models bring them, and what each says of a parameter.

A word is about where a matrix lives. What `transformers` adds to it, hooks that gather and reduce, is not
needed: the product of a matrix cut along its inputs is a pending sum, a gradient that ranks hold terms of
is too, and who needs either finished finishes it.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from shardwright.errors import ParallelError


class Along(Enum):
    """The dim of a weight that is cut: [outputs, inputs] of a linear, [..., outputs, inputs] of experts."""

    OUTPUTS = "outputs"
    INPUTS = "inputs"
    ROWS = "rows"
    COLUMNS = "columns"
    NONE = "nothing"


@dataclass(frozen=True, slots=True)
class Word:
    """What a word says of the parameters of the module that it names, or of the parameter.

    Args:
        along: what is cut.
        packed: two matrices stand in the cut dim one after the other, gate and up, and each is cut.
        gathers: elsewhere its reader is handed the whole output, since it slices it: the matrix may be
            several fused into one.
        sequence: what the module reads is cut along the sequence.
    """

    along: Along
    packed: bool = False
    gathers: bool = False
    sequence: bool = False


_OUTPUTS, _INPUTS, _NOTHING = Word(Along.OUTPUTS), Word(Along.INPUTS), Word(Along.NONE)

WORDS = MappingProxyType(
    {
        "colwise": _OUTPUTS,
        "colwise_rep": Word(Along.OUTPUTS, gathers=True),
        "colwise_gather_output": Word(Along.OUTPUTS, gathers=True),
        "rowwise": _INPUTS,
        "rowwise_rep": _INPUTS,
        "rowwise_split_input": _INPUTS,
        "packed_colwise": Word(Along.OUTPUTS, packed=True),
        "packed_rowwise": Word(Along.INPUTS, packed=True),
        "embedding_rowwise": Word(Along.ROWS),
        "embedding_colwise": Word(Along.COLUMNS),
        "sequence_parallel": Word(Along.NONE, sequence=True),
        "replicate": _NOTHING,
        # Where the ranks' terms meet is what a pending sum says by itself.
        "replicated_with_grad_allreduce": _NOTHING,
        "mla_kv_a_proj": _NOTHING,
        "all_reduce": _NOTHING,
        # Words of a module whose parameters have words of their own.
        "moe_tp_experts": _NOTHING,
        "moe_identity_expert": _NOTHING,
        "local_params": _NOTHING,
        # Words of earlier releases.
        "local_colwise": _OUTPUTS,
        "local_rowwise": _INPUTS,
        "local_packed_rowwise": Word(Along.INPUTS, packed=True),
        "local": _NOTHING,
        "isolated": _NOTHING,
        "gather": _NOTHING,
    }
)

_OF_EXPERTS = ("grouped_gemm", "ep_dispatch_experts", "ep_router", "ep_router_local")


def word(name: str) -> Word:
    """What a word means. Raises: ParallelError: it is unknown, or a word of another strategy."""
    if name in WORDS:
        return WORDS[name]
    if name in _OF_EXPERTS:
        raise ParallelError(
            f"{name!r} is a word of expert parallelism: whole experts on each rank, which is another "
            "strategy (parallelize_expert_parallel). A tensor plan cuts each expert: 'packed_colwise' for "
            "its gate_up_proj, 'rowwise' for its down_proj"
        )
    near = difflib.get_close_matches(str(name), [*WORDS, "auto"], n=1)
    raise ParallelError(
        f"{name!r} is no word of a tensor-parallel plan; did you mean {near[0]!r}?"
        if near
        else f"{name!r} is no word of a tensor-parallel plan; there are {', '.join(sorted(WORDS))}; a "
        "placement by parameter name says the same of any parameter: {'lm_head.weight': {'tp': sw.Shard(0)}}"
    )
