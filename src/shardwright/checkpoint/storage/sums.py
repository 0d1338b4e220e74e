"""Checksums of a stream, one for each chunk of it, made while the bytes are at hand."""

from __future__ import annotations

from typing import Any

import xxhash

CHUNK = 1 << 18
_DIGITS = 16


class Sums:
    """Takes a stream in pieces of any size; `text` is 16 hex digits (xxh3-64) for each chunk of it."""

    __slots__ = ("_chunk", "_digits", "_filled", "_open")

    def __init__(self, chunk: int = CHUNK) -> None:
        self._chunk, self._filled = chunk, 0
        self._digits: list[str] = []
        self._open: Any = None

    def feed(self, data: memoryview) -> None:
        """The next bytes of the stream."""
        at, end, chunk = 0, len(data), self._chunk
        while at < end:
            take = min(chunk - self._filled, end - at)
            if take == chunk:
                self._digits.append(xxhash.xxh3_64_hexdigest(data[at : at + take]))
            else:
                self._continue(data[at : at + take])
            at += take

    def _continue(self, data: memoryview) -> None:
        if self._open is None:
            self._open = xxhash.xxh3_64()
        self._open.update(data)
        self._filled += len(data)
        if self._filled == self._chunk:
            self._close()

    def _close(self) -> None:
        self._digits.append(self._open.hexdigest())
        self._open, self._filled = None, 0

    @property
    def text(self) -> str:
        """The checksums so far; the stream is over."""
        if self._filled:
            self._close()
        return "".join(self._digits)


def sum_of(data: bytes | memoryview) -> str:
    """The checksum of one short piece: 16 hex digits."""
    return str(xxhash.xxh3_64_hexdigest(data))


def digits_for(size: int, chunk: int = CHUNK) -> int:
    """How many hex digits the checksums of so many bytes have."""
    return -(-size // chunk) * _DIGITS


def first_wrong(data: memoryview, sums: str, first: int, chunk: int) -> int:
    """The first chunk of `data` that is not as its checksum says, counted from `first`; -1: all are right.

    Args: data: whole chunks of a stream from chunk number `first` on (the last may be the short last one).
        sums: the checksums of the whole stream.
    """
    digest = xxhash.xxh3_64_hexdigest
    for number, at in enumerate(range(0, len(data), chunk), first):
        place = number * _DIGITS
        if digest(data[at : at + chunk]) != sums[place : place + _DIGITS]:
            return number
    return -1
