"""All cases of one operator in awkward memory, on the ranks of one world."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shardwright.testing.meshes import rank_mesh
from tests.memory.check import KINDS, differs, observe, placing
from tests.memory.extras import EXTRAS, arguments_of
from tests.memory.forms import FORMS
from tests.ops.cases import ERROR, LENIENT, OK, WRONG, Case, Options, Record
from tests.ops.database import dtypes_of, operators, samples_of
from tests.ops.ranks import Meeting, UnlikeRanksError, has_tensor, note


def check_operator(name: str, options: Options, file: str, start: int) -> int:
    """Check the cases of an operator from number `start` on; rank 0 appends a line per event to `file`.

    Returns: how many cases there are.
    Raises: UnlikeRanksError: the world must be replaced; go on with the next case in another one.
    """
    warnings.simplefilter("ignore")
    mesh = rank_mesh(options.mesh, ("dp", "tp")[: len(options.mesh)])
    number = -1
    for number, (case, operator, arguments, form) in enumerate(_cases(name, options)):
        if number < start:
            continue
        note(file, {"begin": number, "case": Record(case, (), OK).as_dict()["case"]})
        meeting = Meeting(f"{file}/{number}")
        wanted = observe(operator, arguments, form, lambda base: base, lambda _: True)
        record = Record(case, tuple(mesh.shape), OK)
        got = observe(operator, arguments, form, placing(case.kind, mesh), meeting.alike)
        if got.error is not None:
            if wanted.error is None:
                record.verdict, record.text = ERROR, str(got.error).strip().split("\n")[0]
        elif wanted.error is not None:
            record.verdict, record.text = LENIENT, str(wanted.error).strip().split("\n")[0]
        elif text := differs(got, wanted):
            record.verdict, record.text = WRONG, text
        note(file, {"end": number, **meeting.worst(record).as_dict()})
        if meeting.parted:
            raise UnlikeRanksError(str(case))
    return number + 1


def _cases(name: str, options: Options) -> Iterator[tuple[Case, Callable[..., Any], Any, str]]:
    for short, index, call, operator, arguments in _calls(name, options):
        for form in FORMS:
            for kind in options.kinds or KINDS:
                case = Case(name, short, index, f"{call}, {form}", kind, mixed=False)
                yield case, operator, arguments, form


def _calls(name: str, options: Options) -> Iterator[tuple[str, int, str, Callable[..., Any], Any]]:
    """What is called, with which arguments: `(dtype, sample, form of the call, function, arguments)`."""
    if name in EXTRAS:
        yield "", 0, "call", EXTRAS[name].op, arguments_of(EXTRAS[name])
        return
    info = operators()[name]
    for dtype in dtypes_of(info, options.torch_dtypes()):
        short = str(dtype).removeprefix("torch.")
        for index, sample in samples_of(info, dtype, options.samples, options.source):
            if not has_tensor(sample):
                continue
            arguments = (sample.input, sample.args, sample.kwargs)
            yield short, index, "call", info.op, arguments
            if info.inplace_variant is not None and isinstance(sample.input, torch.Tensor):
                yield short, index, "in place", info.inplace_variant, arguments
