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


def setup(app: object) -> None:
    """Rewrite docstrings before napoleon reads them."""
    app.connect("autodoc-process-docstring", _as_rest, priority=100)  # type: ignore[attr-defined]
