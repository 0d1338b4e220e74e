"""Checkpoints of the first format of this library, in the words of this one; their data is torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwright.checkpoint.optimizer_state import OptimizerPart, merge
from shardwright.checkpoint.storage import disk, legacy
from shardwright.checkpoint.storage.manifest import NAME
from shardwright.checkpoint.storage.values import decode
from shardwright.errors import CheckpointError

_MOST = 1 << 30


def read(source: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint of the first format; None: it is none."""
    try:
        return legacy.manifest_of(disk.read_small(source / NAME, _MOST))
    except (OSError, EOFError):
        return None


def key(name: str) -> str:
    """What is called so here: `optimizer/model/weight/exp_avg` for `optimizer/weight/exp_avg`."""
    kind, _, rest = name.partition("/")
    if kind == "optimizer":
        return f"optimizer/model/{rest}"
    if kind == "object":
        return f"model/{rest}._extra_state".replace("/._", "/_")
    return name


def describe(
    old: dict[str, Any], tensors: dict[str, dict[str, Any]], values: dict[str, Any]
) -> dict[str, Any]:
    """The rest of a manifest. Of `tensors` and `values` those that are told in another way now are changed.

    Raises: CheckpointError: the manifest lacks something.
    """
    try:
        for name, one in old["model"].items():
            if 0 in one["shape"]:
                dtype = one["dtype"].removeprefix("torch.")
                tensors[f"model/{name}"] = {
                    "dtype": dtype,
                    "shape": one["shape"],
                    "layout": None,
                    "parts": [],
                }
        for name in [name for name in values if name.startswith("rng/")]:
            del values[name]  # without numpy's generator, and in another form
        settings = [values.pop(name) for name in sorted(values) if name.startswith("settings/")]
        optimizers = {"optimizer": _optimizer(old["optimizer"]["kind"], settings)} if settings else {}
        ties = {f"model/{name}": f"model/{first}" for name, first in old["aliases"].items()}
        about = {name: old[name] for name in ("world", "step", "config")}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"its manifest of the first format lacks {error}") from None
    return {**about, "ties": ties, "optimizers": optimizers}


def _optimizer(kind: str, settings: list[Any]) -> dict[str, Any]:
    parts = []
    for one in settings:
        groups = [
            {**group, "params": [f"model/{name}" for name in decode(group["params"], "params")]}
            for group in one["groups"]
        ]
        values = {f"model/{name}": of for name, of in one["values"].items()}
        parts.append(OptimizerPart(kind, groups, values))
    return merge("optimizer", parts)
