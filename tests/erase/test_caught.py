"""Errors of operators that the program catches: a replay raises out of the call, so none is made there."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.testing.meshes import rank_mesh

TABLE = torch.arange(12.0).view(4, 3)
GOOD, BAD = torch.tensor([0, 3]), torch.tensor([0, 4])
OTHER = IndexError, KeyError


def look_up(ids):
    return nn.functional.embedding(ids, TABLE)


def otherwise(ids):
    return TABLE[:2] * 10 + ids.clamp(max=3)[:, None]


def by_its_class(ids):
    try:
        return look_up(ids)
    except IndexError:
        return otherwise(ids)


def by_any(ids):
    try:
        return look_up(ids)
    except:  # noqa: E722 - what is tested
        return otherwise(ids)


def by_a_class_above(ids):
    try:
        return look_up(ids)
    except LookupError as error:
        return otherwise(ids) + len(str(error))


def by_one_of_several(ids):
    try:
        return look_up(ids)
    except ZeroDivisionError:
        return ids
    except OTHER:
        return otherwise(ids)


def by_what_is_computed(ids):
    classes = [KeyError, IndexError]
    try:
        return look_up(ids)
    except tuple(classes):
        return otherwise(ids)


def by_a_group(ids):
    found = otherwise(ids)
    try:
        found = look_up(ids)
    except* IndexError:
        found = found + 1
    return found


def by_a_loop(ids):
    for table in (TABLE, TABLE.repeat(2, 1)):
        try:
            return nn.functional.embedding(ids, table) * len(table)
        except IndexError:
            continue
    return otherwise(ids)


def by_a_return(ids):
    found = otherwise(ids)
    try:
        found = look_up(ids)
    finally:
        return found  # noqa: B012 - what is tested


def by_a_frame_above(ids):
    def inner(ids):
        with torch.no_grad():
            return look_up(ids)

    try:
        try:
            return inner(ids) + 1
        finally:
            len(ids)
    except IndexError:
        return otherwise(ids)


def by_another_error(ids):
    """What comes out is not the operator's own."""
    try:
        return look_up(ids)
    except IndexError as error:
        raise KeyError(4) from error


def by_suppress(ids):
    found = otherwise(ids)
    with contextlib.suppress(IndexError):
        found = look_up(ids)
    return found + 0


def by_a_stack(ids):
    found = otherwise(ids)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(RuntimeError, LookupError))
        found = look_up(ids)
    return found + 0


class Tolerant:
    """Says of each error that it is dealt with."""

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        return kind is not None


def by_an_exit(ids):
    found = otherwise(ids)
    with Tolerant():
        found = look_up(ids)
    return found + 0


@contextlib.contextmanager
def tolerant():
    try:
        yield
    except IndexError:
        len("caught")


def by_a_generator(ids):
    found = otherwise(ids)
    with tolerant():
        found = look_up(ids)
    return found + 0


@contextlib.contextmanager
def tolerant_inside():
    with contextlib.suppress(LookupError):
        yield


def by_a_block_in_a_generator(ids):
    found = otherwise(ids)
    with tolerant_inside():
        found = look_up(ids)
    return found + 0


class Decorating(contextlib.ContextDecorator, Tolerant):
    """Its block is one of the standard library, around a function."""


def by_a_decorator(ids):
    found = [otherwise(ids)]

    @Decorating()
    def looks():
        found.append(look_up(ids))

    looks()
    return found[-1] + 0


class SkippedError(Exception):
    """None that an operator raises."""


class Renaming:
    """Raises another error for each."""

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is not None:
            raise SkippedError


def by_an_exit_that_raises(ids):
    try:
        with Renaming():
            return look_up(ids)
    except SkippedError:
        return otherwise(ids)


class Renamed(Tolerant):
    """Its exit has another name."""

    def _end(self, kind, *_):
        return kind is not None

    __exit__ = _end


class Brief(Tolerant):
    """Its exit has no name."""

    __exit__ = lambda self, kind, *_: kind is not None  # noqa: E731 - what is tested


def by_an_exit_of_another_name(ids):
    found = otherwise(ids)
    with Renamed():
        found = look_up(ids)
    return found + 0


def by_an_exit_without_a_name(ids):
    found = otherwise(ids)
    with Brief():
        found = look_up(ids)
    return found + 0


def dealt_with(kind, *_):
    return kind is not None


def by_what_a_stack_was_given(ids):
    found = otherwise(ids)
    with contextlib.ExitStack() as stack:
        stack.push(dealt_with)
        found = look_up(ids)
    return found + 0


CAUGHT = (
    by_its_class, by_any, by_a_class_above, by_one_of_several, by_what_is_computed, by_a_group, by_a_loop,
    by_a_return, by_a_frame_above, by_another_error, by_suppress, by_a_stack, by_an_exit, by_a_generator,
    by_a_block_in_a_generator, by_a_decorator, by_an_exit_that_raises,
    by_an_exit_of_another_name, by_an_exit_without_a_name, by_what_a_stack_was_given,
)  # fmt: skip


def _result(function, ids):
    """What it gives, or the class of what it raises."""
    try:
        return function(ids)
    except (LookupError, RuntimeError) as error:
        return type(error)


@pytest.mark.parametrize("function", CAUGHT, ids=lambda f: f.__name__)
@pytest.mark.parametrize("order", [(GOOD, GOOD, BAD, GOOD), (BAD, BAD, GOOD, BAD)], ids=["good", "bad"])
def test_what_catches_the_error_of_an_operator_catches_it_at_each_call(function, order):
    fast = sw.erase(function)
    for ids in order:
        found, wanted = _result(fast, ids), _result(function, ids)
        assert found is wanted if isinstance(wanted, type) else torch.equal(found, wanted)
    assert fast.report().replays == 0
    words = ["the program catches errors"] if order[0] is GOOD else ["the program catches", "it raised"]
    assert any(each in str(fast.report()) for each in words), str(fast.report())
    assert f"{__file__}:" in str(fast.report())


