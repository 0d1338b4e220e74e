"""One call forgets all that is remembered; every cache stands in `remember.py`, no answer hangs on one."""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path

import pytest
import torch

import shardwright as sw
from shardwright import remember
from shardwright.rules import registry
from shardwright.tensor.dispatch import call
from shardwright.tensor.dispatch.ways import table
from shardwright.testing import forget

ROOT = Path(remember.__file__).parent
# Tables that nothing else could fill again: state, no cache.
STATE = {
    "compat/fully_shard/parameters.py:_managed": "what fully_shard made of a parameter, while that lives",
    "context/randomness.py:_waiting": "the hook of the newest seed, until the first forward",
    "checkpoint/storage/owner.py:saves_here": "the saves of this process that are under way",
    "grads/at_steps.py:_watching": "the hook of optimizers, once a parameter computes as its local tensor",
    "checkpoint/job.py:in_background": "the saves of this process that a thread is writing",
    "tensor/autograd.py:taken_at_once": "leaves whose gradients a block of `overlapped()` takes",
    "parallel/place.py:_watching": "the hook of modules, once a parameter computes as its local tensor",
    "placement/base.py:OWN_CLASSES": "the library's own classes, listed as they are made",
    "grads/stages.py:_cut": "the axes over which models were cut into stages, while their world lasts",
    "grads/stages.py:_met": "how often pipelines were made of them, while their world lasts",
    "context/registry.py:_newest": "the open context",
    "tensor/dispatch/torch_shardings.py:_told": "warnings are said once",
    "tensor/spec.py:_summed": "axes on which parameters compute locally, as strategies have said",
    "tensor/wrap.py:held_outside": "the program has a local tensor, so that writes into them count",
    "tensor/finished_forms.py:watching": "who remembers versions, while they do",
    "tensor/views/write_back.py:_watches": "who asks for the views of what is traced, while it is",
    "tensor/plain/spmd.py:_compared": "the ranks compared these lines together",
    "remember.py:_functions": "the list of the tables",
    "remember.py:_tables": "the list of the tables",
    "testing/meshes.py:rank_mesh": "process groups: made by all ranks together, and their number is limited",
}
WHO_DECIDES = (call, table)
MAKERS = {"dict", "set", "list", "defaultdict", "OrderedDict", "WeakKeyDictionary", "WeakValueDictionary"}


def own_caches(source: str) -> set[str]:
    """Functions with a cache of functools, and tables of a module or class that are empty when it is made."""
    found: set[str] = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(map(_is_cache, node.decorator_list)):
            found.add(node.name)
        for statement in node.body if isinstance(node, ast.Module | ast.ClassDef) else ():
            if isinstance(statement, ast.Assign | ast.AnnAssign) and _is_cache_or_empty(statement.value):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                found |= {ast.unparse(target) for target in targets}
    return found - {"__slots__"}


def _is_cache(node: ast.expr) -> bool:
    name = ast.unparse(node.func if isinstance(node, ast.Call) else node).rpartition(".")[2]
    return name in {"lru_cache", "cache"}


def _is_cache_or_empty(node: ast.expr | None) -> bool:
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        made_of = [a for a in node.args if not (name == "defaultdict" and a is node.args[0])]
        return _is_cache(node.func) or _is_cache(node) or (name in MAKERS and not made_of)
    return isinstance(node, ast.Dict | ast.List) and not (
        node.keys if isinstance(node, ast.Dict) else node.elts
    )


def _own_caches_of_the_package() -> set[str]:
    paths = {str(path.relative_to(ROOT)): path for path in ROOT.rglob("*.py")}
    return {f"{name}:{found}" for name, path in paths.items() for found in own_caches(path.read_text())}


def test_every_cache_is_one_that_forget_empties():
    assert _own_caches_of_the_package() == set(STATE)


