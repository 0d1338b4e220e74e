"""The arguments of `fully_shard`, named and looked at before anything is changed."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from shardwright.errors import ParallelError, as_several, refuse_other_kind


def by_name(given: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by position under the names that `fully_shard`, which takes none, gives them."""
    known = inspect.signature(fully_shard).parameters
    after = list(known)[list(known).index("mesh") + 1 :]
    if len(given) > len(after):
        raise TypeError(
            f"parallelize_fsdp takes at most {len(after)} positional arguments after the mesh: {after}"
        )
    twice = set(after[: len(given)]) & set(named)
    if twice:
        raise TypeError(f"parallelize_fsdp got {sorted(twice)} by position and by name")
    found = {**dict(zip(after, given, strict=False)), **named}
    _refuse_unknown(found, after)
    found["ignored_params"] = _parameters(found.get("ignored_params"))
    for name in ("mp_policy", "offload_policy"):
        wanted = type(known[name].default)  # torch takes others, and ignores them or fails in a forward
        if not isinstance(found.get(name, known[name].default), wanted):
            raise ParallelError(
                f"parallelize_fsdp: {name}={found[name]!r} is no {wanted.__name__} (torch.distributed.fsdp)"
            )
    return found


def _refuse_unknown(given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise ParallelError for arguments that torch does not have, or that it would fail at half way."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise ParallelError(f"parallelize_fsdp: there is no argument {name!r}; {hint}")
    reshard, ask = given.get("reshard_after_forward"), given.get("shard_placement_fn")
    fix = "True, False, the number of ranks to keep it gathered over, or None"
    refuse_other_kind(
        "parallelize_fsdp: reshard_after_forward", reshard, (int, NoneType), ParallelError, fix=fix
    )
    if ask is not None and not callable(ask):
        raise ParallelError(
            f"parallelize_fsdp: shard_placement_fn={ask!r:.60} is no function of a parameter\n"
            "  fix: lambda parameter: Shard(1), or None where dim 0 is to be cut"
        )


def _parameters(given: Any) -> set[nn.Parameter]:
    """What is to be ignored, read once: `module.parameters()` is empty when it is asked again."""
    ignored = () if given is None else given
    fix = "the parameters themselves, {module.weight}, not their names"
    if not isinstance(ignored, Tensor):
        name = "parallelize_fsdp: ignored_params"
        ignored = as_several(name, ignored, ParallelError, fix=fix, ordered=False)
    if isinstance(ignored, Tensor) or not all(isinstance(p, nn.Parameter) for p in ignored):
        raise ParallelError(f"parallelize_fsdp: ignored_params={given!r:.60} are no parameters\n  fix: {fix}")
    return set(ignored)
