"""What the host reads of a tensor that the call made: a replay would read something else."""

import enum
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import shardwright as sw

GIVEN = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3), -torch.arange(6.0).view(2, 3)


def written_through_a_view(x):
    c = torch.zeros(3)
    c[0] = x.sum()
    return x + 1 if c.sum().item() > 0 else x - 1


def written_in_a_loop(x):
    out = torch.zeros(2, 3)
    for row in range(2):
        out[row] = x[row]
    return x * 2 if out.max().item() > 4 else x


def a_view_of_before(x):
    c = torch.zeros(3)
    view = c[0:1]
    c.copy_(x[0] + 1)
    return x * view.item()


def one_of_several_views(x):
    a, b = torch.zeros(2).unbind()
    a.add_(x.sum())
    return x + b + float(a)


def given_to_out(x):
    c = torch.zeros(2, 3)
    torch.mul(x, 2, out=c)
    return x * int(c.sum())


def given_to_several_outs(x):
    values, places = torch.zeros(2), torch.zeros(2, dtype=torch.long)
    torch.max(x, 1, out=(values, places))
    return x + places.tolist()[0]


def packed(x):
    lengths = (x[0, 1] > 0).long() + torch.tensor([1, 1])
    data = pack_padded_sequence(x[:, :, None], lengths, batch_first=True, enforce_sorted=False).data
    return data.sum() / data.shape[0]


def unpacked(x):
    return pad_packed_sequence(PackedSequence(x.reshape(-1, 1), torch.tensor([3, 3])))[0].sum(1)


POOL = ThreadPoolExecutor(1)


def read_on_another_thread(x):
    return x * POOL.submit(lambda: x.sum().item()).result()


def kept_sparse(x):
    return x * x.clamp(min=0).to_sparse().values().shape[0]


def nested(x):
    return torch.nested.nested_tensor([x, x[:1]]).to_padded_tensor(0.0).sum()


def a_list_of_them(x):
    return x * torch.tensor([x[0, 1], x[0, 2], 1.0])


def a_list_of_lists(x):
    return x * torch.as_tensor([[x[0, 1], 1.0], [1.0, x[0, 2]]]).sum()


def a_list_for_an_old_constructor(x):
    return x * torch.FloatTensor([x[0, 1], x[0, 2], 1.0])


def a_list_for_a_new_one(x):
    return x * x.new_tensor([x[0, 1]])


def numpy_by_dlpack(x):
    return x * float(np.from_dlpack(x)[0, 1])


