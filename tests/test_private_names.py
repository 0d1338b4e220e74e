"""Private names of torch stand in `compat` and nowhere else: a new release is read in one room."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import shardwright

ROOT = Path(shardwright.__file__).parent
# Names of types, which annotations need everywhere.
TYPES = ("torch._ops.OpOverload", "torch._ops.OpOverloadPacket")


def private_names(source: str) -> set[str]:
    """What a module imports or reads of torch by a private name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))  # of a call as well, which is no name
    return {name for name in found if re.fullmatch(r"torch\.[\w.]+", name) and _is_private(name)}


def _is_private(name: str) -> bool:
    if name.startswith(TYPES) or name.startswith("torch.ops.") or name == "torch._ops":
        return False  # ops of torch's tables have such names too
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_no_room_but_one_says_a_private_name_of_torch():
    found = {p.relative_to(ROOT): private_names(p.read_text()) for p in ROOT.rglob("*.py")}
    told = {path for path, names in found.items() if names}
    assert {"/".join(path.parts[1:]) for path in told if path.parts[0] == "compat"} == {
        "__init__.py", "dynamo.py", "fully_shard/parameters.py", "fully_shard/shown.py",
        "fully_shard/traffic.py", "fully_shard/units.py", "fully_shard/views.py", "function_modes.py",
        "graph_views.py",
    }  # fmt: skip
    assert not {path for path in told if path.parts[0] != "compat"}


def test_what_is_private_is_found():
    source = "import torch._dynamo\nfrom torch.utils._pytree import tree_map\nx = torch._C._nn.pad\n"
    assert private_names(source) == {
        "torch._dynamo", "torch.utils._pytree.tree_map", "torch._C", "torch._C._nn", "torch._C._nn.pad",
    }  # fmt: skip
    assert not private_names("def f(op: torch._ops.OpOverload) -> str:\n    return torch.ops.aten._softmax\n")
