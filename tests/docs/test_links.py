"""What the documents point to exists: files, and the flags of commands."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT, pages

_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(?:#[^)]*)?\)")
_COMMAND = re.compile(r"(?:shardwright|-m shardwright) train\b([^\n#`]*)")


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(page):
    missing = [link for link in _LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not missing


def test_every_flag_in_the_documents_and_the_makefile_is_a_setting_of_the_training_command():
    from shardwright.train.config import TrainConfig

    known = {"--" + name.replace("_", "-") for name in TrainConfig.model_fields}
    sources = [*pages(), ROOT / "Makefile"]
    used = {
        flag
        for source in sources
        for command in _COMMAND.findall(source.read_text())
        for flag in re.findall(r"--[a-z-]+", command)
    }
    assert {"--world", "--ep", "--verify"} <= used
    assert used <= known | {"--help"}


def test_the_degrees_of_make_train_fit_together():
    from shardwright.train.config import TrainConfig

    (command,) = _COMMAND.findall((ROOT / "Makefile").read_text())
    pairs = re.findall(r"--([a-z-]+) (\d+)", command)
    degrees = {name.replace("-", "_"): int(value) for name, value in pairs}
    checked = TrainConfig.parse(**degrees).check()
    assert (checked.world, checked.dp_replicate, checked.dp_shard, checked.ep) == (4, 2, 2, 2)
