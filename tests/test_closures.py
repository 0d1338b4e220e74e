"""No function inside of a function calls itself: it would be a cycle of references.

What such a function closes over (arguments of a call, modules) would wait for the garbage collector.
"""

import ast
from pathlib import Path

import shardwright

SOURCE = Path(shardwright.__file__).parent


def _calling_themselves(text):
    outer = [f for f in ast.walk(ast.parse(text)) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = {f for each in outer for f in ast.walk(each) if isinstance(f, ast.FunctionDef) and f is not each}
    return {f.name for f in inner if any(isinstance(n, ast.Name) and n.id == f.name for n in ast.walk(f))}


def test_no_function_inside_of_another_calls_itself():
    found = {
        str(path.relative_to(SOURCE)): _calling_themselves(path.read_text()) for path in SOURCE.rglob("*.py")
    }
    assert len(found) > 400
    assert {path: names for path, names in found.items() if names} == {}


def test_one_that_does_is_found():
    assert _calling_themselves(
        "def a(x):\n    def b(y):\n        return b(y[1:]) if y else x\n    return b(x)"
    ) == {"b"}
