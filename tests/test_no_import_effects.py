"""Nothing is entered anywhere by an import but rules: what is wired is wired in one place, by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwright
from shardwright.tensor import install
from shardwright.tensor.plain import boundary

ROOT = Path(shardwright.__file__).parent
# What the package does while it is imported, beside making its own names: module and the imported callee.
CALLED = {
    ("__main__.py", "sys.exit"),
    ("comm/guard.py", "atexit.register"),  # where the environment switches the guard on
    ("rules/__init__.py", "compare_with_schemas"),  # the catalog is complete: later rules are compared
    ("tensor/__init__.py", "_install"),  # the wiring
}
# The registry of rules is open: who states a rule or an algorithm enters it, here and elsewhere.
OF_RULES = {"rule", "register_rule", "register_algorithm", "rewrite", "row_program", "take_apart"}
CHANGING = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "remove",
    "setdefault", "sort", "update",
}  # fmt: skip


def effects(source: str) -> set[str]:
    """What a module changes of a name that it imported, while it is imported itself."""
    tree = ast.parse(source)
    theirs = _imported(tree)
    return {ast.unparse(node) for node in _run_at_import(tree) if _changes(node, theirs)}


def called(source: str) -> set[str]:
    """The imported functions that a module calls for what they do, not for what they return."""
    tree = ast.parse(source)
    theirs, found = _imported(tree), set()
    for node in _run_at_import(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            found.add(ast.unparse(node.value.func))
    return {name for name in found if name.partition(".")[0] in theirs}


def _imported(tree: ast.Module) -> set[str]:
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}


def _run_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those within functions."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from _run_at_import(node)


def _changes(node: ast.AST, theirs: set[str]) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in CHANGING and _root(node.func) in theirs
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
        return node.func.id in {"setattr", "delattr"} and _root(node.args[0]) in theirs
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    else:
        return False
    return any(isinstance(t, ast.Attribute | ast.Subscript) and _root(t) in theirs for t in targets)


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


SOURCES = {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.rglob("*.py")}


def test_no_module_changes_another_while_it_is_imported():
    found = {name: effects(source) for name, source in SOURCES.items()}
    assert not {name: changed for name, changed in found.items() if changed}


def test_what_an_import_does_is_listed():
    found = {(name, function) for name, source in SOURCES.items() for function in called(source)}
    assert {(name, function) for name, function in found if function not in OF_RULES} == CALLED


@pytest.mark.parametrize(
    "source",
    [
        "from a import b\nb.append(1)",
        "from a import b\nb[1] = 2",
        "from a import b\nb.c.d = 2",
        "import a\na.b.update({})",
        "from a import b\nif b:\n    b |= {}\n    b.x += 1",
        "from a import B\nclass C:\n    B.known['C'] = 1",
        "from a import b\nsetattr(b, 'c', 1)",
        "from a import b\ndel b['c']",
        "from a import b\nx = b.setdefault(1, 2)",
    ],
)
def test_a_change_is_found(source):
    assert effects(source)


def test_what_changes_nothing_of_others_is_left_alone():
    within = "def f():\n    b.append(1)\n    b[1] = 2\n"
    assert not effects(f"from a import b\nc = {{}}\nc[b] = 1\nc.update(b)\nx = b.get(1)\n{within}")


def test_each_function_of_torch_is_done_in_one_way():
    """Two tables with one key: which of them wins would hang on their order."""
    own = len(boundary.OF_SIZES) + len(boundary.LOSSES)
    assert sum(map(len, install.OWN)) + own == len(boundary.OWN)
