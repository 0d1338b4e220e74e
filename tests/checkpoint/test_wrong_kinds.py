"""Each argument of each public function, given another kind of thing: one error, nothing made or changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwright import checkpoint as c
from shardwright.errors import CheckpointError

WRONG = {
    "none": None,
    "number": -1,
    "fraction": 1.5,
    "yes": True,
    "text": "(",
    "bytes": b"a",
    "empty": "",
    "nothing": [],
    "numbers": [1],
    "dict": {"a": 1},
    "object": object(),
    "nul": "a\0b",
}


def filled() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


Case = tuple[str, Callable[..., Any], dict[str, Any], dict[str, str]]


def cases() -> Iterator[Case]:
    """A right call of each; of its arguments the words of `WRONG` that it is documented to take."""
    # What a path may be called; a list or dict of nothing alive is an empty part of a state.
    path, state = "text", "none nothing tensor"
    saved = {"path": "new", "model": None, "optimizer": None, "step": 1, "config": {}}
    takes = {"path": path, "model": state, "optimizer": state, "step": "none", "config": "none dict"}
    yield "save", c.save, {**saved, "format": "shardwright"}, takes
    yield "async_save", lambda **given: c.async_save(**given).wait(), saved, takes
    loaded = {"path": "good", "model": None, "only": None, "in_place": False}
    yield "load", c.load, loaded, {"model": "none", "only": "none", "in_place": "yes"}
    files = {"model": None, "folder": "hf", "maps": (), "device": "cpu", "buffers": None}
    yield "load_hf", c.load_hf, files, {"maps": "nothing", "buffers": "none"}
    given = {"model": None, "folder": "new", "maps": (), "max_shard_size": 9}
    yield "save_hf", c.save_hf, given, {"folder": path, "maps": "nothing"}
    yield "verify", c.verify, {"path": "good", "told": print}, {}
    yield "diff", c.diff, {"one": "good", "other": "good", "told": print}, {}
    theirs = {"source": "theirs.pt", "target": "new", "key": None, "parameters": ["weight", "bias"]}
    yield "convert", c.convert, theirs, {"target": path, "key": "none"}
    yield "choose", c.choose, {"out": "run", "name": "newest"}, {}
    yield "latest", c.latest, {"out": "run"}, {}
    yield "list_checkpoints", c.list_checkpoints, {"out": "run"}, {"out": path}
    pruned = {"out": "run", "keep": 5, "every": None, "interrupted": False}
    yield "prune", c.prune, pruned, {"out": path, "every": "none", "interrupted": "yes"}
    yield "step_of", c.step_of, {"path": "run"}, {"path": path}
    yield "step_path", c.step_path, {"out": "run", "step": 1}, {"out": path}
    yield "read_manifest", c.read_manifest, {"path": "good"}, {}
    yield "Address", c.Address, {"text": "memory://a"}, {}
    yield (
        "rename",
        c.rename,
        {"pattern": "a", "to": r"b\g<0>"},
        {"pattern": "empty nul", "to": "text empty nul"},
    )
    yield "transpose", c.transpose, {"pattern": "a"}, {"pattern": "empty nul"}
    takes = {"pattern": "empty nul", "dim": "number", "sizes": "none"}
    yield "join", c.join, {"pattern": "a", "sources": ("b", "c"), "dim": 0, "sizes": (1, 1)}, takes
    yield "stack", c.stack, {"pattern": "a", "source": "b{index}"}, {"pattern": "empty nul"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, model = tmp_path_factory.mktemp("made"), filled()
    c.save(folder / "good", model, torch.optim.SGD(model.parameters(), momentum=0.5))
    c.save(folder / "run/checkpoints/step-00000001", model)
    c.save_hf(model, folder / "hf")
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)
    torch.save({"model": model.state_dict(), "opt": optimizer.state_dict()}, folder / "theirs.pt")
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "call", "right", "takes"), list(cases()), ids=[one[0] for one in cases()])
def test_another_kind_of_thing_is_one_error_before_anything_is_made(
    made: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    call: Callable[..., Any],
    right: dict[str, Any],
    takes: dict[str, str],
) -> None:
    monkeypatch.chdir(made)
    there, model = set(made.iterdir()), filled()
    if "model" in right:
        right = right | {"model": model}
    for argument in right:
        for word, wrong in (WRONG | {"tensor": torch.ones(2)}).items():
            if word in takes.get(argument, "").split():
                continue
            said = f"{name}({argument}={wrong!r})"
            with pytest.raises(CheckpointError) as told:
                pytest.fail(f"{said} gives {call(**(right | {argument: wrong}))!r}")
            assert len(str(told.value)) > 20, said
            assert set(made.iterdir()) == there, said
    assert all(map(torch.equal, model.parameters(), filled().parameters()))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: c.save("x", model=0.5), "model=0.5 holds no module"),
        (lambda: c.save("x", torch.optim.SGD(filled().parameters())), "which is given as optimizer="),
        (lambda: c.save("x", None, filled()), "which is given as model="),
        (lambda: c.rename("(", "b"), r"rename\(pattern='\(', to='b'\) is no map: missing \), unterminated"),
        (lambda: c.rename("a", r"\1"), "is no map: invalid group reference 1"),
        (lambda: c.join("a", "b"), "sources='b' is one text, where a sequence is due"),
        (lambda: c.join("a", ("b", "c"), sizes=(1,)), "has 2 sources and 1 sizes"),
        (lambda: c.stack("a", r"\2{index}"), "invalid group reference 2"),
        (lambda: c.save_hf(filled(), "x", maps=c.rename("bias", "\ud800")), "half of a character"),
        (lambda: c.load_hf(filled(), "x", device="nothing"), "device='nothing' is no device that is here"),
        (lambda: c.prune(__file__, keep=1, interrupted=0), "interrupted=0 is no bool"),
        (lambda: c.list_checkpoints(__file__), "is no folder: name that of a run"),
    ],
)
def test_what_is_wrong_is_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        call()
