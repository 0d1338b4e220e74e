"""Plain values as JSON and back, without anything that could be executed.

JSON's own types stand for themselves; any other type is an object with the key "$", which names it. A small
tensor is held in place, a large one by a key of the checkpoint's tensors.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from shardwright.checkpoint.storage.element_types import DTYPES, ITEMSIZES, in_order, name_of
from shardwright.comm.dtype import as_bytes
from shardwright.errors import CheckpointError

INLINE = 1 << 16
_DEPTH = 64
_TAG = "$"
_SAFE_INT = 1 << 63

Keep = Callable[[str, torch.Tensor], str]
Take = Callable[[str], torch.Tensor]


def encode(value: Any, where: str, keep: Keep | None = None, depth: int = 0) -> Any:
    """JSON for a value.

    Args: where: the value's path, for errors and as the key of large tensors.
        keep: is handed each tensor that is not held in place, with a key for it, and gives the key that it
            got; None: there may be none.
    Raises: CheckpointError: a value of a type that could only be pickled, or nested deeper than 64.
    """
    if depth > _DEPTH:
        raise CheckpointError(f"{where} is nested deeper than {_DEPTH}: is it inside itself?")
    kind = type(value)
    if kind is str:
        refuse_half_a_character(value, where)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -_SAFE_INT <= value < _SAFE_INT else {_TAG: "int", "v": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {_TAG: "float", "v": repr(value)}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, where, keep)
    if isinstance(value, dict) and kind in _DICTS:
        return _encode_dict(value, where, keep, depth)
    if kind in (list, tuple, set, frozenset, deque, torch.Size):
        return _encode_many(value, where, keep, depth)
    return _encode_other(value, where)


def refuse_half_a_character(text: str, where: str) -> None:
    """Raises CheckpointError where a text has no UTF-8: half of a pair (`os.fsdecode` makes such)."""
    if not _is_text(text):
        raise CheckpointError(
            f"{where} is {text!r:.60}, in which half of a character stands alone, so that it is no text: "
            "give bytes (os.fsencode), or another name"
        )


def _is_text(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode_tensor(value: torch.Tensor, where: str, keep: Keep | None) -> Any:
    plain = type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    in_line = value.layout is torch.strided and not value.is_nested and value.device.type != "meta"
    if plain and in_line and value.nbytes <= INLINE:
        plain_value = in_order(value.detach().cpu().resolve_conj().resolve_neg())
        data = as_bytes(plain_value).numpy().tobytes()
        return {
            _TAG: "tensor",
            "dtype": name_of(value.dtype),
            "shape": list(value.shape),
            "v": base64.b64encode(data).decode(),
        }
    if keep is None:
        raise CheckpointError(f"{where} is a tensor {list(value.shape)}: give it as a state of its own")
    return {_TAG: "kept", "v": keep(where, value)}


def _encode_dict(value: dict[Any, Any], where: str, keep: Keep | None, depth: int) -> Any:
    tag = _DICTS[type(value)]
    if tag == "dict" and _TAG not in value and all(type(key) is str and _is_text(key) for key in value):
        return {key: encode(one, f"{where}/{key}", keep, depth + 1) for key, one in value.items()}
    pairs = [
        [encode(key, where, None, depth + 1), encode(one, f"{where}/{key}", keep, depth + 1)]
        for key, one in value.items()
    ]
    return {_TAG: tag, "v": pairs}


def _encode_many(value: Any, where: str, keep: Keep | None, depth: int) -> Any:
    items = [encode(one, f"{where}/{at}", keep, depth + 1) for at, one in enumerate(value)]
    if type(value) in (set, frozenset):  # one text for one set, whatever the seed of its hashes
        items.sort(key=canonical)
    if type(value) is deque:
        return {_TAG: "deque", "v": items, "most": value.maxlen}
    name = "size" if type(value) is torch.Size else type(value).__name__
    return items if type(value) is list else {_TAG: name, "v": items}


def kept_in(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The keys of tensors that a value (as JSON) names, and where in it they stand."""
    if isinstance(value, list):
        for at, one in enumerate(value):
            yield from kept_in(one, (*place, at))
    elif isinstance(value, dict):
        tag = value.get(_TAG)
        if tag is None:
            for name, one in value.items():
                yield from kept_in(one, (*place, name))
        elif tag == "kept":
            yield str(value.get("v")), place
        elif tag in ("dict", "ordered", "counter"):
            for pair in value.get("v", ()):
                yield from kept_in(pair[1], (*place, pair[0]))
        elif isinstance(value.get("v"), list | dict):  # a dict: of each rank one
            yield from kept_in(value["v"], place)


