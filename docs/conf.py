"""Settings of the manual: Markdown pages, and a reference made from docstrings."""

from __future__ import annotations

import importlib.metadata
import re

project = "Shardwright"
author = "the Shardwright authors"
copyright = "the Shardwright authors, Apache-2.0"
release = importlib.metadata.version("shardwright")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"Shardwright {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Cost", "Source", "Not"]
# Docstrings name torch's classes; the reference does not link outside, so that it builds without a network.
nitpicky = False

# What the tests read as well: how many ranks run the blocks that follow.
_RANKS = re.compile(r"^<!-- ranks: (\d+) -->$", re.MULTILINE)
_SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Cost|Source|Note|Warning|Example):(?= \S)")


def _as_rest(_app: object, what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Read a docstring as the sources are written: `code` in single backticks, `Returns: x` on one line."""
    # In an attribute's first line napoleon takes what stands before a colon for its type.
    rest = [""] if what in {"attribute", "property"} else []
    code = False
    for line in lines:
        section = _SECTION.match(line)
        if line.strip().startswith("```"):
            code = not code
            rest += ["", ".. code-block:: python", ""] if code else [""]
        elif code:
            rest.append("    " + line)
        elif section is not None:
            rest += ["", section.group(0), "    " + _inline(line[section.end() :].strip())]
        else:
            rest.append(_inline(line))
    lines[:] = rest


def _inline(line: str) -> str:
    """Single backticks become literals, and stars outside them are text."""
    parts = re.split(r"(``[^`]+``|`[^`]+`)", line)
    return "".join(_literal(part) if part.startswith("`") else _plain(part) for part in parts)


def _literal(part: str) -> str:
    return f"``{part.strip('`')}``"


def _plain(part: str) -> str:
    return re.sub(r"(?<!\\)([*|])", r"\\\1", part)


def _show_ranks(_app: object, _name: str, source: list[str]) -> None:
    """Say where a program begins how to run it: a reader of the page sees no comment."""
    running = "0"

    def line(marker: re.Match[str]) -> str:
        nonlocal running
        before, running = running, marker.group(1)
        if running == before:
            return ""
        launcher = f"torchrun --standalone --nproc-per-node {running}" if running != "0" else "python"
        return f"Run the blocks from here on, as one program, with `{launcher} page.py`:\n"

    source[0] = _RANKS.sub(line, source[0])


def setup(app: object) -> None:
    """Rewrite docstrings before napoleon reads them, and pages before MyST does."""
    app.connect("source-read", _show_ranks)  # type: ignore[attr-defined]
    app.connect("autodoc-process-docstring", _as_rest, priority=100)  # type: ignore[attr-defined]
