"""The code that a text names in backticks: files below `src/shardwright`, and functions in them."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.docs.pages import ROOT

PACKAGE = ROOT / "src" / "shardwright"
_SPAN = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"[\w./]+\.py")
_FOLDER = re.compile(r"[\w/]+/")
_DOTTED = re.compile(r"[a-z_]\w*(\.\w+)+")


def guides() -> list[Path]:
    """The texts beside the code."""
    return sorted(PACKAGE.rglob("README.md"))


def files_in(text: str) -> list[str]:
    """The files that a text names, as written."""
    return [span for span in _spans(text) if _FILE.fullmatch(span)]


def missing_files(text: str, *homes: Path) -> list[str]:
    """The files and folders that a text names and that are in none of these folders."""
    named = [span for span in _spans(text) if _FILE.fullmatch(span) or _FOLDER.fullmatch(span)]
    return [name for name in named if not any((home / name).exists() for home in homes)]


def missing_functions(text: str, files: Iterable[str]) -> list[str]:
    """The `module.function`s of a text that are in none of the files (below the package) of that name.

    A dotted name that begins as none of these files is called is no function of the library.
    """
    modules: dict[str, list[str]] = {}
    for file in files:
        modules.setdefault(Path(file).stem, []).append(file)
    dotted = [span for span in _spans(text) if _DOTTED.fullmatch(span) and not _FILE.fullmatch(span)]
    return [
        name
        for name in dotted
        if name.partition(".")[0] in modules
        and not any(_has(file, name) for file in modules[name.partition(".")[0]])
    ]


def functions_in(text: str, files: Iterable[str]) -> set[str]:
    """The last names of the `module.function`s of a text that are in these files."""
    modules = {Path(file).stem for file in files}
    dotted = [span for span in _spans(text) if _DOTTED.fullmatch(span)]
    return {name.rpartition(".")[2] for name in dotted if name.partition(".")[0] in modules}


def is_used(name: str) -> bool:
    """Does the library name it but where it is defined or imported, and where a package hands it on?"""
    return name in _used()


@functools.cache
def _used() -> frozenset[str]:
    """The names that the code of the library asks for."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        if path.name != "__init__.py":
            nodes = list(ast.walk(ast.parse(path.read_text())))
            found |= {node.id for node in nodes if isinstance(node, ast.Name)}
            found |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return frozenset(found)


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the table below a heading, row by row, without its head."""
    below = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in below.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def _has(file: str, dotted: str) -> bool:
    found: object = importlib.import_module("shardwright." + file.removesuffix(".py").replace("/", "."))
    for name in dotted.split(".")[1:]:
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


def _spans(text: str) -> Iterator[str]:
    """What stands in single backticks, outside of fenced blocks."""
    return iter(_SPAN.findall(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)))
