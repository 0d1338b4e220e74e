"""The store of a place: the one decision between a file system and object storage."""

from __future__ import annotations

from shardwright.checkpoint.storage.place import Address, Place
from shardwright.checkpoint.storage.stores.local import LocalStore
from shardwright.checkpoint.storage.stores.objects import ObjectStore
from shardwright.checkpoint.storage.stores.store import Store


def store_of(place: Place) -> Store:
    """The files at a place. Raises: CheckpointError: what fsspec needs for an address is not installed."""
    return ObjectStore(place) if isinstance(place, Address) else LocalStore(place)
