"""`trace()`: rows, bytes, reasons and lines of what a block communicated and decided."""

from __future__ import annotations

import io
import threading

import pytest
import torch
from rich.console import Console

from shardwright.comm.record import record_collective, record_decision
from shardwright.show.trace import trace


def send(op="all_gather", axis="tp", bytes_sent=8, reason="because"):
    record_collective(op, axis=axis, bytes_sent=bytes_sent, reason=reason, shape=(2,), dtype=torch.float32)


def test_what_happens_outside_the_block_is_not_recorded():
    send()
    with trace() as t:
        pass
    send()
    assert not t.collectives
    assert t.bytes == 0


def test_collectives_of_one_kind_and_line_are_one_row_with_their_count_and_bytes():
    with trace() as t:
        for _ in range(3):
            send(bytes_sent=10)
        send(op="reduce_scatter")
    rows = [(row.op, row.count, row.bytes) for row in t.table()]
    assert rows == [("all_gather", 3, 30), ("reduce_scatter", 1, 8)]
    assert t.bytes == t.table().bytes == 38
    assert len(t.collectives) == 4


def test_a_decision_is_a_row_without_bytes_whose_reason_carries_its_details():
    with trace() as t:
        record_decision("aten.foo", "no rule", "gathered x")
    (row,) = t.table()
    assert (row.op, row.axis, row.reason, row.bytes) == ("aten.foo", "", "no rule: gathered x", 0)
    assert t.decisions[0].op == "aten.foo"


def test_the_text_names_op_reason_and_the_line_of_the_program():
    with trace() as t:
        send(reason="matmul wants whole rows")
    text = str(t.table())
    assert "all_gather" in text
    assert "matmul wants whole rows" in text
    assert "test_trace.py:" in text
    assert str(t) == text


def test_square_brackets_in_a_reason_are_text_not_markup():
    with trace() as t:
        send(reason="f32[8@tp] [bold]")
    console = Console(file=io.StringIO(), width=150)
    console.print(t.table())
    assert "f32[8@tp] [bold]" in str(t.table())
    assert "f32[8@tp] [bold]" in console.file.getvalue()


def test_traces_nest_and_the_inner_one_sees_only_its_block():
    with trace() as outer:
        send()
        with trace() as inner:
            send()
    assert (len(outer.collectives), len(inner.collectives)) == (2, 1)


def test_other_threads_are_seen():
    with trace() as t:
        thread = threading.Thread(target=send)
        thread.start()
        thread.join()
    assert len(t.collectives) == 1


def test_a_block_that_raises_ends_its_trace():
    t = trace()
    with pytest.raises(KeyError), t:
        raise KeyError
    send()
    assert not t.collectives


def _kernels_in_the_way() -> int:
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::"))
    return sum(torch._C._dispatch_has_kernel_for_dispatch_key(name, "BackendSelect") for name in names)


def test_calls_of_process_groups_are_looked_at_only_while_somebody_traces():
    assert _kernels_in_the_way() == 0
    with trace(), trace():
        assert _kernels_in_the_way() > 15
    assert _kernels_in_the_way() == 0
