"""Parameters of a model whose stages lie on different ranks: what a norm over all of them adds up."""

from __future__ import annotations

import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.compat import default_store
from shardwright.context.submesh import groups_above_one
from shardwright.errors import ConfigError, ShardwrightError, words_of

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SharedByStages:
    """Hangs on a parameter of a pipeline, as its attribute `shared_by_stages`.

    Args: mesh: the axis whose ranks hold the other stages. counts: whether norms count it on this rank; a
        parameter that several stages hold (tied weights) is counted on one.
    """

    mesh: DeviceMesh
    counts: bool

    def __deepcopy__(self, memo: dict[int, object]) -> SharedByStages:
        """Itself: a copy of a parameter is of the same stage."""
        return self


# The axes over which models were cut in each world, and how often: a list of parameters may hold none of a
# stage that is frozen. Of models that are gone too: when one goes is up to the garbage collector of each
# rank, and ranks that differ about it would meet the wrong collectives of their peers. A world ends on all
# ranks alike.
_cut: weakref.WeakKeyDictionary[object, Counter[DeviceMesh]] = weakref.WeakKeyDictionary()
# How often pipelines were made of them, counted anew from each cut on: a rank may not have come before it.
_met: weakref.WeakKeyDictionary[object, Counter[str]] = weakref.WeakKeyDictionary()


def note_cut(mesh: DeviceMesh) -> None:
    """The stages of a model are on the ranks of this axis."""
    _cut.setdefault(dist.group.WORLD, Counter())[mesh] += 1


def tell_refused(parameters: Iterable[Tensor], why: str) -> None:
    """Let ranks that wait for this one where stages meet hear why it may not come; sends nothing itself."""
    known = next((found for p in parameters if (found := stages_of(p)) is not None), None)
    if known is not None:
        with suppress(RuntimeError):  # a store that is gone must not hide the error
            default_store().set(_key(known.mesh, known.mesh.get_local_rank()), f"{_REFUSED}{why}")


def heard_by_stages(verb: Callable[P, T]) -> Callable[P, T]:
    """A strategy whose error on one stage alone is told to the stages that wait for it in `Pipeline(...)`."""

    @wraps(verb)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return verb(*args, **kwargs)
        except Exception as error:
            given = args[0] if args else kwargs.get("module")
            modules = given if isinstance(given, list) else [given]
            own = [p for m in modules if isinstance(m, nn.Module) for p in m.parameters()]
            by_us = isinstance(error, ShardwrightError)
            tell_refused(own, str(error) if by_us else f"{verb.__name__}: {words_of(error)}")
            raise

    return called


def meet(mesh: DeviceMesh, patience: float) -> str | None:
    """Wait until all ranks of an axis have come here as often, but for a minute at most.

    Returns: why one of them was refused a strategy, if it has not come all the same in `patience` seconds;
        the same on all ranks, also on one that comes when the others have given up.
    """
    store, begun, refused = default_store(), time.monotonic(), math.inf
    keys, here = [_key(mesh, rank) for rank in range(mesh.size())], _key(mesh, _ALL)
    met = _met.setdefault(dist.group.WORLD, Counter())
    met[here] += 1
    times = met[here]
    store.set(keys[mesh.get_local_rank()], str(times))
    while (now := time.monotonic()) < begun + _LONGEST:
        said = [store.get(key).decode() if store.check([key]) else "0" for key in keys]
        why = [f"rank {rank} of the axis: {x[1:]}" for rank, x in enumerate(said) if x[0] == _REFUSED]
        all_are_here = not why and min(map(int, said)) >= times
        refused = min(refused, now) if why else math.inf
        if all_are_here or now > refused + patience:
            # The first to decide does so for all: one may come while another gives up.
            ends = store.compare_set(f"{here}/{times}", "", _GO if all_are_here else why[0]).decode()
            return None if ends == _GO else ends
        time.sleep(min((now - begun) / 8, 0.2))
    return None


def _key(mesh: DeviceMesh, rank: int | str) -> str:
    cuts = _cut.get(dist.group.WORLD, Counter())[mesh]
    return f"shardwright/stages/{mesh.get_group().group_name}/{cuts}/{rank}"


_REFUSED, _ALL, _GO, _LONGEST = "!", "all", "go", 60.0


def axis_of_all() -> list[DeviceMesh]:
    """The axis over which models of this process were cut into stages; none if no model was.

    Raises: ConfigError: there are several.
    """
    found = list(_cut.get(dist.group.WORLD, ())) if dist.is_initialized() else []
    if len(found) > 1:
        raise ConfigError(
            "no parameters: models of this process were cut into stages over several axes, and other ranks "
            "may wait for this one on any of them\n  fix: clip_grad_norm_(module, ...); give an optimizer "
            "the frozen parameters too"
        )
    return found


def stages_of(parameter: Tensor) -> SharedByStages | None:
    """Where the other stages of this parameter's model are; None: there are none."""
    found: SharedByStages | None = getattr(parameter, "shared_by_stages", None)
    return found


def groups_of(meshes: list[DeviceMesh]) -> list[tuple[str, dist.ProcessGroup]]:
    """The groups that add up over the stages, each once."""
    found = {group: name for mesh in meshes for name, group in groups_above_one(mesh)}
    return [(name, group) for group, name in found.items()]
