"""Which modules need each other in a circle, imports for types and in functions included: two at most."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import shardwright

ROOT = Path(shardwright.__file__).parent


def graph_of(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """The imports of each module among the modules, wherever they stand in it."""
    return {name: set(_imports(name, source, sources)) for name, source in sources.items()}


def _imports(name: str, source: str, known: Mapping[str, str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            home = node.module.removeprefix("shardwright").removeprefix(".")
            found = {f"{home}.{alias.name}".removeprefix(".") for alias in node.names}
            yield from ({one if one in known else home for one in found} & set(known)) - {name}
        elif isinstance(node, ast.Import):
            found = {alias.name.removeprefix("shardwright.") for alias in node.names}
            yield from (found & set(known)) - {name}


def circles(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """The sets of modules of which each reaches each other."""
    reached = {name: _reached(graph, name) for name in graph}
    return {
        frozenset({name, *(other for other in reached[name] if name in reached[other])})
        for name in graph
        if name in reached[name]
    }


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    ahead = list(graph[start])
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            ahead += graph[name]
    return found


def test_no_more_than_two_modules_need_each_other():
    sources = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
        for path in ROOT.rglob("*.py")
    }
    assert not [sorted(circle) for circle in circles(graph_of(sources)) if len(circle) > 2]


def test_a_circle_of_types_is_found():
    typed = "if TYPE_CHECKING:\n    from shardwright.a import A"
    sources = {
        "a": "from shardwright.p import b",
        "p.b": "def f():\n    from shardwright.c import C",
        "c": typed.replace("from shardwright.a import A", "import shardwright.a"),
        "d": typed,
    }
    assert circles(graph_of(sources)) == {frozenset({"a", "p.b", "c"})}
