"""All cases of one operator on the ranks of one world; each is written down before the next begins."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwright.testing.meshes import rank_mesh
from tests.ops.cases import BAD, OK, Case, Options, Record
from tests.ops.check import check
from tests.ops.database import dtypes_of, operators, samples_of
from tests.ops.placing import KINDS

_PATIENCE = timedelta(seconds=30)  # for the slowest rank of one case


class UnlikeRanksError(Exception):
    """Some rank failed where another did not: their next messages would not fit together."""


def check_operator(name: str, options: Options, file: str, start: int) -> int:
    """Check the cases of an operator from number `start` on; rank 0 appends a line per event to `file`.

    Returns: how many cases there are.
    Raises: UnlikeRanksError: the world must be replaced; go on with the next case in another one.
    """
    warnings.simplefilter("ignore")
    info = operators()[name]
    mesh = rank_mesh(options.mesh, ("dp", "tp")[: len(options.mesh)])
    number = -1
    for number, (case, sample) in enumerate(_cases(info, options)):
        if number < start:
            continue
        note(file, {"begin": number, "case": _asdict(case)})
        meeting = Meeting(f"{file}/{number}")
        record = check(
            info, case, sample, mesh, meeting.alike, backward=options.backward, under=options.under
        )
        note(file, {"end": number, **meeting.worst(record).as_dict()})
        if meeting.parted:
            raise UnlikeRanksError(str(case))
    return number + 1


def _cases(info: Any, options: Options) -> Iterator[tuple[Case, Any]]:
    for dtype in dtypes_of(info, options.torch_dtypes()):
        chosen = samples_of(info, dtype, options.samples, options.source)
        short = str(dtype).removeprefix("torch.")
        for position, (index, sample) in enumerate(chosen):
            if not has_tensor(sample):
                continue
            for form in _forms(info, sample, position):
                for kind in options.kinds or KINDS:
                    mixed = len(options.mesh) > 1 and position % 2 == 1
                    yield Case(info.full_name, short, index, form, kind, mixed), sample


def has_tensor(sample: Any) -> bool:
    """Is a tensor among the arguments?"""
    leaves = torch.utils._pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return any(isinstance(x, torch.Tensor) for x in leaves)


def _forms(info: Any, sample: Any, position: int) -> list[str]:
    forms = ["call"]
    if position < 2 and info.inplace_variant is not None and not sample.broadcasts_input:
        forms.append("in place")
    if position < 2 and info.supports_out:
        forms.append("out=")
    return forms


def _asdict(case: Case) -> dict[str, Any]:
    return Record(case, (), OK).as_dict()["case"]


def note(file: str, event: dict[str, Any]) -> None:
    """Append one event to the report; rank 0 does."""
    if dist.get_rank() == 0:
        with Path(file).open("a") as out:
            out.write(json.dumps(event) + "\n")


class Meeting:
    """Where the ranks of one case tell each other how they fare.

    They meet at the store, not in a collective: there a rank could meet messages of a peer that failed.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._store = dist.distributed_c10d._get_default_store()
        self.parted = False

    def alike(self, text: str) -> bool:
        """Whether all ranks say the same; from then on it is remembered if they do not."""
        self.parted = len(set(self._exchange("alike", text))) > 1
        return not self.parted

    def worst(self, record: Record) -> Record:
        """The worst record of all ranks, with the bytes of all."""
        records = self._exchange("end", record)
        worst = next((r for r in records if r.verdict in BAD), records[0])
        worst.bytes = sum(r.bytes for r in records)
        return worst

    def _exchange(self, stage: str, value: Any) -> list[Any]:
        keys = [f"{self._key}/{stage}/{rank}" for rank in range(dist.get_world_size())]
        self._store.set(keys[dist.get_rank()], pickle.dumps(value))
        try:
            self._store.wait(keys, _PATIENCE)
        except dist.DistStoreError as error:
            raise UnlikeRanksError(f"{value}; a peer does not come back") from error
        return [pickle.loads(self._store.get(key)) for key in keys]
