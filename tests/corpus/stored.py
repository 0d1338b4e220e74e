"""The file of hashes: per family and op the number of rows and a hash of them."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch

from tests.corpus.row import Digest, Digests

FILE = Path(__file__).parent / "hashes.txt"
_HEAD = "# Behaviour, pinned: an op, its rows, a hash of them. Made by `python -m tests.corpus --accept`.\n"


class Difference(NamedTuple):
    """An op whose rows are not those that were stored; None: it was not there."""

    family: str
    op: str
    before: Digest | None
    after: Digest | None


def differences(before: Digests, after: Digests) -> list[Difference]:
    """What is new, gone, or has another hash."""
    keys = sorted({*before, *after})
    return [Difference(*k, before.get(k), after.get(k)) for k in keys if before.get(k) != after.get(k)]


def version() -> str:
    """The release of torch, of whose samples the rows are."""
    return torch.__version__.partition("+")[0]


def stored_version() -> str:
    """The release of torch with which the file was made."""
    return FILE.read_text().splitlines()[1].removeprefix("# torch ") if FILE.exists() else "none"


def read() -> Digests:
    """What is stored."""
    found: Digests = {}
    family = ""
    for line in FILE.read_text().splitlines() if FILE.exists() else ():
        if line.startswith("["):
            family = line.strip("[]")
        elif line and not line.startswith("#"):
            op, rows, hash_ = line.rsplit(" ", 2)
            found[family, op] = Digest(int(rows), hash_)
    return found


def write(known: Digests) -> None:
    """Replace what is stored."""
    lines = [_HEAD, f"# torch {version()}\n"]
    for family, entries in groupby(sorted(known.items()), key=lambda entry: entry[0][0]):
        lines.append(f"\n[{family}]\n")
        lines += [f"{op} {digest.rows} {digest.hash}\n" for (_, op), digest in entries]
    FILE.write_text("".join(lines))
