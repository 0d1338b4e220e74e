"""Rich text as a plain string."""

from __future__ import annotations

from io import StringIO

from rich.console import Console, RenderableType


def render(item: RenderableType, *, width: int = 110) -> str:
    """What a terminal of this width would show, without color and trailing spaces."""
    out = StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False, highlight=False).print(item)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
