"""Replication keeps the promises of traps.py, and every check goes red on the way that is often taken."""

import pytest

from shardwright.parallel import parallelize_replicate

from . import naive, traps

CHECKS = [
    ("gradients_are_those_of_one_device", "never_summed"),
    ("an_exception_in_the_forward_leaves_it_usable", "swap_in_hooks"),
    ("an_exception_in_the_forward_leaves_it_usable", "swap_class"),
    ("recomputation_with_saved_tensors_works", "swap_in_hooks"),
    ("reentrant_recomputation_works", "swap_in_hooks"),
    ("a_module_that_calls_itself_works", "swap_in_hooks"),
    ("a_module_that_calls_itself_works", "swap_class"),
    ("a_child_called_directly_works", "swap_in_hooks"),
    ("a_parent_that_reads_its_childs_weight_works", "swap_class"),
    ("tied_weights_stay_tied", "unties"),
    ("buffers_stay_plain", "distributes_buffers"),
    ("state_dict_keys_stay", "parametrized"),
    ("classes_stay", "swap_class"),
    ("attributes_and_hooks_of_parameters_stay", "drops_what_hangs_on_parameters"),
    ("a_second_application_is_refused_unchanged", "applies_twice"),
    ("a_failure_half_way_changes_nothing", "checks_while_it_walks"),
]


def _try(check, strategy):
    """The error of a check, None when it passes."""
    place = parallelize_replicate if strategy == "replicate" else getattr(naive, strategy)
    try:
        getattr(traps, check)(place)
    except (AssertionError, AttributeError, RuntimeError, TypeError, pytest.fail.Exception) as error:
        if strategy == "replicate":
            raise
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("check", [*sorted({check for check, _ in CHECKS}), "frozen_parameters_stay_frozen"])
def test_replicate_holds(ranks, check):
    assert ranks(2, _try, check, "replicate") == [None, None]


@pytest.mark.parametrize(("check", "strategy"), CHECKS)
def test_the_check_goes_red_on_the_naive_strategy(ranks, check, strategy):
    assert all(ranks(2, _try, check, strategy))