def canonical(value: Any) -> str:
    """One text for all forms of a value (as JSON) that are equal: dicts in any order.

    Of any JSON, since a manifest may hold what no save wrote: numbers that are none, tags of nothing.
    """
    return json.dumps(_ordered(value), sort_keys=True)


def _ordered(value: Any) -> Any:
    if isinstance(value, list):
        return [_ordered(one) for one in value]
    if not isinstance(value, dict):
        return value
    found = {key: _ordered(one) for key, one in value.items()}
    if isinstance(found.get("v"), list) and found.get(_TAG) in _UNORDERED:
        found["v"] = sorted(found["v"], key=lambda pair: json.dumps(pair, sort_keys=True))
    return found


def _encode_other(value: Any, where: str) -> Any:
    scalar = isinstance(value, np.generic)
    if (scalar or type(value) is np.ndarray) and value.dtype.kind in "biufc":  # a masked array has more
        array = np.ascontiguousarray(value)
        data = base64.b64encode(array.tobytes()).decode()
        shape = list(value.shape)
        return {_TAG: "scalar" if scalar else "array", "dtype": array.dtype.str, "shape": shape, "v": data}
    if type(value) is complex:
        return {_TAG: "complex", "v": [repr(value.real), repr(value.imag)]}
    if type(value) in (bytes, bytearray):
        return {_TAG: type(value).__name__, "v": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {_TAG: "dtype", "v": name_of(value)}
    if isinstance(value, torch.device):
        return {_TAG: "device", "v": str(value)}
    if type(value) in _PATHS and _is_text(str(value)):
        return {_TAG: _PATHS[type(value)], "v": str(value)}
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which could only be pickled, and "
        "a checkpoint holds nothing that is executed when it is loaded: give plain values (numbers, text, "
        "bytes, lists, tuples, sets, dicts, tensors, arrays), or an object with state_dict() and "
        "load_state_dict()"
    )


def decode(value: Any, where: str, take: Take | None = None, depth: int = 0) -> Any:
    """The value that `encode` was given; `take` gives the tensor with a key.

    Raises: CheckpointError: text that `encode` does not write.
    """
    if depth > 2 * _DEPTH:
        raise CheckpointError(f"{where} is nested deeper than {_DEPTH}")
    if isinstance(value, list):
        return [decode(one, where, take, depth + 1) for one in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(one, f"{where}/{key}", take, depth + 1) for key, one in value.items()}
    try:
        return _decode_tagged(value, where, take, depth)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{where} is no value that was saved ({error})") from None


def _decode_tagged(value: dict[str, Any], where: str, take: Take | None, depth: int) -> Any:
    tag, inner = value[_TAG], value["v"]
    if tag == "kept":
        if take is None or not isinstance(inner, str):
            raise CheckpointError(f"{where} names a tensor where none can be")
        return take(inner)
    if tag in ("tensor", "array", "scalar"):
        return _decode_array(tag, value)
    if tag in _DICTS.values():
        items = [
            (decode(k, where, None, depth + 1), decode(v, f"{where}/{k}", take, depth + 1)) for k, v in inner
        ]
        return _FROM_PAIRS[tag](items)
    if tag == "deque":
        return deque([decode(one, where, take, depth + 1) for one in inner], value["most"])
    if tag in _SEQUENCES:
        return _SEQUENCES[tag]([decode(one, where, take, depth + 1) for one in inner])
    return _SIMPLE[tag](inner)


def _decode_array(tag: str, value: dict[str, Any]) -> Any:
    data = base64.b64decode(value["v"], validate=True)
    shape = tuple(value["shape"])
    if tag == "tensor":
        dtype = DTYPES[value["dtype"]]
        if len(data) != math.prod(shape) * ITEMSIZES[value["dtype"]]:
            raise ValueError(f"{len(data)} bytes are no {value['dtype']}{list(shape)}")
        nothing = torch.empty(0, dtype=dtype, device="cpu")
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else nothing
        return flat.reshape(shape)
    found = np.dtype(value["dtype"])
    if found.kind not in "biufc":
        raise ValueError(f"no array of {found} is saved")
    array = np.frombuffer(bytearray(data), dtype=found).reshape(shape)
    return array[()] if tag == "scalar" else array


_PATHS: dict[type, str] = {type(Path()): "path", type(PurePath()): "purepath"}  # those of this system
_DICTS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_UNORDERED = ("dict", "counter")
_FROM_PAIRS: dict[str, Callable[[list[Any]], Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda pairs: Counter(dict(pairs)),
}
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
}
_SIMPLE: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.__getitem__,
    "complex": lambda pair: complex(float(pair[0]), float(pair[1])),
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "bytearray": lambda text: bytearray(base64.b64decode(text, validate=True)),
    "dtype": DTYPES.__getitem__,
    "device": torch.device,
    "path": Path,
    "purepath": PurePath,
}
