"""What is computed from a pending value, element by element or as a statistic, is finished as that is."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.errors import ImplicitRedistributionError
from shardwright.testing.meshes import rank_mesh
from tests.tensor.cases import close
from tests.witness.witness import Witness

WIDTH, INNER = 16, 32


def _by_variance(h, w):
    mean, variance = h.mean(-1, keepdim=True), h.var(-1, keepdim=True, unbiased=False)
    return w * (h - mean) / torch.sqrt(variance + 1e-5)


def _centred_twice(h, w):
    mean = h.mean(-1, keepdim=True)
    variance = (h - mean).pow(2).mean(-1, keepdim=True)
    return w * ((h - mean) * torch.rsqrt(variance + 1e-5))


def _dims_put_back(h, w):
    mean = h.mean(-1).unsqueeze(-1)
    return w * (h - mean) / (((h - mean) ** 2).mean(-1)[..., None] + 1e-5).sqrt()


def _by_sums(h, w):
    centred = h - h.sum(-1, keepdim=True) / WIDTH
    return w * (centred * torch.rsqrt((centred * centred).sum(-1, keepdim=True) / WIDTH + 1e-5))


def _by_squares(h, w):
    mean = h.mean(-1, keepdim=True)
    variance = (h * h).mean(-1, keepdim=True) - mean * mean
    return w * (h - mean) * torch.rsqrt(variance + 1e-5)


def _scaled_before(h, w):
    return w * (h * 0.5).pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt() * h


def _dropped(h, w):
    return functional.layer_norm(functional.dropout(h, 0.25), (WIDTH,), w)


NORMS = {
    "a layer norm": lambda h, w: functional.layer_norm(h, (WIDTH,), w),
    "by variance": _by_variance,
    "centred twice": _centred_twice,
    "dims put back": _dims_put_back,
    "by sums": _by_sums,
    "by squares": _by_squares,
    "by length": lambda h, w: w * h / h.norm(dim=-1, keepdim=True).clamp(min=1e-6),
    "scaled before": _scaled_before,
    "a function": lambda h, w: torch.tanh(w * h),
    "dropped": _dropped,
}


class _Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.scales = nn.Parameter(torch.rand(2, WIDTH) + 0.5)
        self.up, self.up2 = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down, self.down2 = (nn.Linear(INNER, WIDTH, bias=False) for _ in range(2))

    def forward(self, x):
        x = x + self.down(self.up(self.norm(x, self.scales[0])).relu())
        return x + self.down2(self.up2(self.norm(x, self.scales[1])).relu())


class _Again(nn.Sequential):
    """Blocks of which nothing inside is saved: their forwards run again in the backward."""

    def forward(self, x):
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def _model(norm, kind=nn.Sequential):
    torch.manual_seed(0)
    return kind(_Block(norm), _Block(norm))


def _placed(model, mesh):
    cuts = {"up": 0, "up2": 0, "down": 1, "down2": 1}
    for path, module in model.named_modules():
        dim = cuts.get(path.rsplit(".", 1)[-1])
        placement = sw.Replicate() if dim is None else sw.Shard(dim)
        for n, p in list(module.named_parameters(recurse=False)):
            module.register_parameter(n, nn.Parameter(sw.distribute_tensor(p.detach(), mesh, [placement])))
    return model


def _forward(model, seed):
    torch.manual_seed(seed)
    return model(torch.randn(3, 5, WIDTH)).square().sum()


def _step(model, seed):
    model.zero_grad()
    loss = _forward(model, seed)
    loss.backward()
    return loss


def _assert_gradients(ours, plain):
    for (n, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        error = (p.grad.full_tensor() - q.grad).abs().max() / q.grad.abs().max()
        assert error < 1e-5, (n, float(error))


def _each_stream_is_finished_once(name, recorded):
    mesh = rank_mesh((2,), ("tp",))
    plain, ours = _model(NORMS[name]), _placed(_model(NORMS[name]), mesh)
    with torch.set_grad_enabled(recorded):
        for seed in (1, 2):
            with sw.spmd(mesh, check=False), Witness() as witness:
                loss = _step(ours, seed) if recorded else _forward(ours, seed)
            expected = _step(plain, seed) if recorded else _forward(plain, seed)
            close(loss, expected)
            if recorded:
                _assert_gradients(ours, plain)
            sent = [call.kind for call in witness.asked]
            # a norm finishes its stream, the loss its own, and backward each norm but the first
            assert sent == ["all_to_all"] * (7 if recorded else 4), sent


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_written_by_hand_finishes_its_stream_once(ranks, name, recorded):
    ranks(2, _each_stream_is_finished_once, name, recorded)


def _what_a_checkpoint_saves_is_known(name):
    """Forward 4, each block's inner stream once more, backward 3."""
    mesh = rank_mesh((2,), ("tp",))
    plain, ours = _model(NORMS[name]), _placed(_model(NORMS[name], _Again), mesh)
    for seed in (1, 2):
        with sw.spmd(mesh, check=False), Witness() as witness:
            close(_step(ours, seed), _step(plain, seed))
        _assert_gradients(ours, plain)
        assert len(witness.asked) == 9


@pytest.mark.parametrize("name", ["a layer norm", "centred twice", "by squares"])
def test_streams_of_a_checkpoint_are_finished_once(ranks, name):
    ranks(2, _what_a_checkpoint_saves_is_known, name)


