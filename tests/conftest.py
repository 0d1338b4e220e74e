"""Fixtures for every test: real ranks from one pool per session.

torch is imported by what runs tests: the process of `-n` that hands them out would import it, two seconds,
before the others begin.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests import forks

if TYPE_CHECKING:
    from shardwright.testing.pool import RankPool

pytest_plugins = ["tests.releases", "tests.tiers"]

# What rank functions and their test modules import; a rank that is forked has it already.
_PRELOAD = (
    "hypothesis",
    "pytest",
    "shardwright.checkpoint",
    "shardwright.erased",
    "shardwright.parallel",
    "shardwright.show.trace_table",
    "torch._subclasses.schema_check_mode",
    "torch.distributed.tensor.experimental",
)
# What takes each rank of each world a second or more to import: where the tests that are collected have the
# module on the left, their ranks want those on the right.
_COSTLY = {
    "transformers": ("transformers.models.llama.modeling_llama",),
    "tests.compositions.ranks": ("tests.compositions.preload",),
    "tests.corpus.test_corpus": ("tests.corpus.catalog",),
    "tests.fuzz.ranks": ("tests.fuzz.ranks",),
    "tests.ops.ranks": ("tests.ops.ranks",),
    "tests.parallel.test_compile": ("sympy.tensor.tensor", "tests.compiles"),
}
# What torch says there of plain programs too.
_SAID_ON_GPU = ("Attempting to run cuBLAS", "RNN module weights are not part of single contiguous chunk")
_POOL = pytest.StashKey["RankPool"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ranks-on", choices=("cpu", "cuda"), help="the device of the ranks; cuda: one for all")


def pytest_configure(config: pytest.Config) -> None:
    # What a script starts in the background ignores SIGINT, and so would all that the tests start and stop.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _hands_out(config):
        return
    import torch

    from shardwright.testing.rank_device import VARIABLE, device_of_ranks

    if config.getoption("--ranks-on"):
        os.environ[VARIABLE] = config.getoption("--ranks-on")
    for text in _SAID_ON_GPU if device_of_ranks() != "cpu" else ():
        config.addinivalue_line("filterwarnings", f"ignore:{text}")
    # Tensors are tiny: a second thread would only spin beside the first.
    torch.set_num_threads(1)
    gc.disable()  # until the tests are collected: what they are made of stays, and is not worth a look


def _hands_out(config: pytest.Config) -> bool:
    """Is this the process of `-n` that runs no test?"""
    return not hasattr(config, "workerinput") and bool(config.getoption("numprocesses", None))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the zygote as soon as it is known that a test wants ranks.

    It is a process of its own (not a fork of this one), so what the collection imported or ran does not
    matter, and a run of a few pure tests does not pay for it.
    """
    from shardwright.testing.pool import RankPool
    from shardwright.testing.rank_device import device_of_ranks
    from tests.shared_pool import SharedPool

    _collect_garbage_of_tests_only()
    costly = [name for collected, names in _COSTLY.items() if collected in sys.modules for name in names]
    preload = (*_PRELOAD, *costly)
    if device_of_ranks() == "cpu":
        forks.want(preload)
        pool = SharedPool()
    else:
        pool = RankPool(preload=("tests.on_gpu", *preload))
    session.config.stash[_POOL] = pool
    if any("rank_pool" in getattr(item, "fixturenames", ()) for item in session.items):
        pool.start()


def _collect_garbage_of_tests_only() -> None:
    """What stands before the first test stays to the end, so no collection looks through it."""
    from shardwright.testing.zygote import SELDOM

    gc.freeze()
    gc.set_threshold(*SELDOM)
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    if _POOL in config.stash:
        config.stash[_POOL].close()
    if not _hands_out(config):
        forks.end()


@pytest.fixture(scope="session")
def rank_pool(pytestconfig: pytest.Config) -> RankPool:
    """The session's pool of gloo ranks."""
    return pytestconfig.stash[_POOL]


@pytest.fixture
def ranks(rank_pool: RankPool) -> Callable[..., list[Any]]:
    """`ranks(n, function, *args)`: run a module-level function on n ranks, get the results in rank order."""
    return rank_pool.run