@pytest.mark.parametrize(
    "source",
    [
        "@lru_cache(maxsize=4)\ndef f(): ...",
        "@functools.cache\ndef f(): ...",
        "class A:\n    @lru_cache\n    def f(self): ...",
        "f = lru_cache(maxsize=3)(g)",
        "f = functools.cache(g)",
        "f: dict[int, int] = {}",
        "f = defaultdict(list)",
        "f = weakref.WeakKeyDictionary()",
        "class A:\n    f: ClassVar[dict[str, int]] = {}",
    ],
)
def test_a_cache_of_its_own_is_found(source):
    assert own_caches(source) == {"f"}


def test_what_is_no_cache_is_left_alone():
    source = "f = {1: 2}\ng = memo('things', {})\n@remembered(4)\ndef h():\n    return {}\nk = frozenset()\n"
    assert not own_caches(source)


def test_a_remembered_function_is_the_cache_of_c():
    """A known call costs what it costs with `functools` alone."""
    made = remember.remembered(2)(str)
    try:
        assert [type(made).__module__, made.cache_info().maxsize] == ["functools", 2]
        made(1)
        assert remember.entries()["builtins.str"] == 1
        forget()
        assert remember.entries()["builtins.str"] == 0
    finally:
        remember._functions.remove(made)


def test_a_rule_that_comes_makes_all_be_decided_anew(ranks):
    assert all(ranks(2, _decisions_around_a_rule))


def _program(mesh):
    """Values, gradients and layouts of what goes through rules, views, algorithms, lists and moves."""
    draw = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(*size, generator=draw) for size in ((6, 8), (8, 4), (4,)))
    x = sw.distribute_tensor(x, mesh, (sw.Shard(0),)).requires_grad_()
    w = sw.distribute_tensor(w, mesh, (sw.Shard(1),)).requires_grad_()
    b = sw.distribute_tensor(b, mesh, (sw.Shard(0),)).requires_grad_()
    y = torch.softmax(x @ w + b, -1)
    z = torch.nn.functional.layer_norm(y[1:5].reshape(2, 8), (8,))
    z.square().sum().backward()
    moved = y.redistribute({"tp": sw.Interleaved(1, 2)})
    with torch.no_grad():
        torch._foreach_mul_([w, b], 2.0)
        b[1:3].add_(1)
        out = torch.empty_like(y)
        torch.exp(y, out=out)
    return [x.grad, w.grad, b.grad, y, z, moved, w, b, out, y.view(3, 2, 4), x.view(4, 12)]


def _held(tensors):
    return [(sw.layout_of(t), t.to_local().detach().clone()) for t in tensors]


def _counted(function):
    """What a function gives, and how many calls were decided for it."""
    plain, found = table.decide, []
    for module in WHO_DECIDES:
        module.decide = lambda *args, **kwargs: found.append(args) or plain(*args, **kwargs)
    try:
        return function(), len(found)
    finally:
        for module in WHO_DECIDES:
            module.decide = plain


def _alike(one, other):
    return all(a == b and torch.equal(s, t) for (a, s), (b, t) in zip(one, other, strict=True))


def _forgotten():
    mesh = sw.init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    run = partial(_program, mesh)
    forget()
    first, decided = _counted(run)
    first, held = _held(first), remember.entries()
    assert decided > 10
    assert sum(count > 0 for count in held.values()) > 30
    known, again = _counted(run)
    assert again == 0
    assert _alike(first, _held(known))
    forget()
    assert not any(remember.entries().values()), remember.entries()
    anew, redecided = _counted(run)
    assert _alike(first, _held(anew))
    assert redecided == decided
    return {name: (held[name], count) for name, count in remember.entries().items() if held[name] != count}


def test_after_forgetting_all_is_decided_again_and_alike(ranks):
    """Every table is empty, and the same program fills each with as much as the first time."""
    for differing in ranks(2, _forgotten):
        assert not differing


def _decisions_around_a_rule():
    mesh = sw.init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    run = partial(_program, mesh)
    run()
    assert _counted(run)[1] == 0
    entry = sw.rule("nameless::anew", "...[dim:_], ...[dim:_] -> ...[dim:_]", later=True)
    try:
        return _counted(run)[1] > 10
    finally:
        registry.registry.remove(entry)
