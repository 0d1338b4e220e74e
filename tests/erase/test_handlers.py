"""What an error meets that is raised at a place of a code."""

# ruff: noqa: SIM105, TRY203 - the handlers are what is read

import builtins
import contextlib
import dis
import sys

import pytest
import torch

from shardwright.erased.handlers import handlers_at, may_catch, may_swallow, yields_of


def place():
    """Where the error is raised."""


def nothing():
    place()
    with contextlib.suppress(KeyError):
        pass
    try:
        len("")
    except ValueError:
        pass


def one_class():
    try:
        place()
    except KeyError:
        pass


def by_their_modules():
    try:
        place()
    except (builtins.KeyError, torch.linalg.LinAlgError):
        pass


def several_clauses():
    try:
        place()
    except TypeError as error:
        del error
    except KeyError:
        pass


def nested():
    try:
        try:
            place()
        except TypeError:
            pass
        finally:
            len("")
    except KeyError:
        pass


def in_a_handler():
    try:
        try:
            len("")
        except ValueError:
            place()
    except TypeError:
        pass


def in_a_loop():
    while True:
        try:
            place()
        except:  # noqa: E722
            continue


def raised_again():
    try:
        place()
    except BaseException:
        raise


def in_blocks():
    for _ in range(2):
        with contextlib.nullcontext(), contextlib.nullcontext():
            place()


def in_a_block_in_a_handler():
    try:
        with contextlib.nullcontext() as found:
            place()
        len(found)
    except TypeError:
        pass


def a_loop_in_a_finally():
    try:
        place()
    finally:
        for each in "ab":
            if each:
                len(each)


def by_a_variable(classes):
    try:
        place()
    except classes:
        pass


async def in_an_asynchronous_block(block):
    try:
        async with block:
            place()
    finally:
        len("")


T, K = (("TypeError",),), (("KeyError",),)
# Per function: the clauses that an error of `place` meets, whether it meets the end of a block, and whether
# it may be an operator's.
FOUND = {
    nothing: ((), False, False),
    one_class: ((K,), False, False),
    by_their_modules: (((("builtins", "KeyError"), ("torch", "linalg", "LinAlgError")),), False, True),
    several_clauses: ((T, K), False, False),
    nested: ((T, K), False, False),
    in_a_handler: ((T,), False, False),
    in_a_loop: ((None,), False, True),
    raised_again: (((("BaseException",),),), False, True),
    in_blocks: ((), True, False),
    in_a_block_in_a_handler: ((T,), True, False),
    a_loop_in_a_finally: ((), False, False),
    by_a_variable: ((None,), False, True),
    in_an_asynchronous_block: ((), True, False),
}


@pytest.mark.parametrize("function", FOUND, ids=lambda f: f.__name__)
def test_the_handlers_around_a_place_are_read_from_the_code(function):
    code = function.__code__
    named = next(each for each in dis.get_instructions(code) if each.argval == "place")
    called = next(
        each for each in dis.get_instructions(code) if each.offset > named.offset and each.opname == "CALL"
    )
    found = handlers_at(code, called.offset)
    clauses, with_block, of_operators = FOUND[function]
    assert (sorted(found.clauses, key=str), found.with_block) == (sorted(clauses, key=str), with_block)
    kwargs = {"names": globals(), "builtins": vars(builtins)}
    assert any(may_catch(clause, **kwargs, of_any=False) for clause in found.clauses) is of_operators
    assert any(may_catch(clause, **kwargs, of_any=True) for clause in found.clauses) is bool(clauses)


def waits():
    yield 1
    try:
        yield 2
    except ValueError:
        yield 3


def test_a_generator_is_asked_where_it_waits():
    places, generator = yields_of(waits.__code__), waits()
    met = []

    def hook(frame, event, _):
        if event == "return" and frame.f_code is waits.__code__:
            met.append(places.get(frame.f_lasti))

    sys.setprofile(hook)
    try:
        next(generator), next(generator), generator.throw(ValueError)
    finally:
        sys.setprofile(None)
    assert [found.clauses for found in met] == [(), ((("ValueError",),),), ()]


def true(*_):
    return True


def false(*_):
    len("")
    return False


def none(*_):
    len("")


def perhaps(_, kind):
    return kind is not None


@pytest.mark.parametrize(
    ("function", "wanted"), [(true, True), (false, False), (none, False), (perhaps, True)]
)
def test_an_exit_swallows_where_a_result_may_be_true(function, wanted):
    assert may_swallow(function.__code__) is wanted
