"""A replay that reads something else than its recording read: it is undone, and the call runs as it is.

What ranks told each other, and whether a loss is finite, is known in the middle of a call, when this rank has
sent and written already. So a replay keeps what it needs to be as if it had not begun: the memory that it
writes before the last such line, the generators that it draws from, and what the collectives before it have
answered. The call that runs in its place gets those answers, and sends only what comes after them: its peers
see one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import TorchDispatchMode
from shardwright.erased.operands import FUNCTIONAL, flat, tensors_among
from shardwright.erased.record import without_data
from shardwright.erased.tape import Answers, Line, OtherwiseError, Tape, expect, refs_of, written_by


@dataclass(frozen=True, slots=True)
class Undo:
    """What a program writes and draws before the last of its lines that may go otherwise.

    held: tensors of which each has other memory. taken: the same, by their places among what it takes.
    devices: of generators.
    keeps: Python text behind some of its lines, by place: it keeps an answer.
    """

    held: tuple[torch.Tensor, ...]
    taken: tuple[int, ...]
    devices: tuple[torch.device, ...]
    keeps: Mapping[int, str]

    @classmethod
    def of(cls, tape: Tape, lines: Sequence[Line], takes: Sequence[int], holds: Sequence[int]) -> Self | None:
        """None: nothing can go otherwise, or it writes where nobody can put back what was there."""
        last = max((place for place, line in enumerate(lines) if line.call is expect), default=0)
        written = [set(map(tape.storage_of, written_by(line))) for line in lines[:last]]
        everywhere = set[int | None]().union(*written)
        if not last or None in everywhere or any(_sends(line.call) and line.several for line in lines[:last]):
            return None
        of_held = {tape.storage_of(n): tape.values[n].tensor for n in holds}
        of_taken = {tape.storage_of(n): place for place, n in enumerate(takes)}
        return cls(
            tuple(x for storage, x in of_held.items() if storage in everywhere),
            tuple(at for storage, at in of_taken.items() if storage in everywhere - of_held.keys()),
            tuple({device: None for line in lines[:last] if line.draws for device in _devices(tape, line)}),
            _keeps(tape, lines[:last], written),
        )

    @contextmanager
    def around(self, taken: Sequence[torch.Tensor]) -> Iterator[Answers]:
        """Within the block a program runs that keeps its answers; all is put back where it went otherwise."""
        answers = Answers()
        memory = [x.untyped_storage() for x in (*self.held, *(taken[place] for place in self.taken))]
        before = [(storage, storage.clone()) for storage in memory]
        states = [(device, _generator(device).get_state()) for device in self.devices]
        try:
            yield answers
        except OtherwiseError as otherwise:
            for storage, was in before:
                storage.copy_(was)
            for device, state in states:
                _generator(device).set_state(state)
            otherwise.answers = answers
            raise


class Answered(TorchDispatchMode):
    """Within the block the first collectives are not sent: they were, and this is what they gave."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answers, self._sent = answers, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(cls, TorchDTensor) for cls in types):
            return NotImplemented
        answered = self._sent < len(self._answers) and _sends(func)
        if not answered or without_data(tensors_among(flat(args))):
            return func(*args, **kwargs or {})
        answer, self._sent = self._answers[self._sent], self._sent + 1
        if not func._schema.is_mutable:
            return answer
        return args[0].copy_(torch.ops._c10d_functional.wait_tensor(answer))


def _sends(call: Any) -> bool:
    if not isinstance(call, torch._ops.OpOverload) or call.namespace != FUNCTIONAL:
        return False
    return call._schema.name != f"{FUNCTIONAL}::wait_tensor"


def _devices(tape: Tape, line: Line) -> list[torch.device]:
    numbers = [*refs_of(line), *(out for out in line.outs if out is not None)]
    return [tape.values[number].tensor.device for number in numbers]


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    found: torch.Generator = torch.cuda.default_generators[device.index]
    return found


def _keeps(tape: Tape, lines: Sequence[Line], written: Sequence[set[int | None]]) -> dict[int, str]:
    """Keep what each collective gives: a copy, once it is there, if a later line writes into it."""
    found: dict[int, str] = {}
    answers: dict[int, int] = {}  # their numbers, by those of the values
    for place, line in enumerate(lines):
        if not isinstance(line.call, torch._ops.OpOverload) or line.call.namespace != FUNCTIONAL:
            continue
        sends, given = _sends(line.call), refs_of(line)[0]
        out = given if line.outs[0] is None else line.outs[0]
        if sends:
            answers[out] = len(answers)
            found[place] = f"answers[{answers[out]}] = v{out}"
        elif given in answers and tape.storage_of(given) in set[int | None]().union(*written[place:]):
            found[place] = f"answers[{answers[given]}] = v{given}.clone()"
    return found