def _other_names():
    """Of what was finished another name takes the form while nobody writes, through any of the names."""
    mesh = rank_mesh((2,), ("tp",))
    with sw.spmd(mesh):
        for write in (None, lambda h, d: h.mul_(2.0), lambda h, d: d.mul_(2.0), lambda h, d: h[0].mul_(2.0)):
            h = _terms(mesh)
            d, part = h.detach(), h.detach()[1:]
            h.square()
            if write is not None:
                write(h, d)
            expected = h.clone().full_tensor()
            with sw.trace() as sent:
                close(d.square(), expected.square())
                close(d.square(), expected.square())
            assert len(sent.collectives) == (0 if write is None else 1)
            close(part.square(), expected[1:].square())
            d.mul_(d)
            close(h.exp(), expected.square().exp())


def _other_parts():
    """Of a value in one memory: parts of equal size, and of another that begin at the same place."""
    mesh = rank_mesh((2,), ("tp",))
    with sw.spmd(mesh):
        h = _terms(mesh)
        first, second, more = h.detach()[:2], h.detach()[1:3], h.detach()[:3]
        close(first.square(), _X[:2].square())
        close(second.square(), _X[1:3].square())
        close(more.square(), _X[:3].square())
        close(h.square(), _X.square())


def test_other_parts_of_one_memory_are_finished_for_themselves(ranks):
    ranks(2, _other_parts)


def test_other_names_of_what_was_finished(ranks):
    ranks(2, _other_names)


_X = torch.arange(24.0).view(4, 6) / 7


def _terms(mesh, x=_X):
    """A pending sum whose memory nobody else has."""
    return sw.DTensor.from_local(x / 2, mesh, [sw.Partial()]) * 1.0


def _written_between():
    """What changed since is not what the value was made of."""
    mesh = rank_mesh((2,), ("tp",))
    half = sw.distribute_tensor(torch.full((6,), 0.5), mesh, [sw.Replicate()])
    with sw.spmd(mesh):
        for write in (
            lambda h, w: h.mul_(3.0),
            lambda h, w: h[1:].mul_(3.0),
            lambda h, w: w.mul_(3.0),
            lambda h, w: setattr(h, "data", h.detach() * 5.0),
            lambda h, w: h.detach().mul_(3.0),
        ):
            h, w = _terms(mesh), half.clone()
            scaled, mean = h * w, h.mean(-1, keepdim=True)
            write(h, w)
            close(scaled.square(), (_X * 0.5).square())
            close(mean.square(), _X.mean(-1, keepdim=True).square())
            h = _terms(mesh)
            scaled, mean = h * half, h.mean(-1, keepdim=True)
            scaled.mul_(2.0)
            mean.add_(1.0)
            close(h - mean, _X - _X.mean(-1, keepdim=True) - 1)
            close(scaled.square(), _X.square())


def test_what_was_written_between_is_seen(ranks):
    ranks(2, _written_between)


def _explicit_sends_nothing():
    mesh = rank_mesh((2,), ("tp",))
    with sw.spmd(mesh), sw.trace() as sent:
        h = _terms(mesh)
        with sw.explicit():
            centred = h - h.mean(-1, keepdim=True)
            scaled = h * 0.5
            with pytest.raises(ImplicitRedistributionError):
                scaled.square()
        assert centred.placements == scaled.placements == (sw.Partial(),)
        assert not sent.collectives
        close(scaled.square(), (_X / 2).square())
        close(centred.square(), (_X - _X.mean(-1, keepdim=True)).square())


def test_explicit_code_sends_nothing_for_what_is_centred(ranks):
    ranks(2, _explicit_sends_nothing)


def _chains_end():
    """A value that is scaled again and again keeps few of what it was; the last is right."""
    mesh = rank_mesh((2,), ("tp",))
    with sw.spmd(mesh):
        x, were = _terms(mesh), []
        for _ in range(60):
            x = x * 1.01
            were.append(weakref.ref(x._local_tensor))
        gc.collect()
        assert sum(local() is not None for local in were) < 20
        with sw.trace() as sent:
            close(x.square(), (_X * 1.01**60).square())
        assert len(sent.collectives) == 1


def test_chains_are_short(ranks):
    ranks(2, _chains_end)


def _dropout_of_terms():
    mesh = rank_mesh((2,), ("tp",))
    for p, training in ((0.5, True), (0.0, True), (1.0, True), (0.3, False)):
        torch.manual_seed(3)
        expected = functional.dropout(_X, p, training)
        with sw.spmd(mesh):
            h = _terms(mesh)
            torch.manual_seed(3)
            with sw.trace() as sent:
                found = nn.Dropout(p).train(training)(h)
            assert found.placements == (sw.Partial(),)
            assert not sent.collectives
            close(found, expected)
            torch.manual_seed(3)
            close(torch.dropout(h, p, training), expected)
    with pytest.raises(ValueError, match="between 0 and 1"):
        functional.dropout(_terms(mesh), 1.5)


def test_dropout_of_terms_sends_nothing(ranks):
    ranks(2, _dropout_of_terms)


def _read_twice_by_one_call():
    mesh = rank_mesh((2,), ("tp",))
    h = _terms(mesh)
    with sw.trace() as sent:
        close(h * h, _X * _X)
    assert sum(event.bytes_sent for event in sent.collectives) == 2 * _X.numel() // 2 * 4 // 2 * 2


def test_an_operand_in_two_places_moves_once(ranks):
    ranks(2, _read_twice_by_one_call)
