"""What a row of the table may say: the strategies, in the order in which they are applied."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from types import MappingProxyType

from shardwright.parallel.tensor.words import WORDS

TENSOR, SEQUENCE, EXPERT, CONTEXT = "tensor", "sequence", "expert", "context"
REPLICATE, FSDP, HSDP, BATCH_NORM = "replicate", "fsdp", "hsdp", "batch_norm"
AUTO = "auto"
DATA = (REPLICATE, FSDP, HSDP)
_SHARDED = frozenset({"reshard_after_forward", "mp_policy", "offload_policy", "shard_placement_fn"})


@dataclass(frozen=True, slots=True)
class Strategy:
    """A kind of row.

    Args:
        options: what may stand beside it, arguments of the function that it calls.
        whole: it is a decision for the whole model, in the row "".
    """

    options: frozenset[str] = frozenset()
    whole: bool = False


# Innermost first. What a pipeline's stages are is decided before any of them: the table is of one stage.
STRATEGIES = MappingProxyType(
    {
        TENSOR: Strategy(),
        SEQUENCE: Strategy(whole=True),
        EXPERT: Strategy(),
        CONTEXT: Strategy(frozenset({"attention", "cut", "placement", "output"})),
        BATCH_NORM: Strategy(),
        REPLICATE: Strategy(),
        FSDP: Strategy(_SHARDED),
        HSDP: Strategy(_SHARDED),
    }
)


def is_of_tensor(word: str) -> bool:
    """Is it a word of tensor parallelism? `replicate` is the strategy; `{tensor = "replicate"}` the word."""
    return word == AUTO or (word in WORDS and word not in STRATEGIES)


def unknown(word: str) -> str:
    """What to say of a word that is none."""
    tensor = [name for name in WORDS if is_of_tensor(name)]
    near = difflib.get_close_matches(word, [*STRATEGIES, AUTO, *tensor], n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"{word!r} is no word of the table; {hint}there are {', '.join(map(repr, STRATEGIES))}, and of "
        "tensor parallelism 'auto', 'colwise', 'rowwise', 'embedding_rowwise' and others that models bring"
    )