READ = [
    a_list_of_them, a_list_of_lists, a_list_for_an_old_constructor, a_list_for_a_new_one, numpy_by_dlpack,
    written_through_a_view, written_in_a_loop, a_view_of_before, one_of_several_views, given_to_out,
    given_to_several_outs, packed, unpacked, kept_sparse, nested, read_on_another_thread,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("program", READ, ids=lambda program: program.__name__)
def test_what_is_read_of_it_is_that_of_this_call(program):
    POOL.submit(int).result()  # its thread waits from now on
    fast = sw.erase(program)
    for x in (*GIVEN, *GIVEN):
        assert torch.equal(fast(x), program(x))
    assert fast.report().recordings == 0


def by_a_mask():
    return lambda x: x * 2 if (x > -1.5).all() else x * 3


def by_its_own_count():
    count = torch.zeros((), dtype=torch.int64)

    def program(x):
        scaled = x * 2 if count < 3 else x * 3
        count.add_(1)
        return scaled

    return program


def by_rows_of_a_table():
    table = torch.arange(4.0)
    return lambda x: x * 2 if table[x.abs().long() % 4].sum() > 2 else x * 3


def by_a_gradient():
    weight = torch.nn.Parameter(torch.ones(3))

    def program(x):
        scaled = x * 2 if weight.grad is not None and weight.grad.min() < 0 else x * 3
        weight.grad = None
        (weight * x).sum().backward()
        return scaled

    return program


@pytest.mark.parametrize("make", [by_a_mask, by_its_own_count, by_rows_of_a_table, by_a_gradient])
def test_a_truth_of_what_is_there_before_a_call_is_asked_before_each_replay(make):
    program, fast = make(), sw.erase(make())
    for x in (*GIVEN, *GIVEN, *GIVEN):
        assert torch.equal(fast(x), program(x))
    assert fast.report().replays >= 5, str(fast.report())
    assert not fast.report().as_it_is, str(fast.report())


def by_what_it_wrote():
    seen = torch.zeros(2, 3)

    def program(x):
        seen[1:].add_(x[1:])
        return x * 2 if seen.sum() > 1 else x * 3

    return program


def by_a_list_that_it_wrote():
    seen = [torch.zeros(2, 3), torch.zeros(1, 3)]

    def program(x):
        torch._foreach_add_(seen, [x, x[1:]])
        return x * 2 if seen[1].sum() > 1 else x * 3

    return program


def by_chance():
    return lambda x: x * 2 if torch.rand(()) < 0.5 else x * 3


@pytest.mark.parametrize("make", [by_what_it_wrote, by_a_list_that_it_wrote, by_chance])
def test_a_truth_of_what_a_call_made_is_read_at_each_call(make):
    program, fast = make(), sw.erase(make())
    for turn, x in enumerate((*GIVEN, *GIVEN)):
        torch.manual_seed(turn)
        wanted = program(x)
        torch.manual_seed(turn)
        assert torch.equal(fast(x), wanted)
    assert fast.report().recordings > 0, str(fast.report())


SCALE = torch.ones(())


class Scaled(torch.autograd.Function):
    """Its backward decides by what stands there then."""

    @staticmethod
    def forward(_, x):
        return x * 1

    @staticmethod
    def backward(_, gradient):
        return gradient * 2 if SCALE > 0 else gradient * 3


def test_a_truth_that_a_backward_reads_is_that_of_its_own_time():
    fast = sw.erase(Scaled.apply)
    for before, behind in ((1, 1), (1, 1), (1, -1), (-1, 1)):
        x = torch.ones(2, requires_grad=True)
        SCALE.fill_(before)
        out = fast(x)
        SCALE.fill_(behind)
        out.sum().backward()
        assert torch.equal(x.grad, torch.full((2,), 2.0 if behind > 0 else 3.0))


CALLS = {"n": 0, "scale": 2.0}


@torch.library.custom_op("shardwright_test::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    """What an operator of the user's does in Python."""
    CALLS["n"] += 1
    return torch.from_numpy(x.numpy() * CALLS["scale"])


def test_what_an_operator_does_in_python_a_replay_does_again():
    fast = sw.erase(lambda x: scaled(x) + 1)
    for turn, x in enumerate((*GIVEN, *GIVEN)):
        CALLS["scale"] = 2.0 + turn // 3
        assert torch.equal(fast(x), x * CALLS["scale"] + 1)
    assert (fast.report().replays, CALLS["n"]) == (5, 6), str(fast.report())


class Mode(str, enum.Enum):  # noqa: UP042 - as programs have them
    """A text whose class has methods."""

    HALF, WHOLE = "half", "whole"

    def applied(self, x):
        return x / 2 if self is Mode.HALF else x


def test_methods_of_texts_are_found():
    settings = {"mode": Mode.HALF}
    fast = sw.erase(lambda x: settings["mode"].applied(x) + 0)
    for turn, x in enumerate((*GIVEN, *GIVEN)):
        settings["mode"] = Mode.WHOLE if turn >= 4 else Mode.HALF
        assert torch.equal(fast(x), x if turn >= 4 else x / 2)
    assert fast.report().replays == 4, str(fast.report())


def a_constant_that_is_written(x):
    c = torch.tensor([1.0, 2.0, 3.0])
    c[0] += x.sum()
    return x * c


def a_view_that_is_only_read(x):
    c = torch.zeros(3)
    c[1:] = 2
    return x * c if c.sum().item() == 4 else x


@pytest.mark.parametrize("program", [a_constant_that_is_written, a_view_that_is_only_read])
def test_what_depends_on_nothing_given_may_be_read_and_written(program):
    fast = sw.erase(program)
    for x in (*GIVEN, *GIVEN):
        assert torch.equal(fast(x), program(x))
    assert fast.report().replays > 0, str(fast.report())
