"""What a table did, to be read by people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright.compat import axis_names

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shardwright.parallel.table.agree import Word
    from shardwright.parallel.table.calls import Call
    from shardwright.parallel.table.rehearsal import Placed

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_KIBI = 1024


@dataclass(frozen=True, slots=True)
class Share:
    """Parameters that the same strategies place.

    Args:
        by: these strategies, in the order in which they were applied.
        parameters, elements, bytes: how many, all ranks of a stage together counted once.
        least, most: bytes of the rank that holds least of them, and most.
    """

    by: str
    parameters: int
    elements: int
    bytes: int
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Report:
    """What `parallelize` did.

    Args:
        calls: (row, strategy, path of the module, axes with sizes), in order.
        shares: parameters by strategies, and all of them.
        notes: what is to be known for the training loop.
    """

    calls: tuple[tuple[str, str, str, str], ...]
    shares: tuple[Share, ...]
    notes: tuple[str, ...]

    def __rich__(self) -> RenderableType:
        from rich.console import Group  # noqa: PLC0415  rich is slow to import, and only printing needs it

        return Group(self._steps(), self._placed(), *self.notes)

    def _steps(self) -> RenderableType:
        from rich.table import Table  # noqa: PLC0415

        table = Table("row", "strategy", "modules", "axes", title="parallelize")
        for row, strategy, modules, axes in self._grouped():
            table.add_row(*(_plain(text) for text in (row, strategy, modules, axes)))
        return table

    def _grouped(self) -> Iterator[tuple[str, str, str, str]]:
        """One line for the modules of one row that are placed one after the other."""
        lines: dict[tuple[str, str, str], list[str]] = {}
        for row, strategy, path, axes in self.calls:
            lines.setdefault((row, strategy, axes), []).append(path or "the model")
        for (row, strategy, axes), paths in lines.items():
            yield row, strategy, paths[0] if len(paths) == 1 else f"{len(paths)}: {paths[0]}, ...", axes

    def _placed(self) -> RenderableType:
        from rich.table import Table  # noqa: PLC0415

        table = Table("placed by", title="parameters")
        for name in ("parameters", "elements", "bytes", "bytes per rank"):
            table.add_column(name, justify="right")
        for share in self.shares:
            held = (
                size_text(share.most)
                if share.least == share.most
                else f"{size_text(share.least)} to {size_text(share.most)}"
            )
            table.add_row(
                _plain(share.by), str(share.parameters), f"{share.elements:,}", size_text(share.bytes), held
            )
        return table

    def __str__(self) -> str:
        from rich.console import Console  # noqa: PLC0415

        console = Console(width=120, no_color=True, highlight=False)
        with console.capture() as seen:
            console.print(self)
        return seen.get()


def _plain(text: str) -> RenderableType:
    """As it is: brackets of a pattern are no markup."""
    from rich.text import Text  # noqa: PLC0415

    return Text(text)


def print_report(report: Report) -> None:
    """Print it with colours where there is a terminal."""
    from rich.console import Console  # noqa: PLC0415

    Console().print(report)


def report_of(calls: Sequence[Call], placed: Sequence[Placed], words: Sequence[Word]) -> Report:
    """What the calls did, with the bytes that every rank has told."""
    groups: dict[str, list[int]] = {}
    for index, each in enumerate(placed):
        groups.setdefault(" + ".join(each.by), []).append(index)
    shares = [_share(by, indices, placed, words) for by, indices in groups.items()]
    if len(shares) > 1:
        shares.append(_share("all", range(len(placed)), placed, words))
    told = [
        (f"{c.row} and {c.more} more" if c.more else str(c.row), c.strategy, c.path, _axes(c)) for c in calls
    ]
    return Report(tuple(told), tuple(shares), tuple(_notes(calls)))


def _share(by: str, indices: Sequence[int], placed: Sequence[Placed], words: Sequence[Word]) -> Share:
    held = [sum(word.local_bytes[index] for index in indices) for word in words]
    own = [placed[index] for index in indices]
    return Share(
        by,
        len(own),
        sum(each.elements for each in own),
        sum(each.bytes for each in own),
        min(held),
        max(held),
    )


def _axes(call: Call) -> str:
    return " x ".join(f"{axis} {call.mesh[axis].size()}" for axis in axis_names(call.mesh))


def _notes(calls: Sequence[Call]) -> Iterator[str]:
    strategies = {call.row.strategy for call in calls}
    if "context" in strategies:
        axes = '"cp", "tp"' if "tensor" in strategies else '"cp"'
        yield f'run a loss outside of the model inside of sw.spmd(context.mesh_for("batch")[{axes}])'
    elif "tensor" in strategies:
        yield 'run the model and its loss inside of sw.spmd(context.mesh_for("regular")["tp"])'
    if strategies & {"replicate", "hsdp", "context", "expert"}:
        yield "gradients are terms until shardwright.grads.GradientSynchronizer adds them"


def size_text(count: int) -> str:
    """Bytes for people."""
    size = float(count)
    for unit in _UNITS:
        if size < _KIBI or unit == _UNITS[-1]:
            return f"{size:.0f} {unit}" if unit == _UNITS[0] else f"{size:.1f} {unit}"
        size /= _KIBI
    raise AssertionError("the last unit takes any size")
