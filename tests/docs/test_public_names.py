"""The public surface is the checked-in list: a name comes and goes only together with its line."""

from __future__ import annotations

import importlib

import pytest

import shardwright
from tests.docs.pages import ROOT
from tests.docs.public_names import PACKAGES, public_names

_LIST = ROOT / "docs" / "reference" / "public_names.txt"


def test_the_public_names_are_the_listed_ones():
    listed, found = set(_LIST.read_text().split()), set(public_names())
    assert not listed - found, "gone; a public name goes only with an entry in CHANGELOG.md"
    assert not found - listed, "new; add them to docs/reference/public_names.txt"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_exists_and_is_exported_once(package):
    module = importlib.import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    assert not [name for name in module.__all__ if not hasattr(module, name)]


@pytest.mark.parametrize("package", PACKAGES[1:])
def test_a_public_package_needs_no_import_of_its_own(package, monkeypatch):
    module, name = importlib.import_module(package), package.rpartition(".")[2]
    monkeypatch.delattr(shardwright, name, raising=False)  # as after `import shardwright` alone
    assert getattr(shardwright, name) is module
    assert name in dir(shardwright)
