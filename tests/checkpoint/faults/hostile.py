"""Folders that somebody made to harm: valid checksums, false content. Nothing may run or be written."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardwright.checkpoint.storage.manifest import PREFIX, dump

Body = dict[str, Any]
Change = Callable[[Body], None]


class Executes:
    """A pickle that leaves a file where it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def body_of(path: Path) -> Body:
    """The manifest of a checkpoint, to be changed."""
    text = (path / "manifest.json").read_text()
    found: Body = json.loads(text)["manifest"]
    return found


def forge(path: Path, change: Change) -> None:
    """Rewrite the manifest, with the checksum that its new text needs."""
    body = body_of(path)
    change(body)
    (path / "manifest.json").write_bytes(dump(body))


def raw(path: Path, text: bytes) -> None:
    """A manifest of any text, with its right checksum."""
    import xxhash

    sum_ = xxhash.xxh3_128_hexdigest(text).encode()
    (path / "manifest.json").write_bytes(PREFIX + sum_ + b'",\n"manifest": ' + text + b"}\n")


_BAD_NUMBERS = (-1, 1.5, "7", None, True, 1 << 70, [1], {"a": 1})
_BAD_NAMES = (
    "../outside", "/etc/passwd", "a/b", "", ".", "..", "data-\0.safetensors", "manifest.json", "x" * 5000,
    "data-0000000000000000-00000-000.safetensors",
)  # fmt: skip


def _set(place: tuple[Any, ...], value: Any) -> Change:
    def change(body: Body) -> None:
        at: Any = body
        for step in place[:-1]:
            at = at[step]
        at[place[-1]] = value

    return change


def changes(body: Body) -> Iterator[tuple[str, Change]]:
    """False manifests, each named."""
    key = next(k for k, t in body["tensors"].items() if len(t["shape"]) == 2)
    part = ("tensors", key, "parts", 0)
    numbers = [("world",), ("step",), ("version",), ("chunk",), ("files", 0, "size"), ("files", 0, "header")]
    numbers += [(*part, "file"), (*part, "at"), (*part, "size", 0), (*part, "offset", 0)]
    numbers += [("tensors", key, "shape", 0)]
    for place in numbers:
        for bad in _BAD_NUMBERS:
            if not (place == ("step",) and bad is None):
                yield f"{place} = {bad!r:.20}", _set(place, bad)
    for bad in _BAD_NAMES:
        yield f"file named {bad!r:.20}", _set(("files", 0, "name"), bad)
    for place in (*numbers, ("files",), ("tensors",), ("values",), part, ("config",)):
        yield f"{place} is text", _set(place, "x")
    for place in (
        ("library",),
        ("torch",),
        ("format",),
        ("id",),
        ("files", 0, "sum"),
        ("tensors", key, "dtype"),
    ):
        for no_text in (-1, None, True, [1], {"a": 1}):
            yield f"{place} = {no_text!r:.20}", _set(place, no_text)
    for place in (("tensors",), ("ties",), ("optimizers",), ("values",), ("config",)):
        for no_dict in (-1, None, True, 1.5):
            yield f"{place} = {no_dict!r:.20}", _set(place, no_dict)
    yield "no files", _set(("files",), [])
    yield "a file twice", lambda b: b["files"].append(b["files"][0])
    yield "a box twice", lambda b: b["tensors"][key]["parts"].append(b["tensors"][key]["parts"][0])
    yield "a hole", lambda b: b["tensors"][key]["parts"].clear()
    yield "more dims", _set(("tensors", key, "shape"), [1] * 100)
    yield "a huge shape", _set(("tensors", key, "shape"), [1 << 60, 1 << 60])
    yield "unknown dtype", _set(("tensors", key, "dtype"), "object")
    yield "dtype with a dot", _set(("tensors", key, "dtype"), "os.system")
    yield "no checksums", _set((*part, "sums"), "")
    yield "checksums that are none", _set((*part, "sums"), "z" * 16)
    yield "unknown field", _set(("run",), "rm -rf")
    yield "tie to nowhere", _set(("ties",), {"model/x": "model/y"})
    yield "another format", _set(("format",), "other")
    yield "an id with a slash", _set(("id",), "../../../../aaaa")
    for name in ("extra", "rng"):
        for bad in ({"$": "run", "v": 1}, {"$": "tensor", "dtype": "os", "shape": [1], "v": "AA=="},
                    {"$": "tensor", "dtype": "float32", "shape": [1 << 50], "v": ""}, {"$": []},
                    {"$": "kept", "v": "../x"}, {"$": "array", "dtype": "O", "shape": [1], "v": "AAAA"},
                    {"$": "ranks", "v": {"0": {"$": "int", "v": "x"}}}, {"$": "bytes", "v": 3},
                    {"$": "dict", "v": [[1]]}, {"$": "set", "v": [[1]]}):  # fmt: skip
            yield f"{name} = {bad!r:.40}", _set(("values", name), bad)


def texts() -> Iterator[tuple[str, bytes]]:
    """Manifests that are no JSON, or too much of it."""
    for depth in (1_000, 100_000, 2_000_000):
        yield f"{depth} lists deep", b"[" * depth
        yield f"{depth} objects deep", b'{"a":' * depth + b"1" + b"}" * depth
    yield "nothing", b""
    yield "NaN", b'{"format":"shardwright","version":2,"world":NaN}'
    yield "a number of a million digits", b'{"world":' + b"9" * 1_000_000 + b"}"
    yield "not utf-8", b'{"a":"\xff\xfe"}'
    yield "null", b"null"


def pickles(path: Path, mark: Path) -> None:
    """Everything that torch's own checkpoints would unpickle, beside a manifest of ours that says nothing."""
    for name in (".metadata", "__0_0.distcp", "data.pkl"):
        (path / name).write_bytes(pickle.dumps(Executes(mark)))
