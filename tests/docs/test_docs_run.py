"""Every `python` block of the documents runs, and prints what stands below it."""

from __future__ import annotations

import os
import shlex

import pytest
import torch
import torch.distributed as dist

from shardwright.cli.app import main
from tests.docs.pages import ROOT, commands, pages, run_session, sessions

_SESSIONS = [
    pytest.param(blocks, id=f"{page.relative_to(ROOT)}:{blocks[0].line}")
    for page in pages()
    for blocks in sessions(page)
]


@pytest.mark.parametrize("blocks", _SESSIONS)
def test_the_code_in_the_documents_runs(blocks, ranks, tmp_path, monkeypatch):
    """In a folder of its own, for what it writes."""
    monkeypatch.chdir(tmp_path)
    n = blocks[0].ranks
    printed = ranks(n, run_in_a_rank, str(tmp_path), blocks, fresh=True)[0] if n else run_session(blocks)
    for block, text in zip(blocks, printed, strict=True):
        if block.output is not None:
            assert _trimmed(text) == _trimmed(block.output), f"{block.file}:{block.line}"


@pytest.mark.parametrize(("command", "output"), [pair for page in pages() for pair in commands(page)])
def test_the_commands_in_the_documents_print_what_stands_below_them(command, output, capsys):
    """In this process: that `python -m shardwright` is the command is tested once, in tests/cli."""
    program, *arguments = shlex.split(command)
    assert program == "shardwright"
    assert main(arguments) == 0
    assert _trimmed(capsys.readouterr().out) == _trimmed(output)


def run_in_a_rank(folder, blocks):
    """As under torchrun, where nobody has seeded the ranks alike: what a page needs to be alike it seeds."""
    os.chdir(folder)
    torch.manual_seed(dist.get_rank())
    return run_session(blocks)


def _trimmed(text):
    return [line.rstrip() for line in text.strip().splitlines()]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_block_of_python_is_passed_over(page):
    """Each line that opens one is read as one: words behind the language would hide it, and the next."""
    lines = enumerate(page.read_text().splitlines(), start=1)
    opened = [number for number, line in lines if line.lstrip().startswith("```py")]
    assert opened == [block.line for run in sessions(page) for block in run]


def test_a_wrong_line_in_a_document_would_be_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    (blocks,) = sessions(page)
    with pytest.raises(AssertionError):
        run_session(blocks)


def test_output_and_ranks_are_read_from_the_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nprint(3)\n```\n<!-- output -->\n```text\n3\n```\n"
        "<!-- ranks: 2 -->\n```python\npass\n```\n```console\n$ ls\n```\n"
    )
    first, second = sessions(page)
    assert [(block.ranks, block.output) for block in first + second] == [(0, "3\n"), (2, None)]
    assert run_session(first) == ["3\n"]
