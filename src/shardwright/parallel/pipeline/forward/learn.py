"""What each border carries: found by running the stages once, one after another, on no values.

Each stage runs the model's own code. Where that computes with a value of an earlier stage, the value is
needed; then the stage begins anew with zeros in its place. What any later stage needs crosses every border
from where it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from shardwright.comm.record import because
from shardwright.compat import tree_leaves
from shardwright.compat.fully_shard.traffic import forget_forwards
from shardwright.errors import ParallelError, ShardwrightError, words_of
from shardwright.parallel.pipeline.border import FindMesh
from shardwright.parallel.pipeline.forward.aside import Aside
from shardwright.parallel.pipeline.forward.borders import Borders, Told
from shardwright.parallel.pipeline.forward.hollow import Call, Value, origins
from shardwright.parallel.pipeline.forward.leavings import own_generator
from shardwright.parallel.pipeline.forward.returned import described
from shardwright.parallel.pipeline.forward.run import NeededError, Run
from shardwright.parallel.pipeline.forward.streams import Streams
from shardwright.parallel.pipeline.split import Split

_ON_ZEROS = (
    "\n  (while the borders were learned, from zeros where another stage returns something: own code cannot "
    "make shapes of values there)\n  fix: do that in a layer that one stage holds"
)

Forward = Callable[[Run], Any]  # the model called on one micro-batch, what a stage returns to nobody


def learn(split: Split, model: nn.Module, forward: Forward, find: FindMesh, device: torch.device) -> Borders:
    """Run every stage once, on the ranks that hold it, and tell all of them what crosses the borders.

    It runs with gradients where the step does: what a layer asks of them it must be answered alike. No
    backward follows. Nothing of the model is changed by it: buffers, attributes, generators and gradients are
    put back.
    Raises: ParallelError: on every rank of the axis, what one of them cannot do.
    Cost: a forward of each stage, one after another; their descriptions are sent to all ranks of the axis.
    """
    borders = Borders(split.stages)
    for stage in range(split.stages):
        told, ended = Told(), None
        if stage in split.mine:
            run = partial(_stage, stage, split, borders, forward, find, device, model)
            told, ended = _tried(run, _ON_ZEROS if stage else "")
        told = _from(split.rank_of[stage], told, split.mesh.get_group(), device)
        if ended is not None and not isinstance(ended, Exception):  # SystemExit
            raise ended
        if told.error is not None:
            raise ParallelError(f"pipeline, stage {stage}: {told.error}")
        borders.add(stage, told)
        borders.check_journal(stage)
        split.leavings.add(told, split.rank_of[stage])
        split.place_leavings(model)
    borders.finish()
    borders.check(several=split.stages > split.mesh.size())
    return borders


def _tried(run: Callable[[], Told], note: str) -> tuple[Told, BaseException | None]:
    try:
        return run(), None
    except ShardwrightError as error:
        return Told(error=str(error)), error
    except BaseException as error:  # noqa: BLE001  the other ranks wait to be told
        return Told(error=f"{words_of(error)}{note}"), error


def _stage(
    stage: int,
    split: Split,
    borders: Borders,
    forward: Forward,
    find: FindMesh,
    device: torch.device,
    model: nn.Module,
) -> Told:
    """Run one stage until it has asked for all that it needs."""
    needs: frozenset[Value] = frozenset()
    known = borders.earlier(stage)
    last = stage == split.stages - 1
    while True:
        zeros = {value: borders.leaf(value).zeros(find, device) for value in needs}
        streams = Streams(device, None, python=True)
        hollow = split.hollow_on(device)
        written = {value: x._version for value, x in zeros.items()}
        run = Run(
            stage,
            zeros,
            known,
            frozenset(known),
            None,
            hollow,
            split.mode,
            streams,
            split.outside,
            versions=written,
        )
        aside = Aside(model, split.outside)
        try:
            with aside.written:
                out = forward(run)
            asked = frozenset().union(*(origins(x) for x in tree_leaves(out)))
            if not last or not asked:
                split.units.learned(stage)
                return _told(run, needs, aside, split)
        except NeededError as error:
            asked = error.values
        finally:
            forget_forwards(model)
            aside.put_back()
        _check_asked(stage, asked, needs, known, split)
        needs |= asked


def _told(run: Run, needs: frozenset[Value], aside: Aside, split: Split) -> Told:
    run.rewritten.update(run.look())
    part_of = split.part_of
    for path, name in aside.memory.shared(part_of):
        raise ParallelError(
            f"{path}.{name} is one object with what other modules have, and the forward of {part_of(path)} "
            "(or own code behind it) changes it, on its own rank alone\n  fix: return from the layer what it "
            "adds; set before the cut what own code sets once (`config.problem_type` of transformers)"
        )
    for path, name in aside.memory.changed_generators():
        if part_of(path) is None:
            raise ParallelError(own_generator(f"{path}.{name}".lstrip(".")))
    buffers, attributes = set(aside.changed_buffers()), set(aside.memory.changed())
    of_parts = {(p, n) for p, n in attributes if part_of(p) is not None}
    return Told(
        trees={call: described(call, tree) for call, tree in run.trees.items()},
        needs=needs,
        rewritten=frozenset(run.rewritten),
        written=dict(run.written),
        stained=frozenset(run.stained),
        lines=tuple(run.journal.lines or ()),
        writes_batch=run.writes_batch,
        draws=run.streams.drew,
        draws_python=run.streams.drew_python,
        above=frozenset(f"{p}.{n}".lstrip(".") for p, n in buffers if part_of(p) is None),
        counts=frozenset(
            f"{p}.{n}".lstrip(".") for p, n in aside.memory.changed_numbers() if part_of(p) is None
        ),
        left=frozenset(run.left),
        left_by_own_code=frozenset(of_parts - run.left),
        left_above=frozenset(attributes - of_parts),
    )


def _check_asked(
    stage: int, asked: frozenset[Value], needs: frozenset[Value], known: Mapping[Call, Any], split: Split
) -> None:
    for value in sorted(asked):
        if value.call not in known:
            name = value.call.key
            part, every = split.part_of(name) or name, tuple(range(split.stages))
            raise ParallelError(
                f"{name} is held by another stage, and the model's own code uses it in stage {stage}\n"
                f"  fix: parallelize_pipeline(..., stages={{{part!r}: {every}}}), or {stage} alone if no "
                "other stage uses it"
            )
    if asked <= needs:
        raise ParallelError(f"it asks again for {sorted(asked)}, which it was given")


def _from(rank: int, told: Told, group: ProcessGroup, device: torch.device) -> Told:
    """What this rank of the axis tells, on all of them."""
    if dist.get_world_size(group) == 1:
        return told
    box = [told]
    with because("what crosses the borders of a pipeline"):
        dist.broadcast_object_list(box, src=dist.get_global_rank(group, rank), group=group, device=device)
    return box[0]
