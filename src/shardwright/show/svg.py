"""A grid of blocks as SVG, in proportion to their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from shardwright.show.holders import Holders, Span, color_of, ranks_text

_WIDTH, _HEIGHT, _ROW = 480.0, 320.0, 44.0
_LEAST = 18.0  # a block stays visible beside one that is a thousand times longer
_LEFT, _TOP, _LINE = 60.0, 44.0, 18.0


def draw(holders: Holders, title: str, notes: Sequence[str]) -> str:
    """The blocks with their ranks; dim 0 goes down and dim 1 to the right, a 1-d tensor to the right."""
    across = _places(holders.spans[-1] if holders.spans else ((0, 1),), _WIDTH)
    two = len(holders.spans) == 2
    down = _places(holders.spans[0], _HEIGHT) if two else [(0.0, _ROW)]
    parts = [_text(_LEFT, _LINE, title, anchor="start")]
    for i, (y, height) in enumerate(down):
        for j, (x, width) in enumerate(across):
            block = ((i, j) if two else (j,)) if holders.spans else ()
            parts.append(_block(_LEFT + x, _TOP + y, width, height, holders.at(block)))
    parts += _ticks(holders, across, down)
    bottom = _TOP + _end(down)
    parts += [_text(_LEFT, bottom + _LINE * (i + 1), note, anchor="start") for i, note in enumerate(notes)]
    width, height = _LEFT + _end(across) + 20, bottom + _LINE * (len(notes) + 1)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="monospace"'
    )
    return f'{head} font-size="12" width="{width:g}" height="{height:g}">' + "".join(parts) + "</svg>"


def _places(spans: Sequence[Span], room: float) -> list[tuple[float, float]]:
    """Where each span starts and how long it is drawn."""
    length = max(sum(stop - start for start, stop in spans), 1)
    places, at = [], 0.0
    for start, stop in spans:
        drawn = max((stop - start) / length * room, _LEAST)
        places.append((at, drawn))
        at += drawn
    return places


def _end(places: Sequence[tuple[float, float]]) -> float:
    return sum(places[-1]) if places else 0.0


def _block(x: float, y: float, width: float, height: float, ranks: tuple[int, ...]) -> str:
    sides = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    label = ranks_text(ranks)
    hover = f"<title>ranks {escape(label)}</title>"
    rect = f'<rect {sides} fill="{color_of(ranks)}" stroke="#333">{hover}</rect>'
    fits = len(label) * 7.2 < width
    return rect + (_text(x + width / 2, y + height / 2 + 4, label) if fits else "")


def _ticks(
    holders: Holders, across: Sequence[tuple[float, float]], down: Sequence[tuple[float, float]]
) -> list[str]:
    if not holders.spans:
        return []
    columns = zip(across, holders.spans[-1], strict=True)
    ticks = [_text(_LEFT + x, _TOP - 6, str(start), anchor="start") for (x, _), (start, _) in columns]
    if len(holders.spans) == 2:
        rows = zip(down, holders.spans[0], strict=True)
        ticks += [_text(_LEFT - 6, _TOP + y + 12, str(start), anchor="end") for (y, _), (start, _) in rows]
    return ticks


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def draw_lines(lines: Sequence[str]) -> str:
    """Lines of text as SVG, for what has no drawing."""
    width = 8 * max(map(len, lines), default=1)
    texts = "".join(
        f'<text x="0" y="{(i + 1) * _LINE:g}" xml:space="preserve">{escape(line)}</text>'
        for i, line in enumerate(lines)
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_LINE * (len(lines) + 1):g}"'
    return f'{head} font-family="monospace" font-size="12">{texts}</svg>'