# ------------------------------------------------------------------------------------ what catches nothing


def beside(ids):
    try:
        scale = {}["absent"]
    except KeyError:
        scale = 2.0
    return look_up(ids) * scale


def inside_of_a_handler(ids):
    try:
        {}["absent"]
    except KeyError:
        return look_up(ids)


def of_another_class(ids):
    try:
        return look_up(ids)
    except (TypeError, ImportError):
        return otherwise(ids)


def handed_on(ids):
    try:
        return look_up(ids)
    finally:
        for _ in range(2):
            len(ids)


class Closing:
    """Ends without a word."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        len("closed")


@contextlib.contextmanager
def restoring():
    try:
        yield
    finally:
        len("restored")


def under_blocks(ids):
    with restoring(), Closing(), torch.no_grad(), contextlib.suppress(KeyError):
        found = look_up(ids)
    return found + 1


def after_a_block(ids):
    with tolerant():
        scale = 2.0
    return look_up(ids) * scale


def a_view(ids):
    found = look_up(ids)
    try:
        return found.view(-1)
    except RuntimeError:
        return found.reshape(-1)


def a_view_that_raises(ids):
    found = look_up(ids).t()
    try:
        return found.view(-1)
    except RuntimeError:  # by its strides: at each call
        return found.reshape(-1)


def arithmetic_that_raises(ids):
    found = look_up(ids)
    try:
        return found + torch.ones(5)
    except RuntimeError:  # by its shapes
        return found * 2


def arithmetic(ids):
    found = look_up(ids)
    try:
        return found + torch.ones(3)
    except RuntimeError:
        return found


FREE = (
    beside,
    inside_of_a_handler,
    of_another_class,
    handed_on,
    under_blocks,
    after_a_block,
    a_view,
    a_view_that_raises,
    arithmetic,
    arithmetic_that_raises,
)


@pytest.mark.parametrize("function", FREE, ids=lambda f: f.__name__)
def test_handlers_that_take_no_error_of_an_operator_are_no_reason(function):
    fast = sw.erase(function)
    for ids in (GOOD, GOOD, GOOD.flip(0)):
        torch.testing.assert_close(fast(ids), function(ids))
    assert (fast.report().recordings, fast.report().replays) == (1, 2), str(fast.report())
    with pytest.raises(IndexError, match="out of range"):
        fast(BAD)
    assert fast.report().replays == 3


def not_used(ids):
    look_up(ids)
    return ids * 2


def not_used_in_a_backward(ids):
    table = TABLE.clone().requires_grad_()
    nn.functional.embedding(ids, table).sum().backward()
    return ids * 2


@pytest.mark.parametrize("function", [not_used, not_used_in_a_backward], ids=lambda f: f.__name__)
def test_an_operator_whose_result_nobody_uses_raises_in_a_replay(function):
    fast = sw.erase(function)
    for ids in (GOOD, GOOD, BAD, GOOD):
        found, wanted = _result(fast, ids), _result(function, ids)
        assert found is wanted if isinstance(wanted, type) else torch.equal(found, wanted)
    assert fast.report().replays == 3, str(fast.report())


WAITING = [tolerant()]


def in_a_block_of_before(ids):
    """What was made outside of the call serves once."""
    if WAITING:
        with WAITING.pop():
            return look_up(ids)
    return look_up(ids) * 2


def with_a_generator_of_before(ids, manager):
    with manager:
        return look_up(ids)


def test_a_generator_that_was_made_before_goes_on_once():
    fast = sw.erase(in_a_block_of_before)
    for factor in (1, 2, 2):
        torch.testing.assert_close(fast(GOOD), look_up(GOOD) * factor)
    manager, fast = restoring(), sw.erase(with_a_generator_of_before)
    torch.testing.assert_close(fast(GOOD, manager), look_up(GOOD))
    for function in (with_a_generator_of_before, fast):
        with pytest.raises((RuntimeError, AttributeError)):
            function(GOOD, manager)
    assert fast.report().replays == 0


# ------------------------------------------------------------------------------------ rows that are cut


def _on_ranks(caught):
    """A table whose rows are cut asks on the host for its places, before any operator says so."""
    mesh = rank_mesh((dist.get_world_size(),), ("tp",))
    torch.manual_seed(0)
    plain = nn.Embedding(10, 4)
    model = sw.distribute_module(copy.deepcopy(plain), mesh, {"weight": {"tp": sw.Shard(0)}})

    def step_of(model):
        def step(ids):
            try:
                scale = {}["absent"]
            except KeyError:
                scale = 2.0
            if not caught:
                return model(ids) * scale
            try:
                return model(ids) * scale
            except IndexError:
                return model(ids.clamp(max=9)) * 3.0

        return step

    wanted, fast = step_of(plain), sw.erase(step_of(model))
    good, bad = torch.tensor([[1, 9], [4, 0]]), torch.tensor([[1, 10], [4, 0]])
    for ids in (bad, good, bad, good) if caught else (good, good.flip(0), good.t()):
        given = sw.distribute_tensor(ids, mesh, [sw.Replicate()])
        with torch.no_grad():
            torch.testing.assert_close(fast(given).full_tensor(), wanted(ids))
    assert (fast.report().replays > 0) is not caught, str(fast.report())


@pytest.mark.parametrize("caught", [False, True])
def test_rows_that_are_cut_are_looked_up_as_on_one_device(ranks, caught):
    ranks(2, _on_ranks, caught)
