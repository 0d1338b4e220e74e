"""Text as bytes: where it comes from, which part is held out, and the windows that a step reads.

Not a loader with state: what a step reads is a function of (seed, step, row), so a run on another mesh, a
resumed run and a rank that reads only its own rows all see the same text.
"""

from __future__ import annotations

import struct
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from shardwright.train.config import least_text, reading, text_files, too_little

SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "__pycache__"})
MOST_BYTES = 64 * 2**20
STRETCHES = 8
HELD_OUT_SHARE = 20


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes held out, both uint8 [n]; `source` says where they came from."""

    train: Tensor
    held_out: Tensor
    source: str

    @property
    def sum(self) -> str:
        """A checksum of the bytes to train on."""
        return xxhash.xxh3_64_hexdigest(self.train.numpy().data)

    def batch(self, seed: int, step: int, rows: range, seq_len: int) -> Tensor:
        """The windows of these rows of the global batch of `step`:  int64 [len(rows), seq_len + 1].

        Row r starts at a place that is a hash of (seed, step, r): no other row and no mesh has a say in it.
        """
        starts = [_place(seed, step, row, len(self.train) - seq_len) for row in rows]
        return _windows(self.train, starts, seq_len)

    def held_out_windows(self, count: int, rows: range, seq_len: int) -> Tensor:
        """These rows of `count` fixed held-out windows, evenly spread:  int64 [rows, seq_len + 1]."""
        room = len(self.held_out) - seq_len
        return _windows(self.held_out, [row * room // count for row in rows], seq_len)


def load_corpus(path: Path | None, seq_len: int) -> Corpus:
    """The corpus at `path`: a file, or all text files below a folder; by default the standard library.

    One twentieth is held out: the last part of each of 8 equal stretches, so that it covers the whole corpus.
    Raises: ConfigError: too little text for windows of this length in both parts, or none that can be read.
    """
    text = _read_all(path)
    source = str(path) if path else "the standard library's sources"
    if len(text) < least_text(seq_len):
        raise too_little(f"--data {source}" if path else source, len(text), seq_len)
    if len(text) > MOST_BYTES:
        text, source = text[:MOST_BYTES], f"the first {MOST_BYTES >> 20} MiB of {source}"
    train, held_out = _hold_out(torch.frombuffer(text, dtype=torch.uint8))
    return Corpus(train, held_out, source)


def share(total: int, parts: int, index: int) -> range:
    """The rows that part `index` of `parts` takes of `total`: contiguous, and none when there are too few."""
    return range(total * index // parts, total * (index + 1) // parts)


def _read_all(path: Path | None) -> bytearray:
    """The files one after another, a line break between them; no further than what is used."""
    text = bytearray()
    with reading(path):
        for content in _read(path):
            text += content + b"\n"
            if len(text) > MOST_BYTES:
                break
    return text


def _read(path: Path | None) -> Iterator[bytes]:
    if path is not None and path.is_file():
        yield path.read_bytes()
        return
    root = path if path is not None else Path(sysconfig.get_path("stdlib"))
    files = text_files(root, "" if path is not None else ".py")
    if path is None:
        files = [file for file in files if SKIPPED_FOLDERS.isdisjoint(file.relative_to(root).parts)]
    for file in sorted(files, key=lambda file: file.relative_to(root).as_posix()):
        content = file.read_bytes()
        if b"\0" not in content:
            yield content


def _hold_out(text: Tensor) -> tuple[Tensor, Tensor]:
    train, held_out = [], []
    for stretch in text.tensor_split(STRETCHES):
        cut = len(stretch) - len(stretch) // HELD_OUT_SHARE
        train.append(stretch[:cut])
        held_out.append(stretch[cut:])
    return torch.cat(train), torch.cat(held_out)


def _place(seed: int, step: int, row: int, room: int) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack("<QQQ", seed, step, row)) % room


def _windows(text: Tensor, starts: list[int], seq_len: int) -> Tensor:
    if not starts:
        return torch.empty(0, seq_len + 1, dtype=torch.int64)
    return torch.stack([text[start : start + seq_len + 1] for start in starts]).long()
