"""The files and functions that texts about the code name exist: they are how a newcomer finds a place."""

from __future__ import annotations

import pytest

from tests.docs.named_code import (
    PACKAGE,
    files_in,
    functions_in,
    guides,
    is_used,
    missing_files,
    missing_functions,
    rows,
)
from tests.docs.pages import ROOT

_PAGE = ROOT / "docs" / "concepts" / "life_of_a_call.md"
_TABLE = rows(_PAGE.read_text(), "Where it is decided")
_QUESTIONS = (
    "the layout of `x[2:6]`",
    "the all-reduce of a row-parallel linear",
    "the fallback of an op without a rule",
    "the error for a plain tensor beside a DTensor",
    "the buffer of an all-to-all",
    "the gradient of a replicated parameter",
)


@pytest.mark.parametrize("row", _TABLE, ids=lambda row: row[0])
def test_where_it_is_decided_there_are_such_files_and_functions(row):
    """Each row on its own: its functions are in its own files."""
    what, where, function = row
    files = files_in(where)
    assert files, what
    assert not missing_files(where, PACKAGE)
    assert not missing_functions(function, files)
    named = {name.partition(".")[0] for name in function.split("`")[1::2]}
    assert named <= {file.rpartition("/")[2].removesuffix(".py") for file in files}, "of another file"


def test_what_the_table_names_is_asked_by_the_library():
    """A function that nothing calls decides nothing: the page had sent a reader to one."""
    named = {name for _, where, function in _TABLE for name in functions_in(function, files_in(where))}
    assert len(named) > 50
    assert not [name for name in sorted(named) if not is_used(name)]
    assert is_used("sums_in_turn")
    assert not is_used("all_reduce_bucketed")


@pytest.mark.parametrize("question", _QUESTIONS)
def test_the_table_answers(question):
    assert any(row[0].startswith(question) for row in _TABLE)


def test_what_the_page_names_exists():
    text = _PAGE.read_text()
    assert not missing_files(text, PACKAGE, ROOT)
    assert not missing_functions(text, files_in(text))


@pytest.mark.parametrize("guide", guides(), ids=lambda guide: str(guide.relative_to(PACKAGE)))
def test_the_files_that_a_readme_names_exist(guide):
    """Beside it, below the package, or below the root."""
    text, here = guide.read_text(), guide.parent.relative_to(PACKAGE)
    assert not missing_files(text, guide.parent, PACKAGE, ROOT)
    named = [where for file in files_in(text) for where in (str(here / file), file)]
    assert not missing_functions(text, [file for file in named if (PACKAGE / file).exists()])


def test_a_name_that_is_not_there_is_found():
    text = "`views/through.py` has `through.through` and `through.throughout`, `views/trough.py` and `plain/`"
    assert missing_files(text, PACKAGE) == ["views/trough.py", "plain/"]
    assert missing_functions(text, ["views/through.py"]) == ["through.throughout"]
    assert missing_functions("```python\nthrough.no\n```\n`sw.trace`", ["views/through.py"]) == []


def test_a_table_is_read_from_below_its_heading():
    text = "# x\n\n## one\n\n| a | b |\n|---|---|\n| 1 | `c.d` |\n\n## two\n\n| e |\n|---|\n| 2 |\n"
    assert rows(text, "one") == [["1", "`c.d`"]]
